"""What a script changes in imported modules, and what is changed there without it: a worker imports them for itself."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.engines.processes.serialization.constants import Constants
from instep.errors import CannotCross

from ..connections import only_mine, script


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    only_mine(monkeypatch)


CONFIG = """
CFG = {"scale": 1.0, "rate": 0.1, "deep": {"bias": 2, "other": 3}}
SHARED = {"bias": 1.0}
"""

NETS = """
from dataclasses import dataclass
import torch
from torch import nn
import config_of_mine
from config_of_mine import SHARED

CFG = {"scale": 1.0, "rate": 0.1}
WEIGHTS = [1.0, 2.0]
NAMES = {"a", "b"}
CALLS = {"count": 0}
STEPS = [0, 0]
REGISTRY = {"none": 0}
CACHE = {}
EXTRA = []
FILLED = {"a": 1}
FILLED["a"] = 2
LEVEL = 1
SIZE = 8
RATE = 0.1
READY = None
LATE = 1


def register(cls):
    REGISTRY[cls.__name__] = 1
    return cls


def set_level(level):
    global LEVEL
    LEVEL = level


def set_late():
    global LATE
    LATE = 2


set_late()


def prepare():
    global READY
    if READY is None:
        READY = 1
    return READY


def act(x):
    return x * sum(WEIGHTS) * len(NAMES) * LONG[1] + len(EXTRA)


def twice(x):
    return 2 * x


def settings():
    return CALLS


@dataclass
class Config:
    scale: float = 1.0
    shape: tuple = (1, 2)
    made = 1 + 1
    count = 0

    @classmethod
    def counted(cls):
        cls.count += 1
        return cls.count


class Base(nn.Module):
    factor = 1.0
    over = 1.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, 4)

    def forward(self, x):
        return self.after(self.layer(x)) * self.factor * self.over

    def after(self, x):
        return x

    def configure(self):
        return RATE, CFG["rate"], self.factor


@register
class Net(Base):
    pass


class Plain(Base):
    over = 2.0

    def forward(self, x):
        return super().forward(x)

    def after(self, x):
        x = act(x) * CFG["scale"] * Config.scale * LEVEL * LATE
        x = x * config_of_mine.CFG["deep"]["bias"] * SHARED["bias"] * FILLED["a"]
        x[0] = x[0]
        CALLS["count"] += 1
        settings()["count"] += 1
        STEPS.append(1)
        CACHE[x.shape] = 1
        Config.counted()
        return x * (1 if "none" in REGISTRY else 2) * prepare() * Config.made


