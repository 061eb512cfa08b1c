"""Exceptions keep their type, their arguments and where they were raised."""

from __future__ import annotations

import builtins
import json
import os
import sys
import threading
import traceback
from typing import Any

import pytest

from ..connections import LocalChannel, script

SCRIPT = """
class Odd(ValueError):
    def __init__(self, code, *, reason):
        super().__init__(f"code {code}")
        self.code, self.reason = code, reason

class Shy(Exception):
    def __reduce__(self):
        raise RuntimeError("I do not travel")

def odd():
    try:
        {}["inner"]
    except KeyError as error:
        raise Odd(3, reason=["r"]) from error
"""


def raised(function: Any) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def test_an_exception_of_the_script() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    error: Any = channel.error_to_parent(raised(channel.to_worker(at_home.odd)))
    assert type(error) is at_home.Odd
    assert (error.args, error.code, error.reason) == (("code 3",), 3, ["r"])
    assert type(error.__cause__) is KeyError
    assert error.__cause__ is error.__context__
    assert 'File "<script>", line 15, in odd' in shown(error)
    assert 'File "<script>", line 13, in odd' in shown(error)


def open_nothing() -> None:
    os.stat("/does/not/exist")


def decode() -> None:
    b"\xff".decode("utf-8")


def parse() -> None:
    compile("1 +", "here", "exec")


BUILT_IN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "OSError": (open_nothing, ("errno", "filename", "strerror")),
    "Unicode": (decode, ("encoding", "start", "reason")),
    "Syntax": (parse, ("filename", "lineno", "msg")),
    "Import": (lambda: __import__("no_such_module"), ("name", "msg")),
    "exit": (lambda: sys.exit(3), ("code",)),
    "json": (lambda: json.loads("{"), ("msg", "doc", "pos")),
    "stop": (lambda: next(iter(())), ("value",)),
}


@pytest.mark.parametrize(("function", "attributes"), BUILT_IN.values(), ids=BUILT_IN.keys())
def test_builtin_exceptions_keep_their_attributes(function: Any, attributes: tuple[str, ...]) -> None:
    error = raised(function)
    back = LocalChannel().error_to_parent(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert [getattr(back, name) for name in attributes] == [getattr(error, name) for name in attributes]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups and notes came with Python 3.11")
def test_groups_and_notes() -> None:
    at_home = script(SCRIPT)
    odd = raised(at_home.odd)
    exception_group: Any = getattr(builtins, "ExceptionGroup")  # noqa: B009
    group = exception_group("several", [odd, OSError(2, "no")])
    group.add_note("a note")
    back: Any = LocalChannel().error_to_parent(group)
    assert type(back) is exception_group
    assert [type(error).__name__ for error in back.exceptions] == ["Odd", "FileNotFoundError"]
    assert back.__notes__ == ["a note"]


def test_parts_of_an_exception_that_cannot_be_pickled_are_sent_as_repr() -> None:
    at_home, lock = script(SCRIPT), threading.Lock()
    error = at_home.Shy("busy", lock)
    error.held = lock
    back: Any = LocalChannel().error_to_parent(error)
    assert type(back).__name__ == "Shy"
    assert back.args == ("busy", repr(lock))
    assert back.held == repr(lock)


def test_a_cyclic_chain_of_causes() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    back = LocalChannel().error_to_parent(first)
    assert str(back.__cause__) == "second"
    assert back.__cause__ is not None
    assert back.__cause__.__context__ is back
