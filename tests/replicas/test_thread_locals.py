"""A `threading.local` that a module holds has what the caller's thread put there, as on one device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Scratch(threading.local):
    """Begins anew in each thread."""

    def __init__(self) -> None:
        self.calls, self.kept = 0.0, torch.zeros(1)

    def bump(self) -> float:
        self.calls += 1.5
        return self.calls

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls += 2.5

    def __len__(self) -> int:
        return int(self.calls)


class Net(nn.Module):
    def __init__(self, held: Any, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.held, self.body = held, body

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.body(self.held, x)
        return out


def plain() -> Any:
    held = threading.local()
    held.calls, held.kept = 0.0, torch.zeros(1)
    return held


def count(held: Any, _: Tensor) -> Any:
    held.calls += 1.5
    return held.calls


def keep(held: Any, x: Tensor) -> Any:
    held.kept = x[:, :1]
    return held.kept


def write(held: Any, _: Tensor) -> Any:
    held.kept += 1.0
    return held.kept


def read(held: Any, _: Tensor) -> Any:
    return held.calls + 1.0


def read_all(held: Any, _: Tensor) -> Any:
    return vars(held)["calls"] + (held.calls if isinstance(held, threading.local) else 100.0)


def enter(held: Any, _: Tensor) -> Any:
    with held as here:
        return here.calls + len(here)


def forget(held: Any, _: Tensor) -> Any:
    if hasattr(held, "kept"):
        del held.kept
    return 1.0


def quietly(held: Any, _: Tensor) -> Any:
    try:
        held.calls += 1.0
    except Exception:
        return 100.0
    return held.calls


BODIES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "count": (Scratch, count),
    "keep": (Scratch, keep),
    "write in place": (Scratch, write),
    "read": (Scratch, read),
    "a method": (Scratch, lambda held, _: held.bump()),
    "enter": (Scratch, enter),
    "all": (Scratch, read_all),
    "forget": (Scratch, forget),
    "errors caught": (Scratch, quietly),
    "in a list": (lambda: [Scratch()], lambda held, x: count(held[0], x)),
    "plain: count": (plain, count),
    "plain: keep": (plain, keep),
    "plain: write in place": (plain, write),
    "plain: read": (plain, read),
    "plain: all": (plain, read_all),
    "plain: forget": (plain, forget),
}


def seen(held: Any) -> dict[str, Any]:
    return dict(vars(held[0] if isinstance(held, list) else held))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize(("make", "body"), BODIES.values(), ids=BODIES.keys())
def test_calls_with_a_thread_local_match_the_plain_module(
    engine: str, probe: bool, make: Callable[[], Any], body: Callable[[Any, Tensor], Any]
) -> None:
    one, net = Net(make(), body), Net(make(), body)
    net.load_state_dict(one.state_dict())
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine, probe=probe) as model:
        x = torch.randn(7, 3)
        with pytest.warns(UserWarning, match=r"because forward uses '\w+', a \w+ that replicas"):
            torch.testing.assert_close(model(x), one(x))
        for size in (4, 7, 1):  # said once: a second warning is an error here
            x = torch.randn(size, 3)
            torch.testing.assert_close(model(x), one(x))
            torch.testing.assert_close(seen(net.held), seen(one.held))


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("make", [Scratch, plain])
def test_an_unused_thread_local_does_not_prevent_parallel_calls(engine: str, make: Callable[[], Any]) -> None:
    sizes: list[int] = []
    note = sizes.append  # which no replica follows to the list
    net = Net(make(), lambda _, x: (note(len(x)), 0.0)[1])
    with warnings.catch_warnings(), instep.DataParallel(net, ["cpu"] * 3, engine=engine, probe=False) as model:
        warnings.simplefilter("error")
        model(torch.randn(6, 3))
    assert sizes == [2, 2, 2]


def test_each_calling_thread_has_its_own_values() -> None:
    net = Net(Scratch(), count)
    found: list[float] = []

    def calls() -> None:
        model(torch.randn(5, 3))
        found.append(net.held.calls)

    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        with pytest.warns(UserWarning, match=r"a \w+ that replicas"):
            model(torch.randn(5, 3))
        model(torch.randn(5, 3))
        other = threading.Thread(target=calls)
        other.start()
        other.join()
    assert (net.held.calls, found) == (3.0, [1.5])
