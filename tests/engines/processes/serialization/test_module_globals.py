"""Plain values in globals of the user's imported modules reach the workers; replaced objects are errors."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.engines.processes.serialization.module_globals import ModuleGlobals, References, SentModuleValues
from instep.engines.processes.serialization.registry import CodeRegistry
from instep.engines.select import EngineChoice
from instep.errors import CannotCross

from ..connections import script

CONF = """
from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace
import torch

SCALE = 1.5
DTYPE = torch.float32
CFG = {"scale": 1.0, "deep": {"bias": 2.0}, "layers": [1.0, 2.0]}
args = Namespace(scale=1.0)
space = SimpleNamespace(inner=SimpleNamespace(scale=1.0))

@dataclass
class Options:
    scale: float = 1.0
    weights: list = field(default_factory=lambda: [1.0])

@dataclass(frozen=True)
class Frozen:
    scale: float = 1.0

class Plain:
    factor = 1.0
    def __init__(self):
        self.scale = 1.0

options, frozen, plain = Options(), Frozen(), Plain()
current = table = None
UNREAD = object()
COUNT = {"calls": 0}
CACHE = {}
LAZY = None
BUFFER = torch.ones(1)

def scaled(x):
    return x * SCALE

def other(x):
    return x * 100

def current_scale():
    return (1.0 if current is None else current.scale) * (1.0 if table is None else table["deep"].scale)

def set_scale(value):
    global SCALE
    SCALE = value

def lazy():
    global LAZY
    if LAZY is None:
        LAZY = object()
    return 1
"""

NETS = """
import torch
from torch import nn
import conf_of_mine as conf
from conf_of_mine import CFG, args, lazy, scaled

