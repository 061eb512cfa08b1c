"""Tensor hooks that forward registers see the gradients of whole batches, or of shards with hooks='per_replica'."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

pytestmark = pytest.mark.usefixtures("one_core")
# what forward notes in a list is seen in this process only
each_engine = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
SIZES: list[int] = []


def seen_here(sizes: list[int], engine: str) -> list[int]:
    """Of the sizes of shards, those that this process notes: on processes, the first replica's, which is larger."""
    return [size for size in sizes if engine != "processes" or size != 2]


class Net(nn.Module):
    """Puts a hook on something in the middle, by a function of itself, a hidden tensor and its weight."""

    def __init__(self, put: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.put, self.gradients, self.calls = put, None, [0]
        self.hooked = True

    def save(self, gradient: Tensor) -> None:
        self.gradients = gradient
        self.calls.append(len(gradient))

    def forward(self, x: Tensor) -> Tensor:
        SIZES.append(len(x))
        weight = self.first.weight * 2
        z = nn.functional.linear(x, weight).tanh()
        if self.hooked and z.requires_grad:
            self.put(self, z, weight)
        return self.last(self.norm(z))


def clip(self: Net, z: Tensor, weight: Tensor) -> None:
    weight.register_hook(lambda g: g.clamp(-0.05, 0.05))


PUTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "grad-cam": lambda self, z, weight: z.register_hook(self.save),
    "normalised": lambda self, z, weight: z.register_hook(lambda g: g / g.norm()),
    "clipped": clip,
    "on a node": lambda self, z, weight: z.grad_fn.register_prehook(lambda gs: (gs[0] / gs[0].norm(),)),  # type: ignore[union-attr]
    "on a parameter": lambda self, z, weight: self.first.weight.register_hook(partial(torch.clamp, max=0.01)),
    "partial": lambda self, z, weight: z.register_hook(partial(Net.save, self)),
}


def steps(model: Any, batches: list[Tensor]) -> list[Any]:
    found = []
    for x in batches:
        model.zero_grad()
        out = model(x)
        (out.square() * torch.linspace(1, 2, len(x), dtype=x.dtype)[:, None]).sum().backward()
        found += [out.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return found


@each_engine
@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS.keys())
def test_a_hook_on_a_tensor_sees_whole_batches(engine: str, put: Callable[..., Any]) -> None:
    plain = Net(put).double()
    net = copy.deepcopy(plain)
    batches = [torch.randn(7, 4, dtype=torch.float64) for _ in range(3)]
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        mine = steps(model, batches[:1])
        with pytest.warns(UserWarning, match="because forward registers hooks"):
            mine += steps(model, batches[1:2])
        mine += steps(model, batches[2:])  # said once: a second warning is an error here
        torch.testing.assert_close(mine, steps(plain, batches))
        torch.testing.assert_close(net.gradients, plain.gradients)
        torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
        assert net.calls == plain.calls


@each_engine
def test_calls_without_gradients_or_hooks_use_all_devices(engine: str) -> None:
    net = Net(PUTS["normalised"]).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine, probe=False) as model:

        def sizes(**hooked: bool) -> list[int]:
            net.__dict__.update(hooked)
            SIZES.clear()
            model(x)
            return sorted(SIZES)

        with torch.no_grad():
            assert sizes() == seen_here([2, 2, 3], engine)
        assert sizes(hooked=False) == seen_here([2, 2, 3], engine)
        assert sizes(hooked=True) == seen_here([2, 2, 3, 7], engine)
        with pytest.warns(UserWarning, match="expect the whole batch"):
            assert sizes() == [7]
        with torch.no_grad():
            assert sizes() == seen_here([2, 2, 3], engine)
        assert sizes(hooked=False) == [7]
        assert sizes() == seen_here([2, 2, 3], engine)


@each_engine
def test_hooks_per_replica_see_shards(engine: str) -> None:
    net = Net(lambda self, z, weight: z.register_hook(lambda g: -g)).double()
    SIZES.clear()
    with (
        instep.DataParallel(net, ["cpu"] * 3, engine=engine, hooks="per_replica", probe=False) as model,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        plain = copy.deepcopy(net)
        batches = [torch.randn(7, 4, dtype=torch.float64)]
        torch.testing.assert_close(steps(model, batches), steps(plain, batches))
        assert sorted(SIZES) == seen_here([2, 2, 3, 7], engine)


@each_engine
def test_hooks_of_instep_are_ignored(engine: str) -> None:
    """Collectives register hooks on tensors, for example to synchronize batch norm."""
    net = Net(lambda self, z, weight: None).double()
    plain, batches = copy.deepcopy(net), [torch.randn(7, 4, dtype=torch.float64) for _ in range(2)]
    SIZES.clear()
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine, probe=False) as model:
        torch.testing.assert_close(steps(model, batches), steps(plain, batches))
    assert sorted(SIZES) == seen_here([2, 2, 2, 2, 3, 3, 7, 7], engine)


def test_compilation_registers_hooks_once() -> None:
    """The compiler registers hooks while it traces; later calls use all devices again, without a warning."""
    net = Net(lambda self, z, weight: None).double()
    x = torch.randn(7, 4, dtype=torch.float64)

    def trace(self: Any, z: Tensor, weight: Tensor) -> None:
        if len(self.calls) < 2:
            self.calls.append(0)
            z.register_hook(lambda g: g)

    net.put = trace
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", probe=False, state={"calls": "first"}) as model:
        model(x)
        model(x)
        SIZES.clear()
        model(x)
    assert sorted(SIZES) == [3, 4]


class Cam(nn.Module):
    """Grad-CAM without a hook: the activation is kept, and so is its gradient."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(4, 5), nn.Linear(5, 2), inside

    def forward(self, x: Tensor) -> Any:
        z = self.first(x).tanh()
        if z.requires_grad:
            z.retain_grad()
        if not self.inside:
            return self.last(z), z
        self.activation = z
        return self.last(z), None


@each_engine
@pytest.mark.parametrize("inside", [True, False])
def test_a_gradient_taken_in_forward_is_that_of_the_whole_batch(engine: str, inside: bool) -> None:
    plain = Cam(inside=inside).double()
    net = copy.deepcopy(plain)

    def gradient(model: Any, x: Tensor) -> Any:
        out, z = model(x)
        out.square().sum().backward()
        return (model.activation if inside else z).grad

    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        for step in range(2):
            x = torch.randn(7, 4, dtype=torch.float64)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.testing.assert_close(gradient(model, x), gradient(plain, x))
            assert ["retain_grad()" in str(one.message) for one in said] == [True] * (step == 0)
        assert [p.grad is not None for p in net.parameters()] == [True] * 4
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine, hooks="per_replica") as model, torch.no_grad():
        torch.testing.assert_close(model(x)[0], plain(x)[0])
