"""State that trials saw to depend on the samples is not adopted because even shards happen to agree on it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

from .helpers import both_engines


@dataclass
class Stats:
    samples: int
    shape: tuple[int, ...]


class Notes(nn.Module):
    """Leaves something on itself in each call."""

    def __init__(self, note: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.note = note
        self.register_buffer("rate", torch.ones(()))
        self.plain = torch.ones(())
        self.seen: set[Any] = set()
        self.sizes: Counter[int] = Counter()
        self.log: list[Any] = []
        self.last: deque[Any] = deque(maxlen=9)
        self.table: dict[Any, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.note(self, x)
        out: Tensor = self.layer(x)
        return out


SIZES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a buffer, written": (lambda net, x: net.rate.mul_(1 - 1 / len(x)), "rate"),
    "a buffer, set": (lambda net, x: setattr(net, "rate", torch.tensor(len(x) ** 0.5)), "rate"),
    "a tensor, written": (lambda net, x: net.plain.fill_(1 / len(x)), "plain"),
    "a dictionary": (lambda net, x: setattr(net, "info", {"n": len(x)}), "info"),
    "an object": (lambda net, x: setattr(net, "stats", Stats(len(x), tuple(x.shape))), "stats"),
    "a text": (lambda net, x: setattr(net, "text", f"batch of {len(x)}"), "text"),
    "a range": (lambda net, x: setattr(net, "rows", range(len(x))), "rows"),
    "a set": (lambda net, x: net.seen.add(tuple(x.shape)), "seen"),
    "a counter": (lambda net, x: net.sizes.update([len(x)]), "sizes"),
    "a list of records": (lambda net, x: net.log.append({"n": len(x)}), "log"),
    "a short list": (lambda net, x: net.last.append((len(x), "z")), "last"),
    "an entry": (lambda net, x: net.table.update(scale=1 / len(x)), "table.scale"),
    "a key": (lambda net, x: net.table.update({len(x): "mask"}), "table"),
}


@both_engines
@pytest.mark.parametrize("case", SIZES)
def test_the_size_of_a_shard_does_not_stay_on_the_module(wrap: Any, engine: str, case: str) -> None:
    note, name = SIZES[case]
    net = Notes(note)
    model = wrap(net, 3, engine=engine)
    with pytest.raises(instep.StateError, match=f"'{name}' to a value that may depend on the size"):
        model(torch.randn(6, 4))
    assert float(net.rate) == float(net.plain) == 1
    assert not any([net.seen, net.sizes, net.log, net.last, net.table])
    ruled = wrap(Notes(note), 3, engine=engine, state={f"{name}*": "first"})
    assert ruled(torch.randn(6, 4)).shape == (6, 3)


def settle(net: Any, _: Tensor) -> None:
    net.heads, net.scale = 2, torch.tensor(2.0)
    net.table["calls"] = net.table.get("calls", 0) + 2
    net.log.append("called")
    net.last.append(2)
    net.seen.add(2)
    net.rate.mul_(0.5)


@both_engines
@pytest.mark.parametrize("batch", [6, 7, 9])
def test_what_is_the_same_for_any_samples_is_taken(wrap: Any, engine: str, batch: int) -> None:
    """Also where it happens to be the number of samples of a shard."""
    net, plain = Notes(settle), Notes(settle)
    model = wrap(net, 3, engine=engine)
    for _ in range(3):
        x = torch.randn(batch, 4)
        model(x)
        plain(x)
    for name in ("heads", "table", "log", "last", "seen", "rate", "scale"):
        assert getattr(net, name) == getattr(plain, name), name
