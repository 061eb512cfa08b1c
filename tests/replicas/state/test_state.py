"""State that `forward` changes, of every kind, is after a call what the plain module's is."""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep

SIZES = (7, 4, 1, 6)


@dataclasses.dataclass
class Stats:
    calls: int = 0
    largest: float = -100.0


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0
    samples: int = 0


class Meter:
    """An object that counts for itself."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()

    def add(self, number: int) -> None:
        with self.lock:
            self.count += number

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)


Change = Callable[["Net", Tensor, Tensor], None]


class Net(nn.Module):
    """A module whose forward changes its state with a given function."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.inner = nn.ReLU()
        self.change = change
        self.n, self.samples, self.top = 0, 0, -100.0
        self.log: list[Any] = []
        self.table: dict[str, Any] = {"n": 0, "samples": 0, "deep": {"n": 0}}
        self.counter: collections.Counter[str] = collections.Counter()
        self.seen: set[Any] = set()
        self.recent: collections.deque[Any] = collections.deque(maxlen=3)
        self.stats, self.slotted, self.meter = Stats(), Slotted(), Meter()
        self.space = SimpleNamespace(n=0)
        self.histogram = np.zeros(4)
        self.loose = torch.zeros(2)
        self.tensors = {"total": torch.zeros(2)}
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("again", torch.zeros(()))
        self.register_buffer("view", self.total[:1])
        self.inner.calls = 0
        self.inner.notes = {}
        self.queue = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.change(self, x, y)
        return y


STATE = (
    *("n", "samples", "top", "log", "table", "counter", "seen", "recent", "stats", "slotted", "space", "histogram"),
    *("loose", "tensors", "total", "again", "view", "queue"),
)


def state_of(net: Net) -> dict[str, Any]:
    found = {name: getattr(net, name) for name in STATE}
    return found | {"meter": net.meter.count, "inner": (net.inner.calls, net.inner.notes)}


def assert_equal(mine: Any, theirs: Any, path: str) -> None:
    assert type(mine) is type(theirs), path
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(mine, theirs, msg=lambda text: f"{path}: {text}")
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), path
        for key in theirs:
            assert_equal(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple, collections.deque)):
        assert len(mine) == len(theirs), path
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(one, other, f"{path}.{index}")
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs), path
    else:
        assert mine == theirs, path


def adds(name: str, value: Callable[[Tensor], Any]) -> Change:
    return lambda net, x, y: setattr(net, name, getattr(net, name) + value(x))


def data_writes(net: Net, x: Tensor, y: Tensor) -> None:
    net.queue.data.lerp_(torch.ones(2), 0.1)
    net.total.data.add_(1)


def many(net: Net, x: Tensor, y: Tensor) -> None:
    net.log.append("call")
    net.table["deep"]["n"] += 1
    net.n += 1
    net.again = net.again + 1
    net.total.add_(1)


