"""Globals of imported modules, which a worker imports for itself."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.serialization.constants import Constants
from instep.engines.processes.serialization.files import read_file
from instep.engines.select import EngineChoice
from instep.errors import CannotCross

from ..connections import only_mine, script


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    only_mine(monkeypatch)


SETTINGS = """
SCALE = 1.5
SHAPE: tuple[int, int] = (2, 3)
OTHER = [1]
COUNT = 0
TWICE = 1
TWICE = 2
MAYBE = None
if SCALE > 1:
    MAYBE = 1
MADE = SCALE * 2

def scaled(x):
    return x * SCALE

def count():
    global COUNT
    COUNT += 1

class Layer:
    SCALE = 7
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that a worker can import."""
    (tmp_path / "settings_of_mine.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "settings_of_mine", raising=False)
    yield importlib.import_module("settings_of_mine")
    sys.modules.pop("settings_of_mine")


def test_what_a_file_gives_its_names(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SETTINGS)
    said = read_file(str(tmp_path / "one.py"))
    assert said.body.values == {"SCALE": 1.5, "SHAPE": (2, 3), "OTHER": [1], "COUNT": 0}
    assert said.body.functions == {"scaled", "count"}
    assert said.classes["Layer"].values == {"SCALE": 7}
    assert read_file(str(tmp_path / "none.py")) == read_file(None)
    assert not read_file(None).body.bound


SCRIPT = """
import torch, settings_of_mine
from torch import nn
from settings_of_mine import scaled

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.scale(self.layer(x))

class ByAttribute(Reads):
    def scale(self, y):
        return y * settings_of_mine.SCALE

class ByFunction(Reads):
    def scale(self, y):
        return scaled(y)

class ByFunctionOfTheModule(Reads):
    @staticmethod
    def scale(y):
        return settings_of_mine.scaled(y)
"""


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", ["ByAttribute", "ByFunction", "ByFunctionOfTheModule"])
def test_a_constant_that_was_set_is_named(name: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net: nn.Module = getattr(script(SCRIPT), name)()
    x = torch.randn(5, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False) as model:
        torch.testing.assert_close(model(x), net(x))
        settings.COUNT, settings.TWICE = 5, 5  # nobody reads those
        torch.testing.assert_close(model(x), net(x))
        settings.SCALE = 2.0
        with pytest.raises(CannotCross, match=r"settings_of_mine\.SCALE.* is 2\.0 by now; there it is 1\.5"):
            model(x)
        del settings.SCALE
        with pytest.raises((CannotCross, NameError, AttributeError), match="SCALE"):
            model(x)
        settings.SCALE = 1.5
        torch.testing.assert_close(model(x), net(x))
    monkeypatch.setattr(
        "instep.parallel.choose_engine", lambda *_: EngineChoice("processes", "of the rule", automatic=True)
    )
    settings.SCALE = 3.0
    with instep.DataParallel(net, ["cpu"] * 2, probe=False) as model:
        with pytest.warns(UserWarning, match=r"goes on with threads: .*SCALE"):
            out = model(x)
        torch.testing.assert_close(out, net(x))


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


def test_nothing_is_read_of_torch(workers: WorkerPool) -> None:
    assert workers is not None
    constants = Constants([nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2), Plain()])
    constants.check()
    assert constants._of["forward"].constants == []


def test_a_file_is_read_while_other_threads_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 fails then, now and then; here it fails twice."""
    file, parse, failures = tmp_path / "of_mine.py", ast.parse, [SystemError("depth"), SystemError("depth")]
    file.write_text("SCALE = 2\n")

    def fails_twice(text: bytes) -> ast.Module:
        if failures:
            raise failures.pop()
        return parse(text)

    monkeypatch.setattr(ast, "parse", fails_twice)
    assert read_file(str(file)).body.values == {"SCALE": 2}
    assert not failures
