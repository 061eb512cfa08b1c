"""Prepared runs: what they run, and what they leave to the general path. Results are those of the plain module."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import os
import random
import signal
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.prepared import PreparedProcessRun
from instep.engines.processes.transport.cuda_ipc import IpcError
from instep.errors import BridgeError, InstepError, LostExchange, MergeError
from instep.runtime.process_role import inside_worker

SETTING = contextvars.ContextVar("SETTING", default=1.0)


@pytest.fixture(params=["processes"])  # the workers stay for the next test
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What prepared runs did, in order: "forward", "backward", or "lost"."""
    record: list[str] = []
    forward, run_backward = PreparedProcessRun.forward, PreparedProcessRun._backward

    def recorded_forward(self: PreparedProcessRun, *args: Any) -> Any:
        record.append("forward")
        try:
            return forward(self, *args)
        except LostExchange:
            record[-1] = "lost"
            raise

    def recorded_backward(self: PreparedProcessRun, *args: Any) -> Any:
        record.append("backward")
        return run_backward(self, *args)

    monkeypatch.setattr(PreparedProcessRun, "forward", recorded_forward)
    monkeypatch.setattr(PreparedProcessRun, "_backward", recorded_backward)
    return record


class Net(nn.Module):
    """Calls `before` in forward, in every replica, and `in_backward` in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(torch.tanh(self.inner(x)))

    def finish(self, hidden: Tensor) -> Tensor:
        return self.outer(hidden) + self.offset


def wrap(net: nn.Module, count: int = 2, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * count, engine="processes", **options)


def check_step(model: instep.DataParallel, plain: nn.Module, x: Tensor) -> None:
    """A training step of both; outputs and gradients have to agree."""
    for module in (model, plain):
        module.zero_grad()
    output, expected = model(x), plain(x)
    torch.testing.assert_close(output, expected)
    output.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def warm_up(model: instep.DataParallel, plain: nn.Module, runs: list[str], size: int = 6) -> None:
    """Run steps until prepared runs run them."""
    for _ in range(5):
        check_step(model, plain, torch.randn(size, 4))
    assert runs[-2:] == ["forward", "backward"], runs
    runs.clear()


@pytest.mark.parametrize("count", [2, 3])
def test_training_is_that_of_the_plain_module(runs: list[str], count: int) -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    with wrap(net, count) as model:
        optimizers = [torch.optim.AdamW(module.parameters(), 0.01) for module in (model, plain)]
        for step in range(24):
            check_step(model, plain, torch.randn(7 if step % 3 else 5, 4))
            for optimizer in optimizers:
                optimizer.step()
    assert runs.count("forward") == runs.count("backward") > 12
    assert "lost" not in runs


class Mixed(nn.Module):
    """A dictionary and strings in, a nested dictionary out; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor], names: list[str], *, gain: float = 1.0) -> dict[str, Any]:
        hidden = self.drop(self.left(batch["a"]) + self.right(batch["b"])) * gain
        return {"hidden": hidden, "more": (hidden.sum(1), [name.upper() for name in names])}


def test_dictionaries_strings_keywords_and_draws(runs: list[str]) -> None:
    """Also the same draws as by the general path, and the same advance of the generator."""
    results = []
    for enabled in (True, False):
        torch.manual_seed(1)
        net = Mixed()
        with wrap(net) as model:
            model._instep_runner.prepared_calls.enabled = enabled
            found: list[Tensor] = []
            for step in range(8):
                batch = {"a": torch.randn(5, 4), "b": torch.randn(5, 4)}
                names = [f"name {step} {i}" for i in range(5)]
                output = model(batch, names, gain=2.0)
                assert output["more"][1] == [name.upper() for name in names]
                output["more"][0].sum().backward()
                found += [output["hidden"].detach(), net.left.weight.grad.clone(), torch.get_rng_state()]
        results.append(found)
        assert ("forward" in runs) is enabled
        runs.clear()
    assert all(map(torch.equal, *results))


class Scores(NamedTuple):
    logits: Tensor
    best: Tensor


@dataclasses.dataclass
class Prediction:
    """What `Predicts` returns."""

    scores: Scores
    names: list[str]
    hidden: Tensor | None = None


