"""The code that runs in a worker when a method of a module does, as far as it can be followed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from instep.engines.processes.serialization.by_reference import global_names
from instep.engines.processes.serialization.codes import Glance, glance

_FUNCTIONS_AT_MOST = 2000
_NOT_OURS = {"torch", "instep", "builtins", *sys.stdlib_module_names}
_INSTALLED = ("site-packages", "dist-packages")
_MAKES = {"__init__", "__new__", "__post_init__"}
_NOT_RUN = {"__init_subclass__", "__class_getitem__", "__del__", "__repr__", "__str__", "__getstate__", "__reduce__"}
_ALWAYS_RUN = {"forward", "backward"}


class Reader(NamedTuple):
    """A function that is reached, the modules that it names, and what it does."""

    function: types.FunctionType
    modules: list[types.ModuleType]
    glance: Glance


class Reach:
    """The user's own functions and classes that a call of one method leads to."""

    def __init__(self, held: Held, method: str) -> None:
        self.readers: list[Reader] = []
        self.words: set[str] = set()
        """The attributes that they read."""
        self.named: dict[type, None] = {}
        """Classes of objects that the modules hold, or that the functions name; their bases are not among them."""
        self._classes: set[type] = set()
        self.bound: set[str] = set()
        """What any of their methods and functions bind, as globals or attributes."""
        self.changed: set[str] = set()
        self.put: set[Any] = set()
        self._waiting: dict[str, list[tuple[types.FunctionType, bool]]] = {}
        """Methods by their names, for when somebody has a word for them."""
        self._pending: list[tuple[types.FunctionType, bool]] = []
        self._seen: set[int] = set()
        self._say({method})
        for cls in held.classes:
            self._meet(cls, made=False)
        for function in held.functions:
            self._go(function, False)
        while self._pending and len(self.readers) < _FUNCTIONS_AT_MOST:
            self._read(*self._pending.pop())
        self.whole = not self._pending

    def _go(self, function: types.FunctionType, method: bool) -> None:
        if id(function) not in self._seen and is_ours(function.__module__):
            self._seen.add(id(function))
            self._pending.append((function, method))

    def _say(self, words: set[str]) -> None:
        for word in words - self.words:
            for function, method in self._waiting.pop(word, ()):
                self._go(function, method)
        self.words |= words

    def _meet(self, cls: type, made: bool) -> None:
        """Take the methods of a class that somebody has words for, and those that nobody calls by name."""
        if cls in self.named or cls.__module__ == "builtins":
            return
        ours = [one for one in cls.__mro__ if is_ours(one.__module__)]
        if ours:
            self.named[cls] = None
        for one in ours:
            if one in self._classes:
                continue
            self._classes.add(one)
            for name, function, method in _methods(one):
                self._note(glance(function.__code__, method))
                is_special = name.startswith("__") and name.endswith("__") and name not in _NOT_RUN
                if name in self.words or name in _ALWAYS_RUN or (is_special and (made or name not in _MAKES)):
                    self._go(function, method)
                elif not is_special:
                    self._waiting.setdefault(name, []).append((function, method))

    def _note(self, done: Glance) -> None:
        self.bound |= done.bound
        self.changed |= done.changed
        self.put |= done.put

    def _read(self, function: types.FunctionType, method: bool) -> None:
        done = glance(function.__code__, method)
        space = function.__globals__
        self._note(done)
        self._say(done.words)
        named = [space[name] for name in global_names(function.__code__) if name in space]
        modules: list[types.ModuleType] = []
        for value in named:  # which grows
            if isinstance(value, types.ModuleType):
                if is_ours(value.__name__) and value not in modules:
                    modules.append(value)
                    named += [vars(value)[word] for word in done.words if word in vars(value)]
            elif isinstance(value, types.FunctionType):
                self._go(value, False)
            else:
                self._meet(value if isinstance(value, type) else type(value), made=True)
        self.readers.append(Reader(function, modules, done))


class Held:
    """The user's own classes and functions that modules are made of."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds: dict[type, None] = {}
        self.functions: list[types.FunctionType] = []
        for module in modules:
            kinds[type(module)] = None
            held = list(vars(module).values())
            found = dict.fromkeys(map(type, held))
            kinds.update(found)
            if types.FunctionType in found:
                self.functions += [value for value in held if type(value) is types.FunctionType]
        self.classes = [cls for cls in kinds if any(is_ours(one.__module__) for one in cls.__mro__)]


def _methods(cls: type) -> Iterator[tuple[str, types.FunctionType, bool]]:
    """The functions of a class by name, and whether an instance is their first argument."""
    for name, held in list(vars(cls).items()):
        function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
        if isinstance(function, types.FunctionType):
            yield name, function, not isinstance(held, (classmethod, staticmethod))


def is_ours(module: str | None) -> bool:
    """Whether a module, by its name, is part of what the user has written."""
    if module is None or module.partition(".")[0] in _NOT_OURS:
        return False
    file = None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)
    return not isinstance(file, str) or not any(word in file for word in _INSTALLED)
