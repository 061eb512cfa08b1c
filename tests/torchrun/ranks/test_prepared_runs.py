"""Calls like earlier ones run in fewer steps. Their results are those of the plain module and of the general path."""

from __future__ import annotations

import contextvars
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import instep
from instep.engines.torchrun.backward import RankBackward
from instep.engines.torchrun.engine import TorchrunEngine
from instep.errors import LostExchange

from ..in_ranks import DEVICE
from .conftest import Wrap, assert_same_training, batches

RANK, COUNT = dist.get_rank(), dist.get_world_size()
LAST = COUNT - 1
WARM_UP = 5
LONG, SHORT = 4 * COUNT + 1, 2 * COUNT

pytestmark = [
    pytest.mark.skipif(COUNT == 1, reason="a single rank runs all calls on one device"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="calls on accelerators have no prepared runs"),
]


class Runs:
    """What prepared runs have done."""

    def __init__(self) -> None:
        self.forwards: list[str] = []
        """For each forward of the engine: "general", "prepared", or "lost" if it has to run again."""
        self.captured: list[bool] = []
        """For each backward, whether gradients were captured instead of accumulated."""

    def clear(self) -> None:
        self.forwards.clear()
        self.captured.clear()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    record = Runs()
    forward, leaves_to_capture = TorchrunEngine.forward, RankBackward._leaves_to_capture

    def recorded_forward(self: TorchrunEngine, call: Any, *, prepared: bool = False) -> Any:
        record.forwards.append("prepared" if prepared else "general")
        try:
            return forward(self, call, prepared=prepared)
        except LostExchange:
            record.forwards[-1] = "lost"
            raise

    def recorded_leaves(self: RankBackward, *arguments: Any) -> Any:
        leaves = leaves_to_capture(self, *arguments)
        record.captured.append(leaves is not None)
        return leaves

    monkeypatch.setattr(TorchrunEngine, "forward", recorded_forward)
    monkeypatch.setattr(RankBackward, "_leaves_to_capture", recorded_leaves)
    return record


class Net(nn.Module):
    """Between its layers, does what `choice` says with samples whose first value is above 50."""

    def __init__(self, choice: Callable[[Net, Tensor], Tensor] = lambda _, hidden: hidden) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 2)
        self.register_buffer("count", torch.zeros(()))
        self.notes: list[Any] = []
        self.last = 0
        self.choice = choice

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        marked = x[:, :1] > 50
        if bool(marked.any()):
            hidden = torch.where(marked, self.choice(self, hidden), hidden)
        return self.outer(hidden)


