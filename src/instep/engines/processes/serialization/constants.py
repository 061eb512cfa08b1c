"""Globals of imported modules that code in a worker reads: there they are what their files say.

A worker imports a module for itself. Where a script has set one of its globals (`settings.SCALE = 2`), an entry of one,
an attribute of a class, or put another function in the place of one, that shows by what the file says. What a file
binds more than once says nothing, nor does what is changed as files are imported, or by code that a worker runs too;
and files that were installed are not read, for few set anything in those.
"""

from __future__ import annotations

import sys
import types
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from instep.engines.processes.serialization.by_reference import global_names, is_importable
from instep.engines.processes.serialization.files import MISSING, Body, Deeds, done_by, file_of, is_mutable
from instep.engines.processes.serialization.reach import Held, Reach, is_ours
from instep.errors import CannotCross

_PARTS_AT_MOST = 100
"""Of a container that is compared part by part."""
_WRAPPERS_AT_MOST = 20
_NEVER = object()
_SHOWN = 100


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a file defines, by the globals that it has and its full name."""

    space: dict[str, Any]
    name: str

    def is_it(self, value: Any) -> bool:
        """Whether a value is that function, or says that it wraps it and so may well do the same."""
        for _ in range(_WRAPPERS_AT_MOST):
            if not hasattr(value, "__wrapped__"):
                break
            value = value.__wrapped__
        is_function = isinstance(value, types.FunctionType) and value.__globals__ is self.space
        return is_function and value.__qualname__ == self.name


class Constant(NamedTuple):
    """A global of an imported module, an entry of one, or an attribute of a class there, and what its file gives it."""

    owner: str
    space: Mapping[Any, Any]
    """What the module or the class holds by name."""
    keys: tuple[Any, ...]
    """The name, and the keys that lead from there to an entry."""
    value: Any
    """A literal, a `Function`, or `MISSING` for what is not there."""
    files: tuple[types.ModuleType, ...]
    """The modules whose files have it."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.keys[0]}" + "".join(f"[{key!r}]" for key in self.keys[1:])

    def steps(self) -> Iterator[tuple[Mapping[Any, Any], Any, Any]]:
        """Each mapping on the way, the key in it, and what is there now."""
        space: Any = self.space
        for key in self.keys:
            now = space.get(key, MISSING)
            yield space, key, now
            space = now if type(now) is dict else {}

    @property
    def by_change(self) -> bool:
        """Whether it can become something else without being bound anew."""
        return len(self.keys) > 1 or is_mutable(self.value)

    def is_still(self, now: Any) -> bool:
        """Whether a value is what the file gives."""
        return self.value.is_it(now) if isinstance(self.value, Function) else _same(now, self.value)