class Predicts(nn.Module):
    """Returns a dataclass with a named tuple and an ordered dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, names: list[str]) -> OrderedDict[str, Any]:
        logits = self.linear(x)
        prediction = Prediction(Scores(logits, logits.argmax(1)), [name.upper() for name in names])
        return OrderedDict(prediction=prediction, total=logits.sum(1))


def test_outputs_in_containers_of_other_classes(runs: list[str]) -> None:
    torch.manual_seed(0)
    net = Predicts()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        for _ in range(8):
            x, names = torch.randn(5, 4), list("abcde")
            output, expected = model(x, names), plain(x, names)
            assert type(output) is OrderedDict
            one, other = output["prediction"], expected["prediction"]
            assert type(one) is Prediction
            assert type(one.scores) is Scores
            assert (one.names, one.hidden) == (other.names, None)
            torch.testing.assert_close([*one.scores, output["total"]], [*other.scores, expected["total"]])
            (one.scores.logits.square().sum() + output["total"].sum()).backward()
            (other.scores.logits.square().sum() + expected["total"].sum()).backward()
            torch.testing.assert_close(net.linear.weight.grad, plain.linear.weight.grad)
    assert runs.count("forward") == runs.count("backward") >= 4
    assert "lost" not in runs


def test_calls_without_gradients(runs: list[str]) -> None:
    net = Net()
    with wrap(net) as model, torch.no_grad():
        for _ in range(6):
            x = torch.randn(6, 4)
            output = model(x)
            torch.testing.assert_close(output, net(x))
            assert not output.requires_grad
    assert runs[-1] == "forward"


def test_several_graphs_and_backwards(runs: list[str]) -> None:
    """Two forwards before a backward, `retain_graph`, a part of the outputs, `no_sync`, and weights changed between."""
    net = Net()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        for module in (model, plain):
            module.zero_grad()
            first, second = module(x).sum(), module(y).pow(2)
            second[:3].sum().backward(retain_graph=True)
            second.sum().backward()
            first.backward()
            with pytest.raises(RuntimeError, match="second time"):
                second.sum().backward()
        with model.no_sync():
            model(x).sum().backward()
        plain(x).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        loss = model(x).pow(2).sum()
        with torch.no_grad():
            net.outer.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert runs.count("backward") == 4  # with the one that raises


class Changing(Net):
    """Does something else than in the calls before if the first value is above 9."""

    def __init__(self, action: Callable[[Changing, Tensor], Any]) -> None:
        super().__init__()
        self.action = action
        self.seen = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        if bool((x > 9).any()):
            result = self.action(self, hidden)
            hidden = hidden if result is None else result
        return self.finish(hidden)


def set_attribute(net: Changing, _: Tensor) -> None:
    net.seen = 1


def write_buffer(net: Changing, hidden: Tensor) -> None:
    net.count += len(hidden)


def subtract_mean(_: Changing, hidden: Tensor) -> Tensor:
    return hidden - instep.all_reduce(hidden.sum(0)) / instep.all_reduce(len(hidden))


@pytest.mark.parametrize(
    ("action", "check"),
    [
        (set_attribute, lambda net: net.seen == 1),
        (write_buffer, lambda net: net.count.item() == 6),
        (subtract_mean, lambda _: True),
    ],
)
def test_a_forward_that_does_something_new(
    runs: list[str], action: Callable[[Changing, Tensor], Any], check: Callable[[Changing], bool]
) -> None:
    net = Changing(action)
    plain = Changing(action)
    plain.load_state_dict(net.state_dict())
    with wrap(net, state={"count": "sum"}) as model:
        warm_up(model, plain, runs)
        for _ in range(2):
            x = torch.randn(6, 4).clamp(max=9) + torch.full((6, 1), 10.0)
            net.zero_grad()
            state = torch.get_rng_state()
            output = model(x)
            assert torch.equal(torch.get_rng_state(), state)
            if action is subtract_mean:
                hidden = torch.tanh(plain.inner(x))
                torch.testing.assert_close(output, plain.finish(hidden - hidden.mean(0)))
            else:
                torch.testing.assert_close(output, plain(x))
                assert check(net)
            net.count.zero_()
        assert ("lost" in runs) is (action is subtract_mean)
        check_step(model, plain, torch.randn(6, 4).clamp(max=9))


def test_a_forward_that_catches_the_error_of_a_collective(runs: list[str]) -> None:
    def try_collective(_: Changing, hidden: Tensor) -> Tensor:
        try:
            return hidden - instep.all_reduce(hidden.sum(0)) / instep.all_reduce(len(hidden))
        except InstepError:
            return hidden

    net = Changing(try_collective)
    plain = Net()
    with wrap(net) as model:
        plain.load_state_dict(net.state_dict(), strict=False)
        warm_up(model, plain, runs)
        x = torch.randn(6, 4).clamp(max=9) + torch.full((6, 1), 10.0)
        hidden = torch.tanh(plain.inner(x))
        torch.testing.assert_close(model(x), plain.finish(hidden - hidden.mean(0)))
    assert runs == ["lost"]


def test_a_wrapper_whose_calls_keep_changing_uses_the_general_path(runs: list[str]) -> None:
    net = Changing(subtract_mean)
    with wrap(net, probe=False) as model:
        for step in range(40):
            model(torch.full((6, 4), 10.0 if step % 5 == 4 else 1.0)).sum().backward()
    assert runs.count("lost") == 3
    assert runs[-1] == "lost"


def test_an_argument_that_is_written_in_some_calls(runs: list[str]) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 1] += (x[:, 0] > 9).float() * 3
            return super().forward(x)

    net = Writes()
    with wrap(net, probe=False) as model:
        net.inner.weight.requires_grad_(False)
        for value in (1.0, 1.0, 1.0, 1.0, 1.0, 10.0, 1.0, 10.0):
            x = torch.full((6, 4), value)
            expected = x.clone()
            torch.testing.assert_close(model(x), net(expected))
            assert torch.equal(x, expected)


class Selects(Net):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output[0] if bool((x > 9).any()) else output


def test_errors_of_a_merge_offer_the_same_lines(runs: list[str]) -> None:
    messages = []
    for warm in (0, 5):
        net = Selects()
        with wrap(net) as model:
            for _ in range(warm):
                model(torch.zeros(6, 4))
            with pytest.raises(MergeError) as caught:
                model(torch.full((6, 4), 10.0) * torch.tensor([1.0, 0, 0, 0, 0, 0])[:, None])
        messages.append(str(caught.value))
    assert runs[-1:] == ["forward"]
    assert messages[0] == messages[1]


def test_long_lists_use_the_general_path(runs: list[str]) -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, names: list[Tensor]) -> Tensor:
            return x + torch.stack(names).sum(1, keepdim=True)

    with wrap(Many()) as model:
        for _ in range(6):
            x, extra = torch.randn(150, 1), [torch.randn(2) for _ in range(150)]
            torch.testing.assert_close(model(x, extra), x + torch.stack(extra).sum(1, keepdim=True))
    assert runs == []


def test_sparse_gradients_and_unused_layers(runs: list[str]) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.used, self.unused = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.used(self.table(words).mean(1))

    net = Words()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        for _ in range(6):
            words = torch.randint(0, 9, (6, 3))
            for module in (model, plain):
                module.zero_grad()
                module(words).sum().backward()
            assert net.table.weight.grad.is_sparse
            torch.testing.assert_close(net.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())
            torch.testing.assert_close(net.used.weight.grad, plain.used.weight.grad)
            assert net.unused.weight.grad is None
    assert runs[-2:] == ["forward", "backward"]


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.step, self.inner(x), use_reentrant=True)
        return self.finish(hidden)

    def step(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden)


def test_reentrant_checkpoints_accumulate_gradients(runs: list[str]) -> None:
    net = Checkpointed()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)


class SometimesCheckpointed(Net):
    """Uses reentrant checkpoints only for long enough inputs, and a function that runs a backward in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if bool((x > 9).all()):
            hidden = checkpoint(torch.tanh, hidden, use_reentrant=True)
        elif bool((x > 8).all()):
            hidden = checkpoint(torch.tanh, hidden, use_reentrant=True, preserve_rng_state=False)
        elif bool((x < -9).all()):
            hidden = BackwardInBackward.apply(hidden, self.outer.weight, self)
        return self.finish(hidden)


