"""With a second interpreter: importable definitions are sent by name, others by value."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from instep.engines.processes.serialization.by_reference import is_importable

from ..connections import RemoteInterpreter, script

SCALE = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[Net, torch.Tensor]:
        return self, torch.nn.functional.relu(self.layer(x)) * SCALE


@pytest.fixture(scope="module")
def apart() -> Iterator[RemoteInterpreter]:
    other = RemoteInterpreter()
    yield other
    other.close()


def test_a_module_of_a_test_file(apart: RemoteInterpreter) -> None:
    net, x = Net(), torch.randn(2, 3)
    back, out = apart(net, x)
    assert type(back) is Net
    torch.testing.assert_close(out, net(x)[1])


SCRIPT = """
from __future__ import annotations
import dataclasses, os, torch
TEMP = 1

@dataclasses.dataclass
class Answer:
    x: torch.Tensor
    where: tuple

class Refused(Exception):
    def __init__(self, a, b):
        super().__init__(a)

class Net(torch.nn.Linear):
    def forward(self, x):
        if TEMP > 2:
            raise Refused("hot", 1)
        return Answer(super().forward(x) * TEMP, (__name__, os.getpid()))
"""


def test_a_script(apart: RemoteInterpreter) -> None:
    at_home = script(SCRIPT)
    net, x = at_home.Net(3, 2), torch.randn(2, 3)
    for temp in (1, 2):
        at_home.TEMP = temp
        answer = apart(net, x)
        assert type(answer) is at_home.Answer
        torch.testing.assert_close(answer.x, net(x).x)
        assert answer.where[0] == "__main__"
        assert answer.where[1] != os.getpid()
    at_home.TEMP = 3
    with pytest.raises(at_home.Refused, match="hot") as caught:
        apart(net, x)
    assert caught.value.args == ("hot",)


def test_importable_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("torch.nn.modules.linear", "torch._C", "torch.ops", "numpy", "sys", "os", "os.path", "collections.abc")
    assert [name for name in here if not is_importable(name)] == []
    assert not is_importable("__main__")
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "planted_twice.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path / "second")
    import planted_twice  # type: ignore[import-not-found]

    assert is_importable("planted_twice")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path])
    assert not is_importable("planted_twice"), "another file would be imported"
    monkeypatch.delitem(sys.modules, planted_twice.__name__)