class Net(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        y = self.after(scaled(self.layer(x))) * args.scale * CFG["scale"] * lazy()
        y = y * conf.CFG["deep"]["bias"] * sum(conf.CFG["layers"]) * conf.space.inner.scale * conf.options.scale
        y = y * sum(conf.options.weights) * conf.frozen.scale * conf.plain.scale * conf.Plain.factor * self.factor
        y = y * conf.current_scale()
        conf.COUNT["calls"] += 1
        conf.CACHE[len(conf.CACHE)] = torch.ones(1)
        return (y * conf.SCALE * conf.BUFFER).to(conf.DTYPE)

    def after(self, x):
        return x
"""


_counter = itertools.count()


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that workers can import, and its configuration. Workers outlive a test, so each test has other names."""
    number = next(_counter)
    conf, name = f"conf_of_mine_{number}", f"nets_of_mine_{number}"
    (tmp_path / f"{conf}.py").write_text(CONF)
    (tmp_path / f"{name}.py").write_text(NETS.replace("conf_of_mine", conf))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module(name)
    for module in (name, conf):
        sys.modules.pop(module, None)


Change = Callable[[Any, Any], object]
VALUES: dict[str, Change] = {
    "number": lambda conf, _: setattr(conf, "SCALE", 2.0),
    "number set by a function": lambda conf, _: conf.set_scale(3.0),
    "dtype": lambda conf, _: setattr(conf, "DTYPE", torch.float64),
    "item": lambda conf, _: conf.CFG.update(scale=2.0),
    "nested item": lambda conf, _: conf.CFG["deep"].update(bias=5.0),
    "list in a dictionary": lambda conf, _: conf.CFG["layers"].append(4.0),
    "dictionary imported by name, replaced": lambda _, nets: setattr(nets, "CFG", {"scale": 7.0}),
    "argparse.Namespace": lambda conf, _: setattr(conf.args, "scale", 2.0),
    "SimpleNamespace": lambda conf, _: setattr(conf.space.inner, "scale", 2.0),
    "namespace replaced": lambda conf, _: setattr(conf.space, "inner", type(conf.space)(scale=4.0)),
    "dataclass": lambda conf, _: setattr(conf.options, "scale", 2.0),
    "list of a dataclass": lambda conf, _: conf.options.weights.append(2.0),
    "frozen dataclass": lambda conf, _: object.__setattr__(conf.frozen, "scale", 2.0),
    "config object": lambda conf, _: setattr(conf.plain, "scale", 2.0),
    "class attribute": lambda conf, _: setattr(conf.Plain, "factor", 2.0),
    "class attribute of the module": lambda _, nets: setattr(nets.Net, "factor", 2.0),
}


@pytest.mark.usefixtures("workers")
def test_a_changed_value_reaches_the_workers(nets: Any) -> None:
    net, x = nets.Net(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model:
        for name, change in VALUES.items():
            before = net(x)
            torch.testing.assert_close(model(x), before)
            change(nets.conf, nets)
            changed = net(x)
            assert changed.dtype != before.dtype or not torch.equal(changed, before), name
            for _ in range(2):
                torch.testing.assert_close(model(x), changed, msg=name)


@pytest.mark.usefixtures("workers")
def test_values_changed_before_the_first_call_reach_the_workers(nets: Any) -> None:
    for change in VALUES.values():
        change(nets.conf, nets)
    net, x = nets.Net(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model:
        torch.testing.assert_close(model(x), net(x))


OBJECTS: dict[str, tuple[Change, str]] = {
    "function": (lambda conf, _: setattr(conf, "scaled", conf.other), r"conf_of_mine_\d+\.scaled was replaced"),
    "function imported by name": (
        lambda conf, nets: setattr(nets, "scaled", conf.other),
        r"nets_of_mine_\d+\.scaled was",
    ),
    "method": (lambda _, nets: setattr(nets.Net, "after", lambda self, x: 2 * x), r"nets_of_mine_\d+\.Net\.after was"),
}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("early", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_replaced_object_is_an_error(name: str, early: bool, nets: Any) -> None:
    change, message = OBJECTS[name]
    net, x = nets.Net(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model:
        if not early:
            model(x)
        change(nets.conf, nets)
        for _ in range(2):
            with pytest.raises(CannotCross, match=message) as caught:
                model(x)
        assert "engine='threads'" in str(caught.value)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("early", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("name", ["current", "table"])
def test_an_object_in_place_of_none_is_an_error(name: str, early: bool, nets: Any) -> None:
    net, x, conf = nets.Net(), torch.randn(6, 4), nets.conf
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False) as model:
        if not early:
            torch.testing.assert_close(model(x), net(x))
        setattr(conf, name, conf.Options(scale=3.0) if name == "current" else {"deep": conf.Options(scale=3.0)})
        for _ in range(2):
            with pytest.raises(CannotCross, match=rf"{name} is another object in the script.*has None") as caught:
                model(x)
        assert "engine='threads'" in str(caught.value)
        setattr(conf, name, None)
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
def test_a_replaced_tensor_is_an_error_until_it_is_put_back(nets: Any) -> None:
    net, x = nets.Net(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model:
        torch.testing.assert_close(model(x), net(x))
        first, nets.conf.BUFFER = nets.conf.BUFFER, torch.full((1,), 2.0)
        with pytest.raises(CannotCross, match=r"conf_of_mine_\d+\.BUFFER was replaced"):
            model(x)
        nets.conf.BUFFER = first
        torch.testing.assert_close(model(x), net(x))


SAME: dict[str, Change] = {
    "object that nobody names": lambda conf, _: setattr(conf, "UNREAD", object()),
    "cache": lambda conf, _: conf.CACHE.update(a=torch.ones(2)),
    "object made at first use": lambda conf, _: conf.lazy(),
    "wrapped function": lambda _, nets: setattr(nets, "scaled", functools.wraps(nets.scaled)(nets.scaled)),
}


@pytest.mark.usefixtures("workers")
def test_objects_that_a_worker_creates_itself_are_no_error(nets: Any) -> None:
    net, x = nets.Net(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model:
        model(x)
        for name, change in SAME.items():
            change(nets.conf, nets)
            torch.testing.assert_close(model(x), net(x), msg=name)


SCRIPT = """
import torch, conf_of_mine
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return conf_of_mine.scaled(self.layer(x)) * conf_of_mine.args.scale
"""


@pytest.mark.usefixtures("workers")
def test_values_that_code_of_the_script_names_are_sent(nets: Any) -> None:
    conf, x = nets.conf, torch.randn(6, 4)
    net: nn.Module = script(SCRIPT.replace("conf_of_mine", conf.__name__)).Net()
    conf.args.scale = 3.0
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model:
        torch.testing.assert_close(model(x), net(x))
        conf.args.scale, conf.SCALE = 2.0, 4.0
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
def test_auto_falls_back_to_threads(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.parallel.choose_engine", lambda *_: EngineChoice("processes", "rule", automatic=True))
    net, x = nets.Net(), torch.randn(6, 4)
    nets.scaled = nets.conf.other
    with instep.DataParallel(net, ["cpu"] * 3, probe=False) as model:
        with pytest.warns(UserWarning, match=r"threads.*nets_of_mine_\d+\.scaled"):
            out = model(x)
        torch.testing.assert_close(out, net(x))


def references(modules: set[str], names: set[str]) -> References:
    found = References()
    found.modules, found.names = modules, names
    return found


def test_unchanged_values_are_compared_without_a_scan(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = ModuleGlobals(SentModuleValues())
    watched.add(references({nets.__name__}, {"Net"}))
    assert watched.changes() is not None
    watched.mark_sent()
    monkeypatch.setattr("instep.engines.processes.serialization.module_globals._Scan", None)
    assert watched.changes() is None


def test_libraries_are_not_watched() -> None:
    watched = ModuleGlobals(SentModuleValues())
    watched.add(references({"torch.nn.modules.linear", "json", "numpy"}, {"relu", "loads"}))
    assert watched.changes() is None


def test_a_value_that_failed_to_be_packed_is_packed_again(nets: Any) -> None:
    registry = CodeRegistry(is_parent=True)
    watched = ModuleGlobals(registry.sent_module_values)
    registry.pack(nets.Net())
    watched.add(registry.references)
    assert registry.pack_changed_globals(watched) is not None
    nets.conf.space.inner = types.SimpleNamespace(scale=9.0, lock=threading.Lock())
    for _ in range(2):
        with pytest.raises(CannotCross, match="lock"):
            registry.pack_changed_globals(watched)
    del nets.conf.space.inner.lock
    assert registry.pack_changed_globals(watched) is not None
    assert registry.pack_changed_globals(watched) is None


def test_another_module_of_the_same_name_is_watched(nets: Any) -> None:
    watched = ModuleGlobals(SentModuleValues())
    watched.add(references({nets.__name__}, {"Net"}))
    watched.changes()
    watched.mark_sent()
    name = nets.conf.__name__
    sys.modules.pop(name)
    again = importlib.import_module(name)
    again.SCALE = 7.0
    watched.add(references({name}, {"Net"}))
    found = watched.changes()
    assert found is not None
    assert 7.0 in [update.value for update in found[0]]


def test_two_wrappers_that_send_the_same_values(nets: Any) -> None:
    registry = CodeRegistry(is_parent=True)
    first, second = (ModuleGlobals(registry.sent_module_values) for _ in range(2))
    for watched in (first, second):
        registry.pack(nets.Net())
        watched.add(registry.references)
    assert registry.pack_changed_globals(first) is not None
    assert registry.pack_changed_globals(second) is None, "the worker has the values"
    nets.conf.SCALE = 9.0
    assert registry.pack_changed_globals(second) is not None
    nets.conf.SCALE = 1.5
    assert registry.pack_changed_globals(first) is not None, "the second wrapper has sent another value"
    assert registry.pack_changed_globals(second) is None


DOUBLED = """
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)
"""


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("is_script", [False, True])
def test_a_replaced_object_is_no_error_for_wrappers_that_do_not_use_it(
    nets: Any, is_script: bool, tmp_path: Path
) -> None:
    name = nets.__name__.replace("nets", "others")
    (tmp_path / f"{name}.py").write_text(DOUBLED)
    importlib.invalidate_caches()
    other = (script(DOUBLED) if is_script else importlib.import_module(name)).Net(4, 2)
    net, x = nets.Net(), torch.randn(6, 4)
    with (
        instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False) as model,
        instep.DataParallel(other, ["cpu"] * 3, engine="processes", probe=False) as unaffected,
    ):
        for _ in range(2):
            torch.testing.assert_close(model(x), net(x))
            torch.testing.assert_close(unaffected(x), other(x))
        nets.conf.BUFFER = torch.full((1,), 2.0)
        with pytest.raises(CannotCross, match="BUFFER was replaced"):
            model(x)
        torch.testing.assert_close(unaffected(x), other(x))
    sys.modules.pop(name, None)
