"""Tools of torch around a wrapped module, against the plain one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import instep

ENGINES = ["threads", "processes"]
on_each_engine = pytest.mark.parametrize("engine", ENGINES)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def wrap(module: nn.Module, engine: str = "threads", **options: Any) -> Any:
    return instep.DataParallel(module, ["cpu"] * 2, engine=engine, **options)


def make(prepare: Callable[[Any], Any] | None = None) -> Any:
    torch.manual_seed(0)
    net = Net()
    if prepare is not None:
        prepare(net)
    return net


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator) for size in (6, 6, 5)]


def train(model: Any, after_step: Callable[[], None] = lambda: None, call: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = (call or model)(x).square().mean()
        loss.backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    states = actual.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    torch.testing.assert_close(*states, rtol=1e-10, atol=1e-10)


# Export


def test_export_gives_the_program_of_the_module() -> None:
    net = make().eval()
    with wrap(net) as model:
        x = torch.randn(6, 4)
        model(x)
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
        assert program.state_dict.keys() == net.state_dict().keys()
        for inputs in (x, x[:5]):
            torch.testing.assert_close(program.module()(inputs), net(inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trace_gives_the_function_of_the_module() -> None:
    net = make().eval()
    with wrap(net) as model:
        x = torch.randn(6, 4)
        model(x)
        traced = torch.jit.trace(model, (x,))
        assert traced.state_dict().keys() == net.state_dict().keys()
        torch.testing.assert_close(traced(x[:5]), net(x[:5]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_trace_the_wrapper_says_to_use_the_module() -> None:
    net = make().eval()
    with wrap(net) as model:
        x = torch.randn(6, 4)
        with pytest.raises(instep.WrapError, match=r"Script the plain module: torch\.jit\.script\(model\.module\)"):
            torch.jit.script(model)
        with pytest.raises(instep.WrapError, match=r"torch\.jit\.script\(model\.module\)"):
            torch.jit.script(nn.Sequential(model))
        with pytest.raises(Exception, match=r"torch\.export\.export\(model\.module, \.\.\.\)"):
            torch.export.export(model, (x,), strict=True)
        scripted = torch.jit.script(model.module)
        torch.testing.assert_close(scripted(x), model(x))


def test_functional_call() -> None:
    net, x = make().eval(), torch.randn(6, 4)
    with wrap(net) as model:
        weights = {name: 2 * value for name, value in model.named_parameters()}
        expected = torch.func.functional_call(net, weights, (x,))
        torch.testing.assert_close(torch.func.functional_call(model, weights, (x,)), expected)


# Copies and files


@on_each_engine
def test_save_the_whole_model_and_copy_it(engine: str) -> None:
    expected = make()
    train(expected)
    with wrap(make(), engine) as model:
        train(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            with other:
                assert isinstance(other, instep.DataParallel)
                assert_same(other, expected)
                again = copy.deepcopy(expected)
                assert train(other) == pytest.approx(train(again), rel=1e-10)
                assert_same(other, again)
        assert_same(model, expected)  # the copies have weights of their own


@on_each_engine
def test_conversion_to_other_dtypes(engine: str) -> None:
    net = make().eval()
    with wrap(net, engine) as model:
        x = torch.randn(5, 4)
        for convert, dtype in (
            (model.half, torch.float16),
            (model.bfloat16, torch.bfloat16),
            (model.float, torch.float32),
            (model.double, torch.float64),
        ):
            assert convert() is model
            output = model(x.to(dtype))
            assert output.dtype == dtype
            torch.testing.assert_close(output, net(x.to(dtype)))


# Training


@on_each_engine
def test_exponential_moving_average(engine: str) -> None:
    def run(model: Any) -> list[Any]:
        averages = [
            swa_utils.AveragedModel(model, avg_fn=lambda average, value, count: 0.9 * average + 0.1 * value),
            swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        ]
        train(model, lambda: [average.update_parameters(model) for average in averages][-1])
        for average in averages:
            swa_utils.update_bn(batches(), average)
        return averages

    plain = run(make())
    with wrap(make(), engine) as model:
        for average, expected in zip(run(model), plain, strict=True):
            assert_same(average, expected)
            x = torch.randn(5, 4)
            torch.testing.assert_close(average.eval()(x), expected.eval()(x))
            average.module.close()


@on_each_engine
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_call(engine: str, reentrant: bool) -> None:
    """Without reentrant autograd, the recomputation updates batch norm's statistics on one device only."""
    expected = make()

    def through(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(module, x.clone().requires_grad_(), use_reentrant=reentrant)

    losses = train(expected, call=through(expected))
    with wrap(make(), engine) as model:
        assert train(model, call=through(model)) == pytest.approx(losses, rel=1e-10)
        if reentrant:
            assert_same(model, expected)
        for actual, parameter in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(actual, parameter, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
        ),
    ],
    ids=["cosine", "plateau", "sequence"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR of torch 2.8
def test_schedules_and_clipping(make_schedule: Callable[[Any], Any]) -> None:
    def run(model: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule, history = make_schedule(optimizer), []
        for x in batches() * 2:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step(*([loss.item()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
            history += [loss.item(), norm.item(), optimizer.param_groups[0]["lr"]]
        return history

    def without_bias(net: Any) -> None:
        net.body[2] = nn.Linear(8, 8, bias=False)  # its gradient would be rounding error

    expected = run(make(without_bias))
    with wrap(make(without_bias)) as model:
        assert run(model) == pytest.approx(expected, rel=1e-8)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # LBFGS of torch 2.8
def test_lbfgs() -> None:
    def run(model: Any) -> list[float]:
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
        x = batches()[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    expected = run(make())
    with wrap(make()) as model:
        assert run(model) == pytest.approx(expected, rel=1e-8)


# Weights that are computed


@on_each_engine
@pytest.mark.parametrize(
    "prepare",
    [
        lambda net: parametrizations.weight_norm(net.head),
        lambda net: parametrizations.spectral_norm(net.head),
        lambda net: parametrizations.orthogonal(net.body[2]),
        lambda net: prune.l1_unstructured(net.head, "weight", 0.3),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "pruning"],
)
def test_parametrized_weights(prepare: Callable[[Any], Any], engine: str) -> None:
    expected = make(prepare)
    losses = train(expected)
    with wrap(make(prepare), engine) as model:
        assert train(model) == pytest.approx(losses, rel=1e-10)
        assert_same(model, expected)


@on_each_engine
def test_a_parametrization_that_is_added_and_removed_after_wrapping(engine: str) -> None:
    expected = make()
    with wrap(make(), engine) as model:
        for net in (expected, model):
            train(net)
            parametrizations.weight_norm(net.head)
        assert train(model) == pytest.approx(train(expected), rel=1e-10)
        for net in (expected, model):
            parametrize.remove_parametrizations(net.head, "weight")
        assert train(model) == pytest.approx(train(expected), rel=1e-10)
        assert_same(model, expected)


# Hooks and loops over modules


@on_each_engine
def test_hooks_on_parameters_see_the_gradient_of_the_whole_batch(engine: str) -> None:
    def run(net: Any) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def note(name: str) -> Callable[[Any], None]:
            return lambda value: seen.update({name: value.clone()})

        net.head.weight.register_hook(note("gradient"))
        net.head.weight.register_hook(lambda gradient: gradient * 2)
        net.head.bias.register_post_accumulate_grad_hook(lambda p: note("accumulated")(p.grad))
        net(batches()[0]).square().mean().backward()
        return {**seen, **{name: p.grad for name, p in net.named_parameters()}}

    expected = run(make())
    with wrap(make(), engine) as model:
        torch.testing.assert_close(run(model), expected, rtol=1e-10, atol=1e-10)


def test_loops_over_modules() -> None:
    """A summary of the layers, initialization by class, freezing by name."""
    expected = make()
    with wrap(make()) as model:
        for net in (expected, model):
            for module in net.modules():
                if isinstance(module, nn.Linear):
                    nn.init.constant_(module.bias, 0.5)
            for name, parameter in net.named_parameters():
                parameter.requires_grad = not name.startswith("body")

        def summary(net: nn.Module) -> list[tuple[str, str, int]]:
            return [(name, type(m).__name__, sum(map(Tensor.numel, m.parameters()))) for name, m in net.named_modules()]

        assert summary(model) == summary(expected)
        assert [type(child) for child in model.children()] == [type(child) for child in expected.children()]
        train(expected)
        train(model)
        assert_same(model, expected)
