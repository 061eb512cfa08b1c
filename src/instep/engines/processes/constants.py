"""Constants of imported modules that code in a worker reads: there they are what their files say.

A worker imports a module for itself. Where a script has set one of its globals (`settings.SCALE = 2`), that shows by
what the file gives the name: a number, a text, or a tuple of such. Names that a file binds more than once, or that a
function there may bind, say nothing; and files that were installed are not read, for few set anything in those.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from instep.engines.processes.by_value import importable, names_read, words_in
from instep.errors import CannotCross
from instep.locks import ProcessLock

_MISSING = object()
_FUNCTIONS_AT_MOST = 2000
_TRIES = 10
_NOT_OURS = {"torch", "instep", "builtins", *sys.stdlib_module_names}
_INSTALLED = ("site-packages", "dist-packages")
_literals: WeakKeyDictionary[types.ModuleType, dict[str, Any]] = WeakKeyDictionary()
_reading = ProcessLock()


class Constant(NamedTuple):
    """A global of an imported module, and what its file gives it."""

    module: types.ModuleType
    name: str
    value: Any


class Constants:
    """Those that code of modules reads, as far as it can be followed: methods, and functions that they name."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = {cls for module in modules for cls in type(module).__mro__}
        self._read = list({(id(one.module), one.name): one for one in _read_by(_methods(classes))}.values())

    def check(self) -> None:
        """`CannotCross` for one that is something else here by now."""
        for module, name, value in self._read:
            now = module.__dict__.get(name, _MISSING)
            if now is not value and (type(now) is not type(value) or now != value):
                said = "is gone" if now is _MISSING else f"is {now!r} by now"
                raise CannotCross(
                    f"{module.__name__}.{name}, which code in a worker process reads, {said}; there it is {value!r}, "
                    f"as in its file, which a worker imports for itself.\nSet it on the module, pass it as an "
                    f"argument, or write engine='threads'."
                )


def _methods(classes: Iterable[type]) -> Iterator[types.FunctionType]:
    for cls in classes:
        if not _is_ours(cls.__module__):
            continue
        for held in list(vars(cls).values()):
            function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
            if isinstance(function, types.FunctionType):
                yield function


def _read_by(functions: Iterable[types.FunctionType]) -> Iterator[Constant]:
    """The constants that functions read, and those that functions read which they name."""
    pending = list(functions)
    seen = set(map(id, pending))
    while pending and len(seen) < _FUNCTIONS_AT_MOST:
        function = pending.pop()
        space, words = function.__globals__, words_in(function.__code__)
        own = sys.modules.get(function.__module__ or "")
        named = [space[name] for name in names_read(function.__code__) if name in space]
        if own is not None and vars(own) is space:
            yield from _in(own, names_read(function.__code__))
        for module in [value for value in named if isinstance(value, types.ModuleType)]:
            yield from _in(module, words)
            if _is_ours(module.__name__):
                named += [vars(module)[word] for word in words if word in vars(module)]
        for value in named:
            if isinstance(value, types.FunctionType) and id(value) not in seen and _is_ours(value.__module__):
                seen.add(id(value))
                pending.append(value)


def _is_ours(module: str | None) -> bool:
    """Whether a module, by its name, is part of what the user has written."""
    if module is None or module.partition(".")[0] in _NOT_OURS:
        return False
    file = None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)
    return not isinstance(file, str) or not any(word in file for word in _INSTALLED)


def _in(module: types.ModuleType, names: Iterable[str]) -> Iterator[Constant]:
    """Those of some names that are constants of a module which a worker imports."""
    if not _is_ours(module.__name__) or not importable(module.__name__):
        return
    with _reading:
        if module not in _literals:
            _literals[module] = _literals_in(getattr(module, "__file__", None))
        known = _literals[module]
    yield from (Constant(module, name, known[name]) for name in names if name in known)


def _literals_in(file: str | None) -> dict[str, Any]:
    """What a file gives the names that it binds once, to a literal that cannot change."""
    try:
        with open(file or "", "rb") as source:
            tree = _parse(source.read())
    except (OSError, SyntaxError, ValueError, SystemError):  # no source of its own
        return {}
    found: dict[str, Any] = {}
    unsure = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        target = node.target if isinstance(node, ast.AnnAssign) and node.value is not None else target
        if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            if target.id in found:
                unsure.add(target.id)
            found[target.id] = _literal(node.value)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            unsure.update(
                one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            )
        else:
            unsure.add(node.name)
    return {name: value for name, value in found.items() if name not in unsure and value is not _MISSING}


def _parse(text: bytes) -> ast.Module:
    """The syntax tree of a text.

    Python 3.11 counts how deep it is in a tree for all threads together, and fails (SystemError) where another thread
    parses something meanwhile. Ours take turns; the program may have others.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal that cannot change; `_MISSING` for anything else."""
    try:
        value = ast.literal_eval(node) if node is not None else _MISSING
        hash(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _MISSING
    return value