CASES: dict[str, tuple[Change, dict[str, Any]]] = {
    "number": (adds("n", lambda x: 1), {}),
    "number of samples": (adds("samples", len), {"samples": "sum"}),
    "buffer set anew": (adds("again", lambda x: 1), {}),
    "buffer set anew by samples": (adds("again", len), {"again": "sum"}),
    "buffer in place": (lambda net, x, y: net.total.add_(1), {}),
    "buffer in place, a part of it": (lambda net, x, y: net.view.add_(1), {}),
    "buffer in place, summed": (lambda net, x, y: net.total.add_(y.detach().sum(0)), {"total": "sum", "view": "sum"}),
    "buffer, a mean": (lambda net, x, y: net.total.copy_(y.detach().mean(0)), {"total": "mean", "view": "mean"}),
    "data": (data_writes, {}),
    "frozen parameter": (lambda net, x, y: net.queue.copy_(net.queue * 0.5 + 1), {}),
    "unregistered tensor": (lambda net, x, y: net.loose.add_(y.detach().sum(0)), {"loose": "sum"}),
    "tensor in a dict": (lambda net, x, y: net.tensors["total"].add_(1), {}),
    "tensor in a dict, set": (
        lambda net, x, y: net.tensors.update(total=net.tensors["total"] + y.detach().sum(0)),
        {"tensors.total": "sum"},
    ),
    "tensor new in a dict": (lambda net, x, y: net.tensors.update(out=y.detach()), {}),
    "list": (lambda net, x, y: net.log.append("call"), {}),
    "list, an entry a sample": (
        lambda net, x, y: net.log.extend(round(v, 3) for v in x[:, 0].tolist()),
        {"log": "cat"},
    ),
    "list of totals": (lambda net, x, y: net.log.append(len(x)), {"log": "sum"}),
    "list that is cleared": (lambda net, x, y: (net.log.clear(), net.log.append(net.n)), {}),
    "first in, first out": (lambda net, x, y: (net.log.append("new"), net.log.pop(0) if len(net.log) > 2 else 0), {}),
    "dict": (lambda net, x, y: net.table.update(n=net.table["n"] + 1), {}),
    "dict of sums": (lambda net, x, y: net.table.update(samples=net.table["samples"] + len(x)), {"table.s*": "sum"}),
    "nested dict": (lambda net, x, y: net.table["deep"].update(n=net.table["deep"]["n"] + 1), {}),
    "dict, an entry is gone": (lambda net, x, y: net.table.pop("samples", None), {}),
    "counter": (lambda net, x, y: net.counter.update(["call"]), {}),
    "counter of samples": (lambda net, x, y: net.counter.update(["call"] * len(x)), {"counter": "sum"}),
    "set": (lambda net, x, y: net.seen.add("call"), {}),
    "set of samples": (lambda net, x, y: net.seen.update((x[:, 0] * 100).int().tolist()), {"seen": "cat"}),
    "deque": (lambda net, x, y: net.recent.append("call"), {}),
    "deque of samples": (lambda net, x, y: net.recent.extend(x[:, 0].tolist()), {"recent": "cat"}),
    "dataclass": (lambda net, x, y: setattr(net.stats, "calls", net.stats.calls + 1), {}),
    "dataclass, the largest": (
        lambda net, x, y: setattr(net.stats, "largest", max(net.stats.largest, x.max().item())),
        {"*.largest": "max"},
    ),
    "slots": (lambda net, x, y: setattr(net.slotted, "calls", net.slotted.calls + 1), {}),
    "slots, summed": (
        lambda net, x, y: setattr(net.slotted, "samples", net.slotted.samples + len(x)),
        {"slotted.samples": "sum"},
    ),
    "object with a lock": (lambda net, x, y: net.meter.add(len(x)), {"meter.count": "sum"}),
    "namespace": (lambda net, x, y: setattr(net.space, "n", net.space.n + 1), {}),
    "array": (lambda net, x, y: net.histogram.__iadd__(len(x)), {"histogram": "sum"}),
    "array, alike": (lambda net, x, y: net.histogram.__setitem__(0, 5.0), {}),
    "submodule": (lambda net, x, y: setattr(net.inner, "calls", net.inner.calls + 1), {}),
    "submodule's dict": (lambda net, x, y: net.inner.notes.update(n=net.inner.notes.get("n", 0) + 1), {}),
    "a function": (
        lambda net, x, y: net.log.append(len(x)),
        {"log": lambda old, new, sizes: [*old, sum(part[-1] for part in new)]},
    ),
    "many": (many, {}),
}


@pytest.mark.parametrize(("change", "rules"), CASES.values(), ids=CASES.keys())
def test_state_matches_the_plain_module(wrap: Callable[..., Any], change: Change, rules: dict[str, Any]) -> None:
    plain, net = Net(change), Net(change)
    net.load_state_dict(plain.state_dict())
    model = wrap(net, state=rules)
    objects = {name: getattr(net, name) for name in ("log", "table", "stats", "histogram", "recent")}
    for size in SIZES:
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x), plain(x))
        assert_equal(state_of(net), state_of(plain), "state")
    assert all(getattr(net, name) is held for name, held in objects.items())


WRONG: dict[str, tuple[Change, str]] = {
    "number": (adds("samples", len), "samples"),
    "list": (lambda net, x, y: net.log.append(x.sum().item()), "log"),
    "dict": (lambda net, x, y: net.table.update(n=x.sum().item()), "table.n"),
    "dict on even shards": (lambda net, x, y: net.table.update(n=net.table["n"] + 4), "table.n"),
    "nested": (lambda net, x, y: net.table["deep"].update(n=x.sum().item()), "table.deep.n"),
    "set": (lambda net, x, y: net.seen.add(x.sum().item()), "seen"),
    "deque": (lambda net, x, y: net.recent.append(x.sum().item()), "recent"),
    "dataclass": (lambda net, x, y: setattr(net.stats, "largest", x.max().item()), "stats.largest"),
    "slots": (lambda net, x, y: setattr(net.slotted, "samples", x.sum().item()), "slotted.samples"),
    "object": (lambda net, x, y: net.meter.add(len(x)), "meter.count"),
    "array": (lambda net, x, y: net.histogram.__iadd__(x.sum().item()), "histogram"),
    "buffer": (lambda net, x, y: net.total.add_(y.detach().sum(0)), "total"),
    "tensor in a dict": (lambda net, x, y: net.tensors["total"].add_(y.detach().sum(0)), "tensors.total"),
    "a shape": (lambda net, x, y: setattr(net, "n", x.shape), "n"),
    "ones for samples": (lambda net, x, y: setattr(net, "top", torch.ones(len(x))), "top"),
    "the size": (lambda net, x, y: setattr(net, "top", x.shape[0]), "top"),
}


@pytest.mark.parametrize(("change", "path"), WRONG.values(), ids=WRONG.keys())
def test_a_missing_rule_is_an_error_and_restores_the_module(
    wrap: Callable[..., Any], change: Change, path: str
) -> None:
    net = Net(change)
    model = wrap(net, probe=False)  # which would find out what some of them mean
    for _ in range(2):
        before = copy.deepcopy(state_of(net))
        with pytest.raises(
            instep.StateError, match=rf"forward changed '{path}'[\s\S]*rule for '{path}' in state: 'sum'"
        ):
            model(torch.randn(8, 3))
        assert_equal(state_of(net), before, "state")