class Constants:
    """Those that code of modules reads, as far as it can be followed: methods, and functions and classes they name."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = Held(modules)
        self._of: dict[str, _Watched] = {}

    def check(self, method: str = "forward") -> None:
        """`CannotCross` for one that is something else here by now, and that a method reads."""
        watched = self._of.get(method)
        if watched is None:
            watched = self._of[method] = _Watched(_read_by(Reach(self._held, method)))
        watched.check()


class _Watched:
    """Some constants, which are looked at again and again."""

    def __init__(self, constants: Iterable[Constant]) -> None:
        self.constants = list(constants)
        self._quick: list[tuple[Any, Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._look()

    def check(self) -> None:
        """`CannotCross` for one that is something else by now."""
        for get, key, value in self._quick:
            if get(key, MISSING) is not value:
                break
        else:
            if all(len(now) == len(parts) and all(map(is_, now, parts)) for now, parts in self._containers):
                return
        found = [(one, list(one.steps())[-1][-1]) for one in self.constants]
        others = [(one, now) for one, now in found if not one.is_still(now)]
        for one, now in others:
            if not _is_done_by_imports(one):
                raise CannotCross(_said(one, now))
        self.constants = [one for one, now in found if one.is_still(now)]
        self._look()

    def _look(self) -> None:
        """Note the objects that are there now: as long as they are the same, there is no more to be looked at."""
        self._quick, self._containers = [], []
        for one in self.constants:
            steps = list(one.steps())
            fine = one.is_still(steps[-1][-1])
            self._quick += [(space.get, key, now if fine else _NEVER) for space, key, now in steps]
            if fine and is_mutable(one.value):
                self._containers += [(held, tuple(held)) for held in _containers(steps[-1][-1])]


def _read_by(reach: Reach) -> Iterator[Constant]:
    """The constants that are read, and that nothing that reads them may change."""
    found: dict[tuple[int, tuple[Any, ...]], Constant] = {}
    for function, modules, done in reach.readers if reach.whole else ():
        own = sys.modules.get(function.__module__ or "")
        if own is not None and vars(own) is function.__globals__:
            found.update((_place(one), one) for one in _in_module(own, global_names(function.__code__), done.keys))
        for module in modules:
            found.update((_place(one), one) for one in _in_module(module, done.words, done.keys))
    keys = {key for reader in reach.readers for key in reader.glance.keys}
    for cls in reach.named if reach.whole else ():
        found.update((_place(one), one) for one in _in_class(cls, reach.words, keys))
    for one in found.values():
        if one.keys[0] in reach.bound or (one.by_change and one.keys[0] in reach.changed):
            continue
        if not reach.put.intersection(one.keys[1:]):
            yield one


def _place(one: Constant) -> tuple[int, tuple[Any, ...]]:
    return id(one.space), one.keys


def _in_module(module: types.ModuleType, names: Iterable[str], keys: set[Any]) -> Iterator[Constant]:
    """Those of some names that are constants of a module which a worker imports; of dictionaries, entries by keys."""
    if not is_ours(module.__name__) or not is_importable(module.__name__):
        return
    space = vars(module)
    for name in sorted(names):
        origin, there = _origin(module, name)
        body, files = file_of(origin).body, (module, origin)
        if there in body.functions:
            yield Constant(module.__name__, space, (name,), Function(vars(origin), there), files)
        elif there in body.values:
            yield from _entries(Constant(module.__name__, space, (name,), body.values[there], files), keys)


def _origin(module: types.ModuleType, name: str) -> tuple[types.ModuleType, str]:
    """The module, among those that a worker imports, that another has a name from, and the name there."""
    seen = set()
    while (module, name) not in seen:
        seen.add((module, name))
        above, there = file_of(module).imported.get(name, ("", ""))
        found = sys.modules.get(above)
        if not isinstance(found, types.ModuleType) or not is_ours(above) or not is_importable(above):
            break
        module, name = found, there
    return module, name


def _entries(one: Constant, keys: set[Any]) -> Iterator[Constant]:
    """A constant; of a dictionary those entries that some keys lead to, for others may be for somebody else."""
    if type(one.value) is dict:
        for key in one.value.keys() & keys:
            yield from _entries(one._replace(keys=(*one.keys, key), value=one.value[key]), keys)
    elif not is_mutable(one.value) or _parts(one.value) <= _PARTS_AT_MOST:
        yield one


def _in_class(cls: type, words: set[str], keys: set[Any]) -> Iterator[Constant]:
    """Attributes of a class that code has words for, in itself and in those of its bases that it has them from."""
    bodies = [(base, _body_of(base)) for base in cls.__mro__]
    known = {name for _, body in bodies if body is not None for name in (*body.functions, *body.values)}
    # Python has its own ways with special names: a class that has `__eq__` is given a `__hash__`.
    for name in sorted(name for name in (known & words) | {"forward"} if not name.startswith("__")):
        for place, (base, body) in enumerate(bodies):
            is_below = any(name in vars(one) for one in cls.__mro__[place + 1 :])
            if body is not None:
                yield from _attribute(base, body, name, keys, is_below)
            if name in vars(base) and not _calls_super(vars(base)[name]):
                break


def _attribute(cls: type, body: Body, name: str, keys: set[Any], is_below: bool) -> Iterator[Constant]:
    """What a class has under a name, if its file says; `is_below` where a base has it too."""
    module = sys.modules[cls.__module__]
    at = Constant(f"{cls.__module__}.{cls.__name__}", vars(cls), (name,), MISSING, (module,))
    if name in body.functions:
        yield at._replace(value=Function(vars(module), f"{cls.__name__}.{name}"))
    elif name in body.values:
        yield from _entries(at._replace(value=body.values[name]), keys)
    elif is_below and name not in body.bound and not file_of(module).deeds.may_bind(name):
        yield at


def _calls_super(held: Any) -> bool:
    function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
    return isinstance(function, types.FunctionType) and "super" in function.__code__.co_names


def _body_of(cls: type) -> Body | None:
    """What its file gives a class, if a worker imports that, and nothing else had a hand in making the class."""
    module = sys.modules.get(cls.__module__)
    if not is_ours(cls.__module__) or not is_importable(cls.__module__) or module is None:
        return None
    made_plainly = type(cls) in (type, ABCMeta) and not issubclass(cls, tuple)
    if not made_plainly or hasattr(cls.__init_subclass__, "__func__") or vars(module).get(cls.__qualname__) is not cls:
        return None
    return file_of(module).classes.get(cls.__qualname__)


def _is_done_by_imports(one: Constant) -> bool:
    """Whether files of the user's may do something to a constant as they are imported: a worker does so too."""
    named: set[str] = set()
    for module in files_of_the_program():
        named |= file_of(module).deeds.words
        if _is_done_in(file_of(module).deeds, one):
            return True
    return any(_is_done_in(done_by(module, named), one) for module in one.files)


