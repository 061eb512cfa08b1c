"""Module state that a worker has, and what changed since in ways that no counter or identity shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes import messages
from instep.engines.processes.controller.client import client_for
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.errors import CannotCross

from ..connections import script


@pytest.fixture(scope="module", autouse=True)
def up(workers: WorkerPool) -> None:
    """A worker that is there before the first test."""
    workers.get(1)


def wrap(net: nn.Module) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False)


class Tag:
    def __init__(self) -> None:
        self.value = 1.0


class Turned(nn.Module):
    """Has a buffer and a frozen weight that can be turned round, and a weight with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.weight: Any = nn.Parameter(torch.randn(4, 4))
        self.weight.scale, self.weight.tag = 1.5, Tag()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.weight.scale * self.weight.tag.value
        y: Tensor = self.layer(x) @ self.table @ self.frozen @ weight
        return y


def turn_buffer(net: Turned) -> None:
    net.get_buffer("table").t_()


def turn_data(net: Turned) -> None:
    net.frozen.data = net.frozen.data.t()


def scale_twice(net: Turned) -> None:
    net.weight.scale *= 2  # the next number may take the place of the first in memory
    net.weight.scale += 1


def edit_tag(net: Turned) -> None:
    net.weight.tag.value += 1


@pytest.mark.parametrize("change", [turn_buffer, turn_data, scale_twice, edit_tag])
def test_changes_of_tensors_reach_the_workers(change: Callable[[Turned], None]) -> None:
    net, x = Turned(), torch.randn(7, 4)
    with wrap(net) as model:
        for _ in range(4):
            torch.testing.assert_close(model(x), net(x))
            change(net)
        torch.testing.assert_close(model(x), net(x))


class Writes(nn.Module):
    """Writes to its first argument before it reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one += 1
        y: Tensor = self.layer(other)
        return y


def test_a_tensor_passed_twice_is_sent_once() -> None:
    net, x = Writes(), torch.randn(7, 4)
    mine = x.clone()
    with wrap(net) as model:
        torch.testing.assert_close(model(x, x), net(mine, mine))
        torch.testing.assert_close(x, mine)
        torch.testing.assert_close(model(x, other=x), net(mine, other=mine))


class Apart(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one - other


def test_different_views_of_one_memory_are_sent_separately() -> None:
    x = torch.randn(7, 4, dtype=torch.complex64)
    with wrap(Apart()) as model:
        torch.testing.assert_close(model(x, x.conj()), x - x.conj())
        torch.testing.assert_close(model(x.imag, x.conj().imag), x.imag - x.conj().imag)


def test_a_write_to_memory_that_overlaps_another_argument_is_an_error() -> None:
    net, x = Writes(), torch.randn(7, 8)
    with wrap(net) as model, pytest.raises(CannotCross, match=r"shares its memory with another one.*\n.*clone"):
        model(x[:, :4], x[:, 2:6])


class Picky:
    """Cannot be made in another process."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["home"] != os.getpid():
            raise RuntimeError("not here")
        self.__dict__.update(state)


SCRIPT = """
import torch
from torch import nn
SCALE, HELPER = 1.0, None

class Thing:
    def __init__(self, by, held=None):
        self.by, self.held = by, held

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x, thing):
        HELPER
        return Doubled.apply(self.layer(x)) * SCALE * thing.by
"""


def test_a_module_that_could_not_be_unpickled_is_sent_again() -> None:
    at_home: Any = script(SCRIPT)
    net, x = at_home.Net(), torch.randn(5, 4)
    with wrap(net) as model:
        for by in (1.0, 2.0):
            torch.testing.assert_close(model(x, at_home.Thing(by)), net(x, at_home.Thing(by)))
        at_home.SCALE, at_home.HELPER = 2.0, Picky()
        with pytest.raises(CannotCross, match="could not be rebuilt: RuntimeError: not here"):
            model(x, at_home.Thing(2.0))
        at_home.HELPER = None
        torch.testing.assert_close(model(x, at_home.Thing(3.0)), net(x, at_home.Thing(3.0)))
    fresh: Any = script(SCRIPT)
    with wrap(fresh.Net()) as model:
        with pytest.raises(CannotCross, match="not here"):
            model(x, fresh.Thing(2.0, Picky()))
        torch.testing.assert_close(model(x, fresh.Thing(3.0)), model.module(x, fresh.Thing(3.0)))


def test_backward_uses_the_current_globals() -> None:
    at_home: Any = script(SCRIPT)
    net, x = at_home.Net(), torch.randn(5, 4)
    grads = []
    with wrap(net) as model:
        for run in (net, model):
            at_home.SCALE = 1.0
            output = run(x, at_home.Thing(1.0))
            at_home.SCALE = 3.0
            output.sum().backward()
            grads.append(net.layer.bias.grad.clone())
            net.zero_grad()
    torch.testing.assert_close(*grads)


AFTERWARDS = """
import copy, torch, instep
from torch import nn

for end in (instep.DataParallel.close, lambda _: instep.shutdown()):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(7, 4)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine="processes")
    loss = model(x).square().sum()
    end(model)
    loss.backward()
    plain(x).square().sum().backward()
    for mine, wanted in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, wanted.grad)
    model.close()
    print("right")
"""


@pytest.mark.slow
def test_backward_after_close() -> None:
    found = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=100)
    assert (found.stdout, found.stderr) == ("right\nright\n", "")


def test_ambient_state_is_sent_again_while_another_call_runs(workers: WorkerPool) -> None:
    net, x = nn.Linear(4, 2), torch.randn(6, 4)
    with wrap(net) as model:
        model(x)
        client = client_for(workers.get(1))
        said: list[Any] = []
        say = client.channel.send

        def listen(kind: str, call: int, value: Any, *rest: Any, **options: Any) -> list[Tensor]:
            if kind == messages.FORWARD:
                said.append(value.ambient)
            return say(kind, call, value, *rest, **options)

        client.channel.send = listen  # type: ignore[method-assign]
        try:
            model(x)
            other = client.new_pending()
            model(x)
            del other
            model(x[:4])  # of another size, so that no call is prepared
        finally:
            del client.channel.send  # type: ignore[method-assign]
    assert [around is not None for around in said] == [False, True, False]


def test_a_lock_that_is_set_later_is_named() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 2))
    with wrap(net) as model:
        model(torch.randn(6, 4))
        net[0].guard = threading.Lock()
        with pytest.raises(CannotCross, match=r"attribute '?0\.guard'? \(a _thread\.lock\)"):
            model(torch.randn(6, 4))


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.held = held

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def test_an_error_of_one_module_is_not_raised_by_another() -> None:
    x = torch.randn(6, 4)
    with wrap(nn.Linear(4, 2)) as good, wrap(Holds(Picky())) as bad:
        good(x)
        with pytest.raises(CannotCross, match="lock"):  # after the module, which the worker could not rebuild
            bad(x, more=threading.Lock())
        torch.testing.assert_close(good(x), good.module(x))
        with pytest.raises(CannotCross, match="could not be rebuilt"):
            bad(x)


def test_a_wrapper_inside_a_worker() -> None:
    x = torch.randn(7, 4)
    inner = wrap(nn.Linear(4, 4))
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    with wrap(outer) as model:
        output = model(x)
        torch.testing.assert_close(output, outer(x))
        output.sum().backward()
        mine = [p.grad for p in outer.parameters()]
        outer.zero_grad()
        nn.Sequential(inner.module, outer[1])(x).sum().backward()
        torch.testing.assert_close(mine, [p.grad for p in outer.parameters()])
    inner.close()
