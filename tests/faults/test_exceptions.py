"""Exceptions of every kind that workers raise: they arrive as they are, and the next call works."""

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
    """Cannot be made from its arguments."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("it has none")

    __repr__ = __str__


class Locked(Exception):
    """Holds what cannot be sent."""

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
    """Does what it is told to where a gradient comes by, or at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.deed: Callable[[], None] | None = None
        self.backward = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.deed is not None and inside_worker():
            if not self.backward:
                self.deed()
            y.register_hook(lambda _: self.deed and self.deed())
        return y


class Slow(nn.Module):
    """One replica takes long, and another one fails at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.deeds: dict[int, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        deed = self.deeds.get(instep.replica().index)
        if deed == "sleep":
            time.sleep(3)
        elif deed == "fail":
            raise KeyError("no luck")
        y: Tensor = self.layer(x)
        return y


def fail_at_once(model: instep.DataParallel, x: Tensor, deeds: dict[int, str]) -> float:
    """A call that works, and one that fails and does not wait for whoever takes long; says when that one began."""
    model(x).sum().backward()
    model.module.deeds = deeds
    start = time.monotonic()
    with pytest.raises(KeyError, match="no luck"):
        model(x)
    assert time.monotonic() - start < 2
    model.module.deeds = {}
    return start


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("deeds", [{1: "sleep", 2: "fail"}, {1: "fail", 2: "sleep"}, {0: "fail", 1: "sleep"}], ids=str)
def test_an_exception_does_not_wait_for_a_worker_that_takes_long(wrap: Any, deeds: dict[int, str]) -> None:
    net = Slow()
    model = wrap(net, 3, engine="processes", hooks="per_replica", probe=False)
    x = torch.randn(7, 4)
    fail_at_once(model, x, deeds)
    torch.testing.assert_close(model(x), net(x))


class Late(Slow):
    """The same, and what takes long comes to meet the others after that."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y - instep.all_reduce(y.mean(0), "mean")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("deeds", [{1: "sleep", 2: "fail"}, {0: "fail", 1: "sleep"}], ids=str)
def test_a_worker_that_comes_late_to_a_meeting_finds_nobody_there(wrap: Any, deeds: dict[int, str]) -> None:
    net = Late()
    model = wrap(net, 3, engine="processes", probe=False)
    x = torch.randn(6, 4)
    start = fail_at_once(model, x, deeds)
    for _ in range(2):
        torch.testing.assert_close(model(x), net.layer(x) - net.layer(x).mean(0))
    assert time.monotonic() - start < 8


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_exception_arrives_as_it_is(wrap: Any, backward: bool) -> None:
    net = Raises()
    model = wrap(net, 2, engine="processes", hooks="per_replica", probe=False)
    model(torch.randn(6, 4)).sum().backward()
    for deed, kind, is_whole in CASES:
        net.deed, net.backward = deed, backward
        before = {name: value.clone() for name, value in net.state_dict().items()}
        net.zero_grad()
        start = time.monotonic()
        with pytest.raises(kind) as caught:
            model(torch.randn(6, 4)).sum().backward()
        assert time.monotonic() - start < 5  # on a machine that others use too
        assert type(caught.value) is kind
        assert is_whole(caught.value), deed
        notes = "\n".join(getattr(caught.value, "__notes__", ()))
        if sys.version_info >= (3, 11):
            assert "raised in replica 1 on cpu" in notes
            assert f"in {deed.__name__}" in notes
        assert all(parameter.grad is None for parameter in net.parameters())
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        net.deed = None
        x = torch.randn(6, 4)
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_a_group_of_exceptions_arrives_as_it_is(wrap: Any) -> None:
    group: Any = getattr(builtins, "ExceptionGroup", None)

    def fail() -> None:
        raise group("several", [ValueError("a"), Coded("b", code=2), group("more", [KeyError(1)])])

    net = Raises()
    net.deed = fail
    model = wrap(net, 2, engine="processes", hooks="per_replica", probe=False)
    with pytest.raises(group, match="several") as caught:
        model(torch.randn(6, 4))
    first, second, third = caught.value.exceptions
    assert (type(first), type(second), type(third)) == (ValueError, Coded, group)
    assert second.code == 2