class Quick(Plain):
    pass
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with nets, and the settings beside it."""
    (tmp_path / "config_of_mine.py").write_text(CONFIG)
    (tmp_path / "nets_of_mine.py").write_text(f"LONG = {list(range(200))}\n{NETS}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("nets_of_mine")
    for name in ("nets_of_mine", "config_of_mine", "more_of_mine"):
        sys.modules.pop(name, None)


def other(self: Any, x: Any) -> Any:
    return x


Change = Callable[[Any], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "an entry": (lambda m: m.CFG.update(scale=2.0), r"nets_of_mine\.CFG\['scale'\].* is 2\.0 by now; there it is 1\.0"),
    "a dictionary": (lambda m: setattr(m, "CFG", {"scale": 3}), r"CFG\['scale'\].* is 3 by now"),
    "no entry": (lambda m: m.CFG.clear(), r"CFG\['scale'\].* is gone; there it is 1\.0"),
    "deep": (lambda m: m.config_of_mine.CFG["deep"].update(bias=5), r"config_of_mine\.CFG\['deep'\]\['bias'\].* is 5"),
    "from another module": (lambda m: m.SHARED.update(bias=3.0), r"nets_of_mine\.SHARED\['bias'\].* is 3\.0"),
    "a list": (lambda m: m.WEIGHTS.append(torch.ones(2)), r"WEIGHTS.* there it is \[1\.0, 2\.0\]"),
    "a set": (lambda m: m.NAMES.add("c"), r"NAMES.* by now"),
    "an attribute": (lambda m: setattr(m.Config, "scale", 2.0), r"nets_of_mine\.Config\.scale.* is 2\.0"),
    "an attribute of a base": (lambda m: setattr(m.Base, "factor", 2), r"nets_of_mine\.Base\.factor.* is 2 by now"),
    "an attribute of its own": (lambda m: setattr(m.Plain, "over", 3.0), r"nets_of_mine\.Plain\.over.* is 3\.0"),
    "an attribute over a base's": (lambda m: setattr(m.Quick, "factor", 2), r"Quick\.factor.* is 2 .*that of a base"),
    "a function": (lambda m: setattr(m, "act", m.twice), r"nets_of_mine\.act.*twice.*the function of its file"),
    "a method": (
        lambda m: setattr(m.Plain, "after", other),
        r"nets_of_mine\.Plain\.after.*other.*function of its",
    ),
    "a method of a base": (lambda m: setattr(m.Base, "forward", other), r"nets_of_mine\.Base\.forward.*other"),
    "a method over a base's": (lambda m: setattr(m.Quick, "forward", other), r"Quick\.forward.*other.*of a base class"),
    "a global that a function sets": (lambda m: m.set_level(3), r"nets_of_mine\.LEVEL.* is 3 by now; there it is 1"),
}


@pytest.mark.parametrize("early", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str, early: bool, nets: Any) -> None:
    change, said = CHANGES[name]
    net = nets.Quick()
    constants = Constants(net.modules())
    if not early:
        constants.check()
        net(torch.randn(2, 8))  # counts, and fills what is there to be filled
        constants.check()
    change(nets)
    for _ in range(2):
        with pytest.raises(CannotCross, match=said) as caught:
            constants.check()
    assert "self." in str(caught.value)
    assert "engine='threads'" in str(caught.value)


SAME: dict[str, Change] = {
    "another entry": lambda m: m.CFG.update(rate=1, more=2),
    "an equal dictionary": lambda m: setattr(m, "CFG", {"scale": 1.0}),
    "a deep entry that nobody reads": lambda m: m.config_of_mine.CFG["deep"].update(other=5),
    "a name that was taken from elsewhere": lambda m: setattr(m.config_of_mine, "SHARED", {"bias": 7}),
    "what __init__ reads": lambda m: setattr(m, "SIZE", 4),
    "what a method reads that nobody calls": lambda m: setattr(m, "RATE", 4),
    "a method that nobody calls": lambda m: setattr(m.Base, "configure", other),
    "what a class has of its own": lambda m: setattr(m.Base, "over", 9),
    "an attribute that the class counts": lambda m: m.Config.counted(),
    "what is counted by hand": lambda m: m.settings().update(count=9),
    "a registry": lambda m: m.register(type("New", (), {})),
    "a long list": lambda m: m.LONG.append(1),
    "an empty list": lambda m: m.EXTRA.append(1),
    "a cache": lambda m: m.CACHE.update(a=1),
    "what is made when it is first asked for": lambda m: m.prepare(),
    "a function that is wrapped": lambda m: setattr(m, "act", functools.wraps(m.act)(lambda x: m.act(x))),
    "the module again": lambda m: importlib.reload(m),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_in_a_worker_is_let_be(name: str, nets: Any) -> None:
    for early in (True, False):
        constants = Constants(nets.Quick().modules())
        if not early:
            constants.check()
        SAME[name](nets)
        constants.check()
        constants.check()


class Hooked(importlib.machinery.SourceFileLoader):
    """Imports files with something added to each function, as those do that check types."""

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> Any:
        text = bytes(data).decode().replace("def act(x)", "@(lambda _: lambda x: x)\ndef act(x)")
        return super().source_to_code(text.encode(), path)


def test_a_file_that_a_hook_imports_says_nothing(nets: Any, tmp_path: Path) -> None:
    loader = Hooked("nets_of_mine", str(tmp_path / "nets_of_mine.py"))
    spec = importlib.util.spec_from_file_location("nets_of_mine", loader.path, loader=loader)
    assert spec is not None
    hooked: Any = importlib.util.module_from_spec(spec)
    sys.modules["nets_of_mine"] = hooked
    exec(loader.source_to_code(Path(loader.path).read_bytes(), loader.path), vars(hooked))
    Constants([hooked.Quick()]).check()
    assert nets.act(1) != hooked.act(1)


def test_a_method_that_is_called_counts(nets: Any) -> None:
    constants = Constants([nets.Base()])
    nets.RATE = 0.2
    constants.check()
    with pytest.raises(CannotCross, match="RATE"):
        constants.check("configure")


@pytest.mark.parametrize(
    "line",
    [
        "nets_of_mine.CFG['scale'] = 5.0",
        "nets_of_mine.act = nets_of_mine.twice",
        "nets_of_mine.Config.scale = 3.0",
        "setattr(nets_of_mine.Base, 'factor', 3)",
        "nets_of_mine.set_level(5)",
        "def change():\n    nets_of_mine.set_level(5)\nchange()",
    ],
)
def test_what_another_file_does_as_it_is_imported_is_done_in_a_worker_too(line: str, nets: Any, tmp_path: Path) -> None:
    constants = Constants([nets.Quick()])
    constants.check()
    (tmp_path / "more_of_mine.py").write_text(f"import nets_of_mine\n{line}\n")
    importlib.invalidate_caches()
    importlib.import_module("more_of_mine")
    constants.check()
    assert constants._of["forward"].constants
    constants.check()


def test_what_a_function_of_another_file_does_is_not(nets: Any, tmp_path: Path) -> None:
    constants = Constants([nets.Quick()])
    text = "import nets_of_mine\n\ndef main():\n    nets_of_mine.CFG['scale'] = 5.0\n\n"
    (tmp_path / "more_of_mine.py").write_text(f"{text}if __name__ == '__main__':\n    main()\n")
    importlib.invalidate_caches()
    importlib.import_module("more_of_mine").main()
    with pytest.raises(CannotCross, match="CFG"):
        constants.check()


ODD = """
from enum import Enum
from typing import NamedTuple
from torch import nn

