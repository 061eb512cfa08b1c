"""torch.compile inside, in place, or around: the same numbers, one graph a replica, and none from call to call."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import instep

# torch's own, of an input that is no leaf; it is an error here only because warnings are.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

BACKEND = "eager"  # captured as any other, and quick; inductor has a test below
ENGINES = ["serial", "threads", "processes"]
Make = Callable[[nn.Module, str, int], nn.Module]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x))) * self.scale
        return out


def inside(net: nn.Module, engine: str, replicas: int) -> nn.Module:
    return instep.DataParallel(torch.compile(net, backend=BACKEND), ["cpu"] * replicas, engine=engine)  # type: ignore[arg-type]


def in_place(net: nn.Module, engine: str, replicas: int) -> nn.Module:
    net.compile(backend=BACKEND)
    return instep.DataParallel(net, ["cpu"] * replicas, engine=engine)


def in_place_after(net: nn.Module, engine: str, replicas: int) -> nn.Module:
    model = instep.DataParallel(net, ["cpu"] * replicas, engine=engine)
    model(torch.randn(4, 4, dtype=net.head.weight.dtype))  # type: ignore[union-attr, arg-type]
    model.compile(backend=BACKEND)
    return model


def around(net: nn.Module, engine: str, replicas: int) -> nn.Module:
    model = instep.DataParallel(net, ["cpu"] * replicas, engine=engine)
    return torch.compile(model, backend=BACKEND)  # type: ignore[return-value]


def a_part(net: nn.Module, engine: str, replicas: int) -> nn.Module:
    for block in (net.first, net.second):
        assert isinstance(block, nn.Module)
        block.compile(backend=BACKEND)
    return instep.DataParallel(net, ["cpu"] * replicas, engine=engine)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
IN_THREADS = pytest.mark.skipif(TORCH in ((2, 10), (2, 11)), reason="dynamo may crash if several threads compile there")
WAYS: list[Make] = [inside, in_place, in_place_after, around, a_part]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("way", "engine"),
    [
        # One way on every engine, and every way on threads.
        pytest.param(
            way, engine, marks=() if way is a_part else IN_THREADS if engine == "threads" else pytest.mark.slow
        )
        for way in WAYS
        for engine in ENGINES
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_training_is_the_plain_modules(way: Make, engine: str) -> None:
    plain = Net().double()
    net = copy.deepcopy(plain)
    theirs, ours = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(net.parameters())
    model = way(net, engine, 3)
    try:
        for size in (7, 7, 6, 7, 2):
            x = torch.randn(size, 4, dtype=torch.float64)
            losses = []
            for module, optimizer in ((plain, theirs), (model, ours)):
                optimizer.zero_grad()
                loss = module(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    finally:
        close(model)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
    assert graphs() > 0


def close(model: Any) -> None:
    (model if isinstance(model, instep.DataParallel) else model._orig_mod).close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_graph_a_replica_and_none_from_call_to_call(way: Make, engine: str) -> None:
    model, pieces = way(Net(), engine, 2), 2 if way is a_part else 1
    try:
        made = []
        for _ in range(4):
            model(torch.randn(6, 4)).sum().backward()
            made.append(graphs())
    finally:
        close(model)
    assert 1 <= made[0] <= 2 * pieces
    assert made[1:] == made[:1] * 3


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 9), reason="torch 2.8 cannot trace a linear layer whose first two sizes are symbolic")
@pytest.mark.parametrize("replicas", [4])
def test_many_replicas_and_shapes_stay_within_the_limit(replicas: int) -> None:
    """Eight graphs for one piece of code is torch's limit; four replicas with two ranks and two modes have more."""
    limit = torch._dynamo.config.recompile_limit
    net = Net()
    model = in_place(net, "threads", replicas)
    try:
        for lead in ((), (2,)):
            for _ in range(2):
                x = torch.randn(8, *lead, 4)
                torch.testing.assert_close(model(x), Net.forward(net, x))
                with torch.no_grad():
                    model(x)
        made = graphs()
        assert made > limit
        model(torch.randn(8, 4))
        assert graphs() == made
    finally:
        close(model)
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.parametrize(
    "engine",
    [
        "serial",
        pytest.param(
            "threads",
            marks=pytest.mark.skipif(TORCH < (2, 11), reason="torch cannot compile backwards in several threads there"),
        ),
        pytest.param("processes", marks=pytest.mark.slow),
    ],
)
def test_hooks_that_compilation_registers_are_not_the_modules(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd registers hooks while it traces. They are no reason to run a call on one device."""
    net, x = Net(), torch.randn(6, 4)
    compiled: Any = torch.compile(net, backend="aot_eager")
    with instep.DataParallel(compiled, ["cpu"] * 2, engine=engine) as model:
        monkeypatch.setattr(model._instep_runner, "run_on_one_device", pytest.fail)
        for _ in range(2):
            model(x).sum().backward()


def test_one_replica_is_compiled_as_the_module_would_be() -> None:
    model = around(Net(), "auto", 1)
    x = torch.randn(3, 4)
    for _ in range(3):
        model(x).sum().backward()
    assert graphs() == 1


def test_one_replica_is_one_graph_with_the_wrapper_around_it() -> None:
    net = Net()
    model = instep.DataParallel(net, ["cpu"])
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    x = torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), net(x))
    assert graphs() == 1
    torch.testing.assert_close(torch.compile(model, backend=BACKEND)(instep.whole(x)), net(x))


def test_a_full_graph_is_refused_with_the_way_out() -> None:
    with instep.DataParallel(Net(), ["cpu"] * 2) as model:
        compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
        with pytest.raises(Exception, match=r"instep\.DataParallel\(torch\.compile\(net\)\)"):
            compiled(torch.randn(4, 4))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler for inductor's kernels")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor() -> None:
    plain = Net()
    net = copy.deepcopy(plain)
    with instep.DataParallel(torch.compile(net), ["cpu"] * 2) as model:  # type: ignore[arg-type]
        for _ in range(2):
            x = torch.randn(6, 4)
            for module in (plain, model):
                module.zero_grad()
                module(x).square().mean().backward()
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)
    assert graphs() == 2


def test_names_are_those_of_the_module() -> None:
    """What is saved loads into the plain module, and the other way round."""
    net, other = Net(), Net()
    with instep.DataParallel(torch.compile(net, backend="eager"), ["cpu"] * 2) as model:  # type: ignore[arg-type]
        names = list(net.state_dict())
        assert list(model.state_dict()) == names
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(net.state_dict(), other.state_dict())
        model.load_state_dict({f"_orig_mod.{name}": torch.zeros_like(v) for name, v in other.state_dict().items()})
        other.load_state_dict(model.state_dict())
    assert all(not value.any() for value in other.state_dict().values())