class BackwardInBackward(torch.autograd.Function):
    """Adds the sum of a weight to each value. The gradient of the weight is accumulated by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, net: nn.Module) -> Tensor:
        ctx.weight = weight
        return hidden + weight.detach().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            torch.autograd.backward((ctx.weight.sum() * gradient.sum().detach(),))
        return gradient, None, None


def test_checkpoints_and_nested_backwards_in_some_calls_only(runs: list[str]) -> None:
    net = SometimesCheckpointed()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        for value in (10.0, 9.0, -10.0, 1.0):
            check_step(model, plain, torch.full((6, 4), value))
        assert runs == ["forward", "backward"] * 4


class TurnsGradModeOff(Net):
    def finish(self, hidden: Tensor) -> Tensor:
        out = super().finish(hidden)
        torch.set_grad_enabled(bool((out != out.detach()[0]).any()))
        return out


def test_grad_mode_that_forward_leaves_off(runs: list[str]) -> None:
    net = TurnsGradModeOff()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        output = model(torch.ones(6, 4))
        assert torch.is_grad_enabled()
        assert output.requires_grad
        check_step(model, plain, torch.randn(6, 4))


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


class Noisy(Net):
    def finish(self, hidden: Tensor) -> Tensor:
        return super().finish(DrawsInBackward.apply(hidden))  # type: ignore[no-untyped-call]


def test_draws_of_several_backwards_of_one_graph(runs: list[str]) -> None:
    """The second backward continues the stream of the first, and other graphs have streams of their own."""
    results = []
    for enabled in (True, False):
        torch.manual_seed(0)
        net, found = Noisy(), []
        with wrap(net, probe=False) as model:
            model._instep_runner.prepared_calls.enabled = enabled
            for _ in range(6):
                first, second = (model(torch.ones(6, 4)).sum() for _ in range(2))
                for loss, retain in ((first, True), (second, True), (first, False), (second, False)):
                    net.zero_grad()
                    loss.backward(retain_graph=retain)
                    found += [*(p.grad.clone() for p in net.parameters() if p.grad is not None), torch.rand(1)]
        results.append(found)
        assert ("forward" in runs) is enabled
        runs.clear()
    assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interruptions_at_any_time(runs: list[str]) -> None:
    """After each of them the wrapper gives the results of the plain module. Python ignores those in finalizers."""
    net = Net()
    plain, x = copy.deepcopy(net), torch.randn(6, 4)
    generator = random.Random(0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with wrap(net) as model:
            warm_up(model, plain, runs)
            for _ in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-4, 1e-2))
                    for _ in range(20):
                        model(x).sum().backward()
                    time.sleep(0.05)
                except KeyboardInterrupt:
                    pass
                check_step(model, plain, x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Failing(Net):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 9).any()):
            raise ArithmeticError("too large")
        return super().forward(x)


@pytest.mark.parametrize("index", [0, 1])
def test_an_exception_keeps_its_type_and_names_the_replica(runs: list[str], index: int) -> None:
    net = Failing()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        x = torch.zeros(6, 4)
        x[3 * index] = 10.0
        with pytest.raises(ArithmeticError, match="too large") as caught:
            model(x)
        assert f"raised in replica {index} on cpu" in caught.value.__notes__
        assert runs == ["forward"]
        for _ in range(5):
            check_step(model, plain, torch.zeros(6, 4))
        assert runs[-1] == "backward"


class Interrupted(Net):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 9).any()) and not inside_worker():
            with torch.no_grad():
                raise KeyboardInterrupt
        return super().forward(x)


def test_an_interruption_leaves_the_wrapper_usable(runs: list[str]) -> None:
    net = Interrupted()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        with pytest.raises(KeyboardInterrupt):
            model(torch.full((6, 4), 10.0))
        assert torch.is_grad_enabled()
        assert runs == ["forward"]
        engine: Any = model._instep_engine
        client = engine.current_client(1)
        abandoned = "call", client.last_request_id
        assert abandoned in client.released  # the worker drops its graph
        for _ in range(3):
            check_step(model, plain, torch.zeros(6, 4))
        assert abandoned not in client.released


class Dying(Net):
    """Ends its worker process once: in forward, or in backward."""

    def __init__(self, mark: Path, in_backward: bool) -> None:
        super().__init__()
        self.mark, self.in_backward = mark, in_backward

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if inside_worker() and self.mark.exists():
            if not self.in_backward:
                self.end()
            output = EndsInBackward.apply(output, self)
        return output

    def end(self) -> None:
        with suppress(FileNotFoundError):  # another worker may have ended
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class EndsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Dying) -> Tensor:
        ctx.net = net
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.net.end()
        return gradient, None


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_worker_that_dies_is_replaced(runs: list[str], tmp_path: Path, in_backward: bool, count: int) -> None:
    net = Dying(tmp_path / "mark", in_backward)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    with wrap(net, count) as model:
        warm_up(model, plain, runs)
        x = torch.randn(6, 4)
        net.zero_grad()
        model(x).sum().backward()
        before = [parameter.grad.clone() for parameter in net.parameters()]
        net.mark.touch()
        net.zero_grad()
        started = time.monotonic()
        model(x).sum().backward()
        assert time.monotonic() - started < 30
        assert not net.mark.exists()
        assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))
        for _ in range(4):
            check_step(model, plain, torch.randn(6, 4))
        assert runs[-1] == "backward"


class CannotOpen(Dying):
    """Cannot open memory of the device once: in forward, or in backward."""

    def end(self) -> None:
        if self.mark.exists():
            self.mark.unlink()
            raise IpcError("the memory cannot be opened")


@pytest.mark.parametrize("in_backward", [False, True])
def test_memory_that_a_worker_cannot_open(
    runs: list[str], tmp_path: Path, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward or backward of that replica runs again without it. Workers on the CPU do not open such memory."""
    disabled: list[str] = []
    monkeypatch.setattr(WorkerClient, "disable_ipc", lambda _, reason: disabled.append(reason))
    net = CannotOpen(tmp_path / "mark", in_backward)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    with wrap(net, restarts=0) as model:
        warm_up(model, plain, runs)
        net.mark.touch()
        check_step(model, plain, torch.randn(6, 4))
        assert disabled == ["the memory cannot be opened"]
        assert runs == ["forward", "backward"] if in_backward else runs[0] == "forward"
        for _ in range(4):
            check_step(model, plain, torch.randn(6, 4))


