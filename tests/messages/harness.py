"""Runs scenarios: a few lines of user code that lead to one error or warning of instep."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import instep
from instep.engines.processes.serialization.exceptions import WorkerTraceback
from instep.errors import InstepError
from instep.structure.infer import SizeMismatch

PACKAGE = Path(instep.__file__).parent
SCRIPT = "train.py"
"""The file name of a scenario in stacks."""
Line = tuple[str, int]
"""A file of the package, relative to it, and a line number."""


@dataclass(frozen=True)
class Scenario:
    """User code with a title."""

    title: str
    code: str
    show_notes: bool = False
    """Whether to show the notes of an exception, which name the replica."""
    messages: int = 1
    """How many messages it leads to: a warning may come before an error."""


def scenario(title: str, *, show_notes: bool = False, messages: int = 1) -> Callable[[Callable[[], Any]], Scenario]:
    """Make a scenario of a function. Its body runs as a script of its own, as `__main__`."""

    def decorate(function: Callable[[], Any]) -> Scenario:
        source = textwrap.dedent(inspect.getsource(function))
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.FunctionDef)
        lines = source.splitlines()[definition.body[0].lineno - 1 :]
        decorators = getattr(definition.body[0], "decorator_list", [])
        if decorators:
            lines = source.splitlines()[decorators[0].lineno - 1 :]
        return Scenario(title, textwrap.dedent("\n".join(lines)) + "\n", show_notes, messages)

    return decorate


@contextmanager
def main_module() -> Iterator[dict[str, Any]]:
    """The namespace of a script, as the module `__main__`, with the names that scenarios do not import."""
    module, original = ModuleType("__main__"), sys.modules["__main__"]
    vars(module).update(torch=torch, nn=nn, Tensor=Tensor, F=functional, instep=instep)
    sys.modules["__main__"] = module
    try:
        yield vars(module)
    finally:
        sys.modules["__main__"] = original


@dataclass
class Message:
    """The error or warning that a scenario leads to."""

    scenario: Scenario
    text: str
    """What a traceback shows: the class and the message. Several messages are separated by an empty line."""
    lines: set[Line]
    """The lines of the package that ran when the message was created."""


@dataclass
class _Creation:
    """An exception or warning that was created, with the lines of the package on the stack."""

    texts: list[str]
    lines: set[Line]
    warning: str = ""
    """The category, for a warning."""

    def is_part_of(self, text: str) -> bool:
        return any(first in text for first in map(_first_line, self.texts) if first)


class Recorder:
    """Records which exceptions and warnings of instep are created, and where."""

    def __init__(self) -> None:
        self.creations: list[_Creation] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        originals = [(cls, cls.__dict__.get("__init__")) for cls in (InstepError, SizeMismatch)]
        warn = warnings.warn
        for cls, original in originals:
            setattr(cls, "__init__", self._recorded_init(original))  # noqa: B010
        warnings.warn = self._warn  # type: ignore[assignment]
        try:
            yield
        finally:
            warnings.warn = warn
            for cls, original in originals:
                if original is None:
                    del cls.__init__
                else:
                    setattr(cls, "__init__", original)  # noqa: B010

    def _recorded_init(self, original: Callable[..., None] | None) -> Callable[..., None]:
        def init(error: BaseException, *args: Any) -> None:
            self.creations.append(_Creation([a for a in args if isinstance(a, str)], _stack_lines(sys._getframe(1))))
            if original is not None:
                original(error, *args)

        return init

    def _warn(self, message: Any, category: Any = None, stacklevel: int = 1, *_: Any, **__: Any) -> None:
        """Replaces `warnings.warn`: keeps the warnings of instep, and leaves out those of other packages."""
        frame = sys._getframe(1)
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.creations.append(_Creation([str(message)], _stack_lines(frame), (category or UserWarning).__name__))


def run(one: Scenario) -> Message:
    """Run a scenario. It must lead to exactly as many messages as it says."""
    linecache.cache[SCRIPT] = (len(one.code), None, one.code.splitlines(keepends=True), SCRIPT)
    recorder = Recorder()
    torch.manual_seed(0)
    raised: BaseException | None = None
    with main_module() as names, recorder.recording(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of C++ code are not recorded
        try:
            exec(compile(one.code, SCRIPT, "exec"), names)
        except Exception as error:
            raised = error
        finally:
            for value in list(names.values()):
                if isinstance(value, instep.DataParallel):
                    value.close()
    texts = list(dict.fromkeys(f"{c.warning}: {c.texts[0]}" for c in recorder.creations if c.warning))
    lines: set[Line] = set()
    if raised is not None:
        texts.append(f"{_class_name(raised)}: {_exception_text(raised, one.show_notes)}")
        lines.update(*(_traceback_lines(error) for error in _chain(raised) if _first_line(str(error)) in texts[-1]))
    assert len(texts) == one.messages, f"{one.title}: {texts}"
    lines.update(*(c.lines for c in recorder.creations if any(map(c.is_part_of, texts))))
    return Message(one, "\n\n".join(map(normalize, texts)), lines)


def _class_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def _exception_text(error: BaseException, show_notes: bool) -> str:
    notes = list(getattr(error, "__notes__", ()))
    if not notes and error.__cause__ is not None:  # Python 3.10 has no notes
        notes = [str(error.__cause__)]
    return "\n".join([str(error), *(notes if show_notes else ())])


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip(".")


def _chain(error: BaseException) -> list[BaseException]:
    """An exception with its causes and contexts."""
    found: list[BaseException] = [error]
    for one in found:
        found += [e for e in (one.__cause__, one.__context__) if e is not None and e not in found]
    return found


_WORKER_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _traceback_lines(error: BaseException) -> set[Line]:
    """The lines of the package in the traceback of an exception, also of one that a worker process has sent."""
    lines = _lines(_traceback_frames(error.__traceback__))
    texts = [
        *getattr(error, "__notes__", ()),
        *(str(e) for e in _chain(error) if isinstance(e, WorkerTraceback)),
    ]
    return lines | _lines((file, int(line)) for text in texts for file, line in _WORKER_FRAME.findall(text))


def _traceback_frames(tb: TracebackType | None) -> Iterator[tuple[str, int]]:
    yield from ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(tb))


def _stack_lines(frame: FrameType | None) -> set[Line]:
    return _lines((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(frame))


def _lines(frames: Any) -> set[Line]:
    prefix = f"{PACKAGE}/"
    return {(file.removeprefix(prefix), line) for file, line in frames if file.startswith(prefix)}


_VARIABLE = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x..."),
    (re.compile(r"\bpid \d+"), "pid ..."),
    (re.compile(r"(waited|replied for|started after) \d+ s"), r"\1 ... s"),
    (re.compile(r"/tmp/\S+"), "/tmp/..."),
)
_FRAME = re.compile(r' *File "([^"]*)", line \d+,? in .*')
_FLOAT = re.compile(r"\d+\.\d{5,}")


def normalize(text: str) -> str:
    """A message without what differs between runs and machines: addresses, paths, times, and digits of numbers."""
    # Frames before paths are replaced: the checkout may be in /tmp.
    text = "\n".join(_without_foreign_frames(text.strip().splitlines()))
    for pattern, replacement in _VARIABLE:
        text = pattern.sub(replacement, text)
    text = _FLOAT.sub(lambda found: f"{float(found[0]):.4f}...", text)
    return "\n".join(map(str.rstrip, text.splitlines()))


def _without_foreign_frames(lines: list[str]) -> Iterator[str]:
    """Leave out the frames of a stack that are not in the script, with their source lines."""
    skipping = False
    for line in lines:
        frame = _FRAME.fullmatch(line)
        if frame is None and skipping and line.startswith("    "):
            continue
        was_skipping, skipping = skipping, frame is not None and frame[1] != SCRIPT
        if not skipping:
            yield line
        elif not was_skipping:
            yield "  ..."