def sample(size: int = LONG, *, rank: int | None = None, marked: bool = False) -> Tensor:
    """A batch; `marked` on all samples, or on those of one rank."""
    x = torch.rand(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    if rank is not None:
        sizes = instep.split(torch.zeros(size), COUNT).sizes
        x[sum(sizes[:rank]) : sum(sizes[: rank + 1]), 0] += 100
    elif marked:
        x[:, 0] += 100
    return x


@contextmanager
def other_state_on_one_rank() -> Iterator[None]:
    """On one rank, filters warnings that nobody gives: its calls have no prepared run for that."""
    with warnings.catch_warnings():
        if RANK == LAST:
            warnings.filterwarnings("ignore", "a text that no warning has")
        yield


def warm_up(model: instep.DataParallel, runs: Runs, size: int = LONG) -> None:
    """Train until the calls have prepared runs."""
    for _ in range(WARM_UP):
        model(sample(size)).square().sum().backward()
    assert runs.forwards[-1] == "prepared"
    assert runs.captured[-1]
    runs.clear()
    model.zero_grad()


def check_step(model: instep.DataParallel, plain: nn.Module, x: Tensor) -> None:
    """A step of both, without an optimizer."""
    outputs = []
    for module in (model, plain):
        module.zero_grad()
        outputs.append(module(x.clone()))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    assert_same_gradients(model, plain)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def assert_same_state(model: instep.DataParallel, plain: nn.Module) -> None:
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(module(x), y)


def test_training(wrap: Wrap, runs: Runs) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    data = batches(*[LONG, SHORT, LONG, LONG + 1] * 6)
    assert_same_training(wrap(plain), plain, data, loss_of)
    assert runs.forwards[-6:] == ["prepared"] * 6
    assert all(runs.captured[-6:])
    assert "lost" not in runs.forwards


def test_a_loss_in_the_module(wrap: Wrap, runs: Runs) -> None:
    """Also with samples that do not count, on all ranks or on one."""
    torch.manual_seed(0)
    plain = Net().double()
    model = instep.DataParallel(instep.with_loss(copy.deepcopy(plain), nn.CrossEntropyLoss(ignore_index=1)))
    ignored = torch.arange(LONG) % 2
    for step in range(12):
        y = ignored.sort(descending=step % 3 == 0).values if step % 4 else ignored
        losses = []
        for loss, module in ((model(sample(), y), model), (cross_entropy(plain(sample()), y, ignore_index=1), plain)):
            module.zero_grad()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
        assert_same_gradients(model, plain)
    assert runs.forwards[-4:] == ["prepared"] * 4


class Mixed(nn.Module):
    """A dictionary and strings in, a nested dictionary out; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor], names: list[str], *, gain: float = 1.0) -> dict[str, Any]:
        hidden = self.drop(self.left(batch["a"]) + self.right(batch["b"])) * gain
        return {"hidden": hidden, "more": (hidden.sum(1), [name.upper() for name in names]), "none": None}


def test_the_same_bits_as_the_general_path(wrap: Wrap, runs: Runs) -> None:
    """With draws, dictionaries, strings and keywords."""
    results = []
    for enabled in (True, False):
        torch.manual_seed(1)
        model = wrap(Mixed())
        model._instep_runner.prepared_calls.enabled = enabled
        found: list[Tensor] = []
        for step in range(8):
            batch = {"a": torch.randn(LONG, 4), "b": torch.randn(LONG, 4)}
            names = [f"name {step} {i}" for i in range(LONG)]
            output = model(batch, names, gain=2.0)
            assert output["more"][1] == [name.upper() for name in names]
            output["more"][0].sum().backward()
            found += [output["hidden"].detach(), model.module.left.weight.grad.clone(), torch.get_rng_state()]
        results.append(found)
        assert ("prepared" in runs.forwards) is enabled
        runs.clear()
    assert all(map(torch.equal, *results))


def _set_attribute(net: Net, hidden: Tensor) -> Tensor:
    net.last = 7
    return hidden


def _append(net: Net, hidden: Tensor) -> Tensor:
    net.notes.append("seen")
    return hidden


def _write_buffer(net: Net, hidden: Tensor) -> Tensor:
    net.count += 1
    return hidden


def _gather(_: Net, hidden: Tensor) -> Tensor:
    return hidden - instep.all_gather(hidden).mean(0)


def _recompute(_: Net, hidden: Tensor) -> Tensor:
    return checkpoint(torch.sin, hidden, use_reentrant=False)


def _recompute_reentrant(_: Net, hidden: Tensor) -> Tensor:
    return checkpoint(torch.sin, hidden, use_reentrant=True)


def _recompute_without_rng(_: Net, hidden: Tensor) -> Tensor:
    return checkpoint(torch.sin, hidden, use_reentrant=True, preserve_rng_state=False)


def _drop_hidden(_: Net, hidden: Tensor) -> Tensor:
    """Draws random numbers, which advances the generator, and ignores them."""
    torch.nn.functional.dropout(hidden)
    return hidden * 2


class _BackwardInside(torch.autograd.Function):
    """Computes a part of its gradient by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            x.sin().backward(gradient)
        assert x.grad is not None
        return x.grad


def _custom_function(_: Net, hidden: Tensor) -> Tensor:
    return _BackwardInside.apply(hidden)


CHOICES = [
    _set_attribute,
    _append,
    _write_buffer,
    _gather,
    _recompute,
    _recompute_reentrant,
    _recompute_without_rng,
    _custom_function,
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.__name__)
def test_a_forward_that_does_something_new(wrap: Wrap, runs: Runs, choice: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = Net(choice).double()
    state = {"notes": "first", "last": "first"} if choice in (_set_attribute, _append) else {"count": "first"}
    model = wrap(plain, state=state)
    warm_up(model, runs)
    for marked in (True, False, True, True, False):
        check_step(model, plain, sample(marked=marked))
    assert_same_state(model, plain)
    assert model.module.last == plain.last
    assert model.module.notes == plain.notes


@pytest.mark.parametrize(
    "choice", [_recompute, _custom_function, _recompute_reentrant, _recompute_without_rng], ids=lambda c: c.__name__
)
def test_one_rank_does_something_new(wrap: Wrap, runs: Runs, choice: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = Net(choice).double()
    model = wrap(plain)
    warm_up(model, runs)
    for _ in range(3):
        check_step(model, plain, sample(rank=LAST))
        check_step(model, plain, sample())


def test_an_error_of_one_rank(wrap: Wrap, runs: Runs) -> None:
    def fail(_: Net, hidden: Tensor) -> Tensor:
        raise KeyError("in the middle")

    plain = Net(fail).double()
    model = wrap(plain)
    warm_up(model, runs)
    state, rng_state = copy.deepcopy(model.module.state_dict()), torch.get_rng_state()
    for _ in range(3):
        with pytest.raises(KeyError, match="in the middle"):
            model(sample(rank=LAST))
        torch.testing.assert_close(model.module.state_dict(), state)
        assert torch.equal(torch.get_rng_state(), rng_state)
        check_step(model, plain, sample())


def test_an_argument_that_is_written(wrap: Wrap, runs: Runs) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 50).any()):
                x.mul_(0.5)
            return self.layer(x)

    plain = Writes().double()
    model = wrap(plain)
    warm_up(model, runs)
    for marked in (True, False, True):
        ours, expected = sample(marked=marked), sample(marked=marked)
        torch.testing.assert_close(model(ours), plain(expected))
        torch.testing.assert_close(ours, expected)


def test_ranks_that_do_not_agree_on_the_path(wrap: Wrap, runs: Runs) -> None:
    """Each rank takes its own."""
    torch.manual_seed(0)
    plain = Net().double()
    model = wrap(plain)
    warm_up(model, runs)
    model._instep_runner.prepared_calls.enabled = RANK != LAST
    for _ in range(3):
        check_step(model, plain, sample())
    assert runs.forwards == ["general" if RANK == LAST else "prepared"] * 3


@pytest.mark.parametrize("choice", [*CHOICES, _drop_hidden], ids=lambda choice: choice.__name__)
def test_something_new_where_ranks_take_different_paths(
    wrap: Wrap, runs: Runs, choice: Callable[[Net, Tensor], Tensor]
) -> None:
    """If the call has to run again, all ranks run it from its start."""
    torch.manual_seed(0)
    plain = Net(choice).double()
    state = {"notes": "first", "last": "first"} if choice in (_set_attribute, _append) else {"count": "first"}
    model = wrap(plain, state=state)
    warm_up(model, runs)
    for marked in (True, True, False):
        with other_state_on_one_rank():
            check_step(model, plain, sample(marked=marked))
    assert_same_state(model, plain)
    check_step(model, plain, sample())


def test_an_argument_that_another_method_writes(wrap: Wrap, runs: Runs) -> None:
    """Prepared runs end. They end on all ranks, whatever path each has taken."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def bump(self, x: Tensor) -> Tensor:
            x.add_(1)
            return x

    plain = Writes().double()
    model = wrap(plain)
    warm_up(model, runs)
    x = sample()
    model.call("bump", x)
    torch.testing.assert_close(x, sample() + 1)
    for _ in range(3):
        with other_state_on_one_rank():
            check_step(model, plain, sample())
    assert set(runs.forwards) == {"general"}


def test_one_rank_is_in_autocast(wrap: Wrap, runs: Runs) -> None:
    """Each rank computes in its own mode, as on the general path."""
    torch.manual_seed(0)
    model = wrap(Net())
    x = torch.rand(LONG, 3)
    for _ in range(WARM_UP):
        model(x).sum().backward()
    assert runs.forwards[-1] == "prepared"
    runs.clear()
    with torch.autocast("cpu") if RANK == LAST else nullcontext():
        output = model(x)
    assert runs.forwards == ["general" if RANK == LAST else "prepared"]
    assert len(output) == LONG


def test_changes_of_the_caller_reach_the_next_call(wrap: Wrap, runs: Runs) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = wrap(plain)

    def freeze(net: Any) -> None:
        net.inner.weight.requires_grad_(False)

    def replace_layer(net: Any) -> None:
        torch.manual_seed(3)
        net.outer = nn.Linear(5, 2).double()

    def scale(net: Any) -> None:
        with torch.no_grad():
            net.inner.weight.mul_(1.5)

    def set_data(net: Any) -> None:
        net.inner.bias.data = torch.ones(5, dtype=torch.float64)

    for change in (scale, freeze, set_data, replace_layer, nn.Module.eval, nn.Module.train):
        for _ in range(4):
            check_step(model, plain, sample())
        for net in (model.module, plain):
            change(net)
        check_step(model, plain, sample())
    for _ in range(WARM_UP):
        check_step(model, plain, sample())
    assert runs.forwards[-1] == "prepared"


def test_grad_mode_that_forward_leaves_off(wrap: Wrap, runs: Runs) -> None:
    class TurnsOff(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            torch.set_grad_enabled(not bool((x > 50).any()))
            return out

    plain = TurnsOff().double()
    model = wrap(plain)
    warm_up(model, runs)
    for rank in (None, LAST):
        output = model(sample(rank=rank, marked=True))
        assert torch.is_grad_enabled()
        assert output.requires_grad
    check_step(model, plain, sample())


def test_hooks_of_parameters(wrap: Wrap, runs: Runs) -> None:
    """Captured gradients reach the hooks of the module's parameters as accumulated ones do."""
    torch.manual_seed(0)
    plain = Net().double()
    model = wrap(plain)
    warm_up(model, runs)
    seen: dict[str, list[Tensor]] = {}
    for name, net in (("ours", model.module), ("plain", plain)):
        found = seen[name] = []
        net.inner.weight.register_hook(lambda gradient: gradient * 2)
        net.inner.weight.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
    for _ in range(2):
        check_step(model, plain, sample())
    assert runs.forwards == ["prepared"] * 2
    torch.testing.assert_close(seen["ours"], seen["plain"])
    assert len(seen["ours"]) == 2


def test_several_graphs_and_backwards(wrap: Wrap, runs: Runs) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = wrap(plain)
    warm_up(model, runs)
    for module in (model, plain):
        module.zero_grad()
        first, second = module(sample()), module(sample(marked=True))
        first.sum().backward(retain_graph=True)
        (first * second).sum().backward()
        gradients = torch.autograd.grad(module(sample()).sum(), [module.get_parameter(n) for n, _ in names(module)])
        assert all(gradient is not None for gradient in gradients)
    assert_same_gradients(model, plain)
    assert set(runs.forwards) == {"prepared"}
    with pytest.raises(RuntimeError, match="a second time"):
        first.sum().backward()


def names(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_gradients_do_not_change_with_the_next_backward(wrap: Wrap, runs: Runs) -> None:
    """Ranks add gradients in memory that they use again."""
    torch.manual_seed(0)
    model = wrap(Net().double())
    warm_up(model, runs)
    kept = []
    for step in range(4):
        model.zero_grad(set_to_none=True)
        (model(sample()) * (step + 1)).sum().backward()
        kept.append([(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()])
    for pairs in kept:
        for gradient, copied in pairs:
            assert torch.equal(gradient, copied)
    torch.testing.assert_close(kept[0][0][1] * 4, kept[3][0][1])


def test_arguments_and_graphs_are_freed(wrap: Wrap, runs: Runs) -> None:
    model = wrap(Net().double())
    warm_up(model, runs)
    gc.collect()
    gc.disable()
    try:
        x = sample()
        output = model(x)
        output.sum().backward()
        references = [weakref.ref(x), weakref.ref(output)]
        del x, output
        model(sample())  # Gloo may hold the tensors of the last message
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_inference(wrap: Wrap, runs: Runs) -> None:
    plain = Net().double().eval()
    model = wrap(plain)
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(model(sample()), plain(sample()))
    assert runs.forwards[-1] == "prepared"


def test_a_gradient_inside_no_sync_is_not_that_of_the_output(wrap: Wrap, runs: Runs) -> None:
    """The caller may write to the gradient of the output before the sum."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model = wrap(Shift())
    gradient = torch.empty(COUNT, 3, dtype=torch.float64)
    for _ in range(WARM_UP):
        model.zero_grad()
        with model.no_sync():
            model(sample(COUNT)).backward(gradient.fill_(1))
            gradient.zero_()
        assert model.module.shift.grad.tolist() == [[float(COUNT)] * 3]
    assert runs.forwards[-1] == "prepared"


def test_a_leaf_outside_of_the_module(wrap: Wrap, runs: Runs) -> None:
    """It gets the gradient of this rank's samples, also in prepared runs."""
    factor = torch.ones(2, dtype=torch.float64, requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * factor

    model = wrap(Scaled().double())
    found = []
    for _ in range(WARM_UP):
        factor.grad = None
        model(sample()).sum().backward()
        found.append(factor.grad.clone())
    assert runs.forwards[-1] == "prepared"
    assert not any(runs.captured)
    assert all(torch.equal(gradient, found[0]) for gradient in found)


def test_a_collective_of_a_constant(wrap: Wrap, runs: Runs) -> None:
    """Its backward runs on all ranks, though it leads to no parameter of one."""

    class Gathers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            if x.shape[1] == 3:
                return hidden
            sent = hidden.detach() if bool((x > 50).any()) else hidden
            return hidden + instep.all_gather(sent).sum(0)

    torch.manual_seed(0)
    module = Gathers().double()
    module.layer = _FirstColumns(3, 2).double()
    model = wrap(module)
    warm_up(model, runs)
    wide = [torch.cat([sample(rank=rank), sample()[:, :1]], 1) for rank in (None, LAST)]
    gradients = []
    for enabled in (True, False):
        model._instep_runner.prepared_calls.enabled = enabled
        model.zero_grad()
        for x in wide:
            model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


class _FirstColumns(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : self.in_features])


def test_context_variables_are_freed(wrap: Wrap, runs: Runs) -> None:
    class Value:
        pass

    variable = contextvars.ContextVar[Value]("variable")
    model, references = wrap(Net().double()), []
    for _ in range(WARM_UP):
        value = Value()
        references.append(weakref.ref(value))
        token = variable.set(value)
        model(sample()).sum().backward()
        variable.reset(token)
        del token, value
    assert runs.forwards[-1] == "prepared"
    gc.collect()
    assert [reference() for reference in references] == [None] * WARM_UP


def test_gradients_inside_no_sync(wrap: Wrap, runs: Runs) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = wrap(plain)
    warm_up(model, runs)
    for _ in range(3):
        for module in (model, plain):
            module.zero_grad()
        with model.no_sync():
            model(sample()).square().sum().backward()
        model(sample(SHORT)).square().sum().backward()
        plain(sample()).square().sum().backward()
        plain(sample(SHORT)).square().sum().backward()
        assert_same_gradients(model, plain)