def test_a_worker_that_died_between_forward_and_backward(runs: list[str]) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        x = torch.randn(6, 4)
        for module in (model, plain):
            module.zero_grad()
        output = model(x)
        engine: Any = model._instep_engine
        worker = engine._pool.get(1)
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while worker.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        output.pow(2).sum().backward()
        plain(x).pow(2).sum().backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_changes_of_the_caller_reach_the_next_call(runs: list[str]) -> None:
    """Attributes, weights, buffers, modes and settings of the process."""
    net = Net()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        for module in (net, plain):
            module.offset.fill_(2.0)
        check_step(model, plain, torch.randn(6, 4))
        for module in (net, plain):
            module.outer = nn.Linear(8, 3)
            module.outer.load_state_dict(net.outer.state_dict())
        check_step(model, plain, torch.randn(6, 4))
        for parameter in (net.inner.weight, plain.inner.weight):
            parameter.requires_grad_(False)
        for _ in range(4):
            net.zero_grad()
            plain.zero_grad()
            x = torch.randn(6, 4)
            model(x).sum().backward()
            plain(x).sum().backward()
            assert net.inner.weight.grad is None
            torch.testing.assert_close(net.inner.bias.grad, plain.inner.bias.grad)
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(6, 4)
            torch.testing.assert_close(model(x), plain(x))
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            torch.testing.assert_close(model(x), plain(x))
        finally:
            torch.set_num_threads(threads)


class Scaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SETTING.get()


def test_context_variables_reach_the_workers(runs: list[str]) -> None:
    net = Scaled()
    plain = copy.deepcopy(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        token = SETTING.set(3.0)
        try:
            check_step(model, plain, torch.randn(6, 4))
        finally:
            SETTING.reset(token)
        check_step(model, plain, torch.randn(6, 4))


def test_a_gradient_outside_of_the_backward_of_its_call(runs: list[str]) -> None:
    kept: list[Tensor] = []

    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            if not inside_worker():
                kept.append(hidden)
            return self.finish(hidden)

    net = Keeps()
    with wrap(net) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(5):
            model(torch.randn(6, 4)).sum().backward()
        model(torch.randn(6, 4))
        assert runs[-1] == "forward"
        with pytest.raises(BridgeError, match="a gradient reached a replica's parameter"):
            kept[-1].sum().backward()
        kept.clear()
        net.zero_grad()
        model(torch.ones(6, 4)).sum().backward()
        assert net.outer.bias.grad.tolist() == [6.0, 6.0, 6.0]
