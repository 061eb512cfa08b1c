"""Exceptions that workers raise reach the caller unchanged, and the next call works."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.runtime.process_role import inside_worker


class Coded(Exception):
    """Cannot be constructed from its `args`."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Mute(Exception):
    """`str` of it raises."""

    def __str__(self) -> str:
        raise ValueError("it has none")

    __repr__ = __str__


class Locked(Exception):
    """Holds an object that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked", threading.Lock())
        self.lock = threading.Lock()


def coded() -> None:
    raise Coded("no luck", code=7)


def chained() -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        raise Coded("worse", code=8) from error


def noted() -> None:
    error = ValueError("remarkable")
    if hasattr(error, "add_note"):
        error.add_note("a note of my own")
    raise error


def deep() -> None:
    deep()


def stop() -> None:
    next(iter(()))


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def mute() -> None:
    raise Mute("x")


def locked() -> None:
    raise Locked


def missing() -> None:
    Path("/nowhere/at/all").read_text()


CASES: list[tuple[Callable[[], None], type[BaseException], Callable[[Any], bool]]] = [
    (coded, Coded, lambda error: error.code == 7 and str(error) == "no luck"),
    (chained, Coded, lambda error: error.code == 8 and isinstance(error.__cause__, ZeroDivisionError)),
    (noted, ValueError, lambda error: "a note of my own" in getattr(error, "__notes__", ["a note of my own"])),
    (deep, RecursionError, lambda error: "recursion" in str(error)),
    (stop, StopIteration, lambda error: error.value is None),
    (leave, SystemExit, lambda error: error.code == 3),
    (interrupt, KeyboardInterrupt, lambda error: True),
    (mute, Mute, lambda error: error.args == ("x",)),
    (locked, Locked, lambda error: "lock" in error.args[1] and "lock" in error.lock),
    (missing, FileNotFoundError, lambda error: error.filename == "/nowhere/at/all"),
]


class Raises(nn.Module):
    """Calls a function in forward or backward of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.action: Callable[[], None] | None = None
        self.backward = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.action is not None and inside_worker():
            if not self.backward:
                self.action()
            y.register_hook(lambda _: self.action and self.action())
        return y


class Slow(nn.Module):
    """One replica is slow, and another one fails at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.actions: dict[int, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        action = self.actions.get(instep.replica().index)
        if action == "sleep":
            time.sleep(3)
        elif action == "fail":
            raise KeyError("no luck")
        y: Tensor = self.layer(x)
        return y


def fail_at_once(model: instep.DataParallel, x: Tensor, actions: dict[int, str]) -> float:
    """Run a call that works and one that fails without waiting for slow replicas. Returns when the second began."""
    model(x).sum().backward()
    model.module.actions = actions
    start = time.monotonic()
    with pytest.raises(KeyError, match="no luck"):
        model(x)
    assert time.monotonic() - start < 2
    model.module.actions = {}
    return start


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    "actions",
    [
        {1: "sleep", 2: "fail"},
        pytest.param({1: "fail", 2: "sleep"}, marks=pytest.mark.slow),
        pytest.param({0: "fail", 1: "sleep"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_an_exception_does_not_wait_for_slow_workers(wrap: Any, actions: dict[int, str]) -> None:
    net = Slow()
    model = wrap(net, 3, engine="processes", hooks="per_replica", probe=False)
    x = torch.randn(7, 4)
    fail_at_once(model, x, actions)
    torch.testing.assert_close(model(x), net(x))


class Late(Slow):
    """Like `Slow`, with a collective at the end."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y - instep.all_reduce(y.mean(0), "mean")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    "actions", [pytest.param({1: "sleep", 2: "fail"}, marks=pytest.mark.slow), {0: "fail", 1: "sleep"}], ids=str
)
@pytest.mark.slow
def test_a_worker_that_is_late_at_a_collective_after_a_failure(wrap: Any, actions: dict[int, str]) -> None:
    net = Late()
    model = wrap(net, 3, engine="processes", probe=False)
    x = torch.randn(6, 4)
    start = fail_at_once(model, x, actions)
    for _ in range(2):
        torch.testing.assert_close(model(x), net.layer(x) - net.layer(x).mean(0))
    assert time.monotonic() - start < 8


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_exceptions_are_received_unchanged(wrap: Any, backward: bool) -> None:
    net = Raises()
    model = wrap(net, 2, engine="processes", hooks="per_replica", probe=False)
    model(torch.randn(6, 4)).sum().backward()
    for action, kind, is_whole in CASES:
        net.action, net.backward = action, backward
        before = {name: value.clone() for name, value in net.state_dict().items()}
        net.zero_grad()
        start = time.monotonic()
        with pytest.raises(kind) as caught:
            model(torch.randn(6, 4)).sum().backward()
        assert time.monotonic() - start < 5  # on a busy machine
        assert type(caught.value) is kind
        assert is_whole(caught.value), action
        notes = "\n".join(getattr(caught.value, "__notes__", ()))
        if sys.version_info >= (3, 11):
            assert "raised in replica 1 on cpu" in notes
            assert f"in {action.__name__}" in notes
        assert all(parameter.grad is None for parameter in net.parameters())
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        net.action = None
        x = torch.randn(6, 4)
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_exception_groups_are_received_unchanged(wrap: Any) -> None:
    group: Any = getattr(builtins, "ExceptionGroup", None)

    def fail() -> None:
        raise group("several", [ValueError("a"), Coded("b", code=2), group("more", [KeyError(1)])])

    net = Raises()
    net.action = fail
    model = wrap(net, 2, engine="processes", hooks="per_replica", probe=False)
    with pytest.raises(group, match="several") as caught:
        model(torch.randn(6, 4))
    first, second, third = caught.value.exceptions
    assert (type(first), type(second), type(third)) == (ValueError, Coded, group)
    assert second.code == 2
