"""Only debuggers count as debuggers; other trace functions do not."""

from __future__ import annotations

import bdb
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from instep.runtime.debugger import is_debugger_attached, is_in_debugger


class Tracer:
    """A trace object as coverage tools install it."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Tracer:
        return self

    def trace(self, frame: FrameType, event: str, arg: Any) -> None:
        return None


class Quiet(bdb.Bdb):
    def dispatch_line(self, frame: FrameType) -> Any:
        return self.trace_dispatch


@pytest.fixture
def outer_trace() -> Iterator[None]:
    outer = sys.gettrace()
    yield
    sys.settrace(outer)


@pytest.mark.usefixtures("outer_trace")
@pytest.mark.parametrize("trace", [Tracer(), Tracer().trace, lambda *_: None])
def test_a_coverage_tool_is_not_a_debugger(trace: Any) -> None:
    sys.settrace(trace)
    attached = is_debugger_attached()
    sys.settrace(None)
    assert not attached


@pytest.mark.usefixtures("outer_trace")
@pytest.mark.parametrize("debugger", [bdb.Bdb(), Quiet()])
def test_pdb_is_a_debugger(debugger: bdb.Bdb) -> None:
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    attached = is_debugger_attached()
    sys.settrace(None)
    assert attached


@pytest.mark.usefixtures("outer_trace")
@pytest.mark.parametrize("module", ["pydevd", "_pydevd_bundle.pydevd_trace_dispatch", "debugpy.server"])
def test_a_trace_function_of_pydevd_is_a_debugger(module: str) -> None:
    def trace(*_: Any) -> None:
        return None

    trace.__module__ = module
    sys.settrace(trace)
    attached = is_debugger_attached()
    sys.settrace(None)
    assert attached


def test_no_debugger_is_in_an_ordinary_stack() -> None:
    assert not is_in_debugger(sys._getframe())
    names = {"__name__": "pdb", "sys": sys}
    exec("frame = sys._getframe()", names)
    assert is_in_debugger(names["frame"])  # type: ignore[arg-type]
