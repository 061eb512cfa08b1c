"""Iterators that a module holds go on once a call, as on one device."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import instep
from instep.replicas.caller_only import is_library_iterator


def decay() -> Iterator[float]:
    factor = 1.0
    while True:
        yield factor
        factor *= 0.5


class Holder:
    """An object of the user's, around an iterator."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Net(nn.Module):
    def __init__(self, schedule: Any, how: Callable[[Any], float] = next) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.schedule, self.how, self.log = schedule, how, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        factor = self.how(self.schedule)
        self.log.append(factor)
        return self.layer(x) * factor


def in_a_closure(iterator: Iterator[float]) -> Callable[[], float]:
    return lambda: next(iterator)


def quietly(iterator: Iterator[Any]) -> float:
    try:
        return float(next(iterator))
    except Exception:
        return 1.0


SIZES: list[int] = []
FLAT = [1.0] * 8

MADE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "count": (lambda: itertools.count(1), next),
    "a flat start": (lambda: itertools.chain(FLAT, decay()), next),
    "generator": (decay, next),
    "send": (decay, lambda held: held.send(None)),
    "list": (lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), next),
    "map": (lambda: map(float, range(1, 9)), next),
    "in a list": (lambda: [decay()], lambda held: next(held[0])),
    "in an object": (lambda: Holder(decay()), lambda held: next(held.inside)),
    "in a closure": (lambda: in_a_closure(decay()), lambda held: held()),
    "its method": (lambda: itertools.count(1).__next__, lambda held: held()),
    "its other method": (lambda: decay().send, lambda held: held(None)),
    "loader": (lambda: iter(DataLoader(torch.arange(1.0, 9.0), batch_size=2)), lambda held: float(next(held).sum())),  # type: ignore[arg-type]
    "errors caught": (decay, quietly),
    "copied": (lambda: iter([1.0, 2.0]), lambda held: next(copy.copy(held))),
}


@pytest.mark.filterwarnings("ignore:Pickle, copy:DeprecationWarning")  # an iterator on its way to a worker
@pytest.mark.parametrize(("make", "how"), MADE.values(), ids=MADE.keys())
def test_an_iterator_advances_once_per_call(
    wrap: Callable[..., Any], make: Callable[[], Any], how: Callable[[Any], float]
) -> None:
    plain, net = Net(make(), how).double(), Net(make(), how).double()
    net.load_state_dict(plain.state_dict())
    model = wrap(net, replicas=3)
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(4)]
    with pytest.warns(UserWarning, match=r"one device because forward uses '\w+', a [\w-]+ that replicas"):
        torch.testing.assert_close(model(batches[0]), plain(batches[0]))
    for x in batches[1:]:  # said once: a second warning is an error here
        torch.testing.assert_close(model(x), plain(x))
        assert net.log == plain.log


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_an_unused_iterator_does_not_prevent_parallel_calls(engine: str) -> None:
    class Numbered(Net):
        def forward(self, x: Tensor) -> Tensor:
            SIZES.append(len(x))
            return super().forward(x) if self.training else self.layer(x)

    SIZES.clear()
    net = Numbered(itertools.count(1)).double()
    model = instep.DataParallel(net, ["cpu"] * 3, engine=engine).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(6, 3, dtype=torch.float64))
    assert SIZES == [2, 2, 2]
    assert next(net.schedule) == 1
    model.train()
    with pytest.warns(UserWarning, match="because forward uses 'schedule'"):
        model(torch.randn(6, 3, dtype=torch.float64))
    assert next(net.schedule) == 3
    SIZES.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(torch.randn(6, 3, dtype=torch.float64))
    assert SIZES == [2, 2, 2]
    assert next(net.schedule) == 4
    model.close()


def test_is_library_iterator() -> None:
    class Own:
        def __iter__(self) -> Own:
            return self

        def __next__(self) -> int:
            return 1

    assert all(
        map(is_library_iterator, [decay(), itertools.count(), iter("ab"), zip((), (), strict=True), map(str, ())])
    )
    with open(__file__) as file:
        assert not any(map(is_library_iterator, [file, Own(), [], {}, range(3), torch.Generator(), torch.ones(2)]))
