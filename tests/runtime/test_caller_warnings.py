"""Warnings name the file and line of the user's call."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.runtime.caller_warnings import warn_caller

SOURCE = Path(instep.__file__).parent


class Counts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.total = float(x.sum()) + getattr(self, "total", 0.0)
        return super().forward(x)


class Carries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(3, 3), None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden).detach()
        return self.hidden


class Retains(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        z.retain_grad()
        return z


class Hooked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        z.register_hook(lambda grad: grad)
        return z


def hooked_module() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].register_forward_hook(lambda *args: None)
    return net


class Iterates(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.schedule = iter(range(100))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.schedule)


WARNINGS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "state without a rule": (lambda: Counts(3, 3), {"on_unmerged_state": "warn"}, "first replica's value is kept"),
    "a hook": (hooked_module, {}, "forward hook"),
    "state of the previous call": (Carries, {}, "forward reads 'hidden'"),
    "retain_grad": (lambda: Retains(3, 3), {}, "retain_grad"),
    "a hook on a tensor": (lambda: Hooked(3, 3), {}, "registers hooks"),
    "an iterator": (lambda: Iterates(3, 3), {}, "forward uses 'schedule'"),
}


@pytest.mark.parametrize(("make", "options", "words"), WARNINGS.values(), ids=WARNINGS.keys())
def test_a_warning_points_at_the_call(make: Callable[[], nn.Module], options: dict[str, Any], words: str) -> None:
    wrapped = instep.DataParallel(make(), ["cpu"] * 2, engine="threads", **options)
    with wrapped as model, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            line = "model(torch.randn(5, 3))  # this line"
            model(torch.randn(5, 3))  # this line
    (warning, *_) = [item for item in found if words in str(item.message)]
    assert warning.filename == __file__
    assert Path(__file__).read_text().splitlines()[warning.lineno - 1].strip() == line


def test_all_warnings_are_given_by_one_function() -> None:
    """A call of `warnings.warn` elsewhere would point at a file of instep."""
    found = [path.name for path in SOURCE.rglob("*.py") if re.search(r"warnings\.warn\(", path.read_text())]
    assert found == ["caller_warnings.py"]


def test_a_thread_without_a_frame_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn_caller, args=["from a thread"])
        thread.start()
        thread.join()
    assert [str(item.message) for item in found] == ["from a thread"]