class Color(Enum):
    red = 1

class Point(NamedTuple):
    left: int = 1

class Follows:
    def __init_subclass__(cls):
        type.__setattr__(cls, "green", 2)

class Followed(Follows):
    green = 1

def painted(cls):
    type.__setattr__(cls, "blue", 2)
    return cls

@painted
class Painted:
    blue = 1

class Hashed:
    def __hash__(self):
        return 1

class Equal(Hashed):
    def __eq__(self, other):
        return True

EXTRA

class Net(nn.Module):
    def forward(self, x):
        Equal.__hash__
        return x * Color.red.value * Point.left * Followed.green * Painted.blue * pow(BLUE, 1)
"""
STAR = "def pow(x): return 2\nBLUE = 3\ntry:\n    from math import *\nexcept ImportError:\n    pass\npow(2, 1)"
GIVEN = "import sys\nBLUE = 3\ndict.update(sys.modules[__name__].__getattribute__('__' + 'dict__'), BLUE=4)"


@pytest.mark.parametrize("extra", [GIVEN, "BLUE = 3\nBLUE += 1", "BLUE = 3\nglobals()['BLUE'] = 4", STAR])
def test_what_python_makes_of_a_body_is_no_change(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_of_mine.py").write_text(ODD.replace("EXTRA", extra))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    try:
        constants = Constants([importlib.import_module("odd_of_mine").Net()])
        constants.check()
        constants.check()
    finally:
        sys.modules.pop("odd_of_mine")


SCRIPT = """
import nets_of_mine

class Mine(nets_of_mine.Plain):
    pass

class Holds(nets_of_mine.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nets_of_mine.Net()
    def forward(self, x):
        return self.inner(x) * nets_of_mine.CFG.get("scale")
"""


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", ["Mine", "Holds"])
def test_replicas_agree_or_say_so(name: str, nets: Any) -> None:
    net: nn.Module = getattr(script(SCRIPT), name)()
    x = torch.randn(5, 8)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False) as model:
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x))
        nets.CFG["scale"] = 2.0
        with pytest.raises(CannotCross, match=r"nets_of_mine\.CFG\['scale'\]"):
            model(x)
        nets.CFG["scale"] = 1.0
        torch.testing.assert_close(model(x), net(x))
        nets.Base.forward = other
        with pytest.raises(CannotCross, match=r"nets_of_mine\.Base\.forward"):
            model(x)