def files_of_the_program() -> Iterator[types.ModuleType]:
    """The modules of the user's that are imported; which of them a worker needs too is not known."""
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if isinstance(module, types.ModuleType) and is_ours(name) and is_importable(name):
            yield module


def _is_done_in(deeds: Deeds, one: Constant) -> bool:
    name = str(one.keys[0])
    return deeds.may_change(name) if one.by_change else deeds.may_bind(name)


def _same(now: Any, value: Any) -> bool:
    """Whether a value equals a literal in all its parts, and their types."""
    if type(now) is not type(value):
        return False
    if isinstance(value, dict):
        return bool(now.keys() == value.keys()) and all(_same(now[key], held) for key, held in value.items())
    if isinstance(value, (list, tuple)):
        return len(now) == len(value) and all(map(_same, now, value))
    return bool(now == value)


def _parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_parts, value.values()))
    return 1 + sum(map(_parts, value)) if isinstance(value, (list, tuple, set)) else 1


def _containers(value: Any) -> Iterator[Any]:
    """A container, and those that it holds; of dictionaries their values."""
    if isinstance(value, dict):
        yield value
        yield (values := value.values())
        value = values
    elif isinstance(value, (list, tuple, set)):
        yield value
    else:
        return
    for part in value:
        yield from _containers(part)


def _said(one: Constant, now: Any) -> str:
    is_now = "is gone" if now is MISSING else f"is {_shown(now)} by now"
    name = str(one.keys[-1])
    line = f"self.{name} = ..." if name.isidentifier() else "self.name = ..."
    hint = f"Set it on the module ({line}), pass it to forward, or write engine='threads'."
    there = f"it is {_shown(one.value)}, as in its file"
    if isinstance(one.value, Function):
        there = "it is the function of its file"
        hint = f"Put it into a subclass or on the module ({line}), or write engine='threads'."
    elif one.value is MISSING:
        there = "it is that of a base class, as in its file"
    return (
        f"{one}, which code in a worker process reads, {is_now}; there {there}, which a worker imports for itself.\n"
        f"{hint}"
    )


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