@pytest.mark.parametrize("name", ["list", "dict", "set", "object", "array"])
def test_warn_keeps_the_first_replicas_value(wrap: Callable[..., Any], name: str) -> None:
    change, path = WRONG[name]
    net, first = Net(change), Net(change)
    first.load_state_dict(net.state_dict())
    x = torch.randn(8, 3)
    with pytest.warns(UserWarning, match=path):
        wrap(net, on_unmerged_state="warn")(x)
    first(x[:4])
    assert_equal(state_of(net), state_of(first), "state")


def test_a_tensor_named_in_merge_is_an_output_also_where_replicas_agree(wrap: Callable[..., Any]) -> None:
    def change(net: Net, x: Tensor, y: Tensor) -> None:
        net.top = torch.ones(len(x))
        net.samples = (x == x).sum()

    plain, net = Net(change), Net(change)
    model = wrap(net, merge={"top": "cat", "samples": "sum"})
    for size in (8, 6, 7):
        x = torch.randn(size, 3)
        model(x), plain(x)
        assert_equal(state_of(net), state_of(plain), "state")


def test_changes_between_calls_reach_the_replicas(wrap: Callable[..., Any]) -> None:
    """Also in containers that `forward` changes, and of which replicas therefore have their own."""

    def change(net: Net, x: Tensor, y: Tensor) -> None:
        net.log.append(f"entry {len(net.log)}")
        net.table["n"] += net.table.get("step", 1)
        y.mul_(net.stats.calls).add_(net.table.get("shift", 0))

    plain, net = Net(change), Net(change)
    net.load_state_dict(plain.state_dict())
    model = wrap(net)
    edits: list[Callable[[Net], Any]] = [
        lambda net: setattr(net.stats, "calls", 3),
        lambda net: net.table.update(step=10),
        lambda net: net.log.clear(),
        lambda net: net.table.update(shift=torch.ones(2)),
        lambda net: net.table["shift"].add_(1),
        lambda net: setattr(net, "table", {"n": 5}),
        lambda net: setattr(net, "log", ["new"]),
    ]
    for edit in edits:
        x = torch.randn(8, 3)
        torch.testing.assert_close(model(x), plain(x))
        edit(net)
        edit(plain)
        torch.testing.assert_close(model(x), plain(x))
        assert_equal(state_of(net), state_of(plain), "state")


def test_a_failed_call_restores_containers(wrap: Callable[..., Any]) -> None:
    def change(net: Net, x: Tensor, y: Tensor) -> None:
        net.log.append("call")
        net.table["n"] += 1
        if x.sum() > 1000:
            raise ValueError("too large")

    net = Net(change)
    model = wrap(net, probe=False)  # which would find out what some of them mean
    for _ in range(2):
        before = copy.deepcopy(state_of(net))
        with pytest.raises(ValueError, match="too large"):
            model(torch.full((4, 3), 1000.0))
        assert_equal(state_of(net), before, "state")
        model(torch.randn(6, 3))
    assert net.log == ["call"] * 2


def test_locks_and_files_stay_shared() -> None:
    found: list[int] = []

    def change(net: Net, x: Tensor, y: Tensor) -> None:
        found.append(id(net.meter.lock))
        net.meter.count += 1

    net = Net(change)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        model(torch.randn(6, 3))
    assert set(found) == {id(net.meter.lock)}
    assert net.meter.count == 1


def test_attributes_of_a_parameter_reach_the_replicas(wrap: Callable[..., Any]) -> None:
    class Tagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.weight.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.weight.scale

    net = Tagged()
    model = wrap(net)
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x), net(x))
    net.weight.scale = 3.0
    torch.testing.assert_close(model(x), x * net.weight * 3)


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen, self.log = np.zeros(()), ["start"]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.log.append("call")
        out: Tensor = self.layer(x)
        return out


def test_the_result_of_a_rule_function_is_checked_before_writes(wrap: Callable[..., Any]) -> None:
    def add(old: Any, new: list[Any], sizes: list[int]) -> Any:
        return old + sum(one - old for one in new)

    model = wrap(Total(), state={"seen": add})
    model(torch.randn(7, 3))
    assert model.seen == 7
    assert model.log == ["start", "call"]
    model = wrap(Total(), state={"seen": add, "log": lambda old, new, sizes: None})
    with pytest.raises(
        instep.StateError, match=r"state=\{'log': ...\} returned a value of type NoneType, and the attribute is a list"
    ):
        model(torch.randn(7, 3))
    assert model.seen == 0
    assert model.log == ["start"]


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_an_attribute_that_one_replica_sets_is_merged(engine: str) -> None:
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.best = nn.Linear(3, 2), 0.0

        def forward(self, x: Tensor) -> Tensor:
            if float(x.max()) > self.best:
                self.best = float(x.max())
            return self.layer(x)

    net, x = Best(), torch.full((4, 3), -1.0)
    x[0] = 5.0
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, state={"best": "max"}) as model:
        model(x)
        assert net.best == 5.0
        model(x.flip(0) + 1)
        assert net.best == 6.0
