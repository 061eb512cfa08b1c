"""Decides which functions and classes a worker can import by name."""

from __future__ import annotations

import builtins
import dis
import importlib
import importlib.machinery
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle.cloudpickle as _cloudpickle

_GLOBAL_OPCODES = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_STDLIB_PREFIX = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")
_global_names_cache: WeakKeyDictionary[types.CodeType, tuple[str, ...]] = WeakKeyDictionary()

# cloudpickle promises its pickler only. Both of these are as old as its support for classes made at run time.
_cloudpickle_reduce_class: Callable[[type], tuple[Any, ...]] = _cloudpickle._dynamic_class_reduce
_cloudpickle_by_reference: Callable[..., bool] = _cloudpickle._should_pickle_by_reference


def is_by_reference(thing: Any) -> bool:
    """Whether a function or class can be found by its name in a fresh interpreter, and is the same one there."""
    return bool(_cloudpickle_by_reference(thing)) and is_importable(getattr(thing, "__module__", None) or "builtins")


def is_importable(name: str) -> bool:
    """Whether a fresh interpreter with this one's `sys.path` would import a module from the same file."""
    if name == "instep" or name.startswith("instep.") or name == "builtins":
        return True
    module = sys.modules.get(name)
    if name == "__main__" or not isinstance(module, types.ModuleType):
        return False
    where = getattr(module, "__file__", None)
    place = where if isinstance(where, str) else None
    if name.partition(".")[0] in sys.stdlib_module_names:
        # A worker has the standard library's, whatever lies in the folders of the path.
        return place is None or _is_stdlib_file(place)
    return _is_importable(name, place, tuple(sys.path))


@lru_cache(maxsize=4096)
def _is_stdlib_file(place: str) -> bool:
    return os.path.realpath(place).startswith(_STDLIB_PREFIX) and "site-packages" not in place


@lru_cache(maxsize=4096)
def _is_importable(name: str, where: str | None, path: tuple[str, ...]) -> bool:
    found = _find_spec(name, path)
    if found is None:  # no file of its own: made by the package around it as that is imported
        parent = name.rpartition(".")[0]
        return bool(parent) and is_importable(parent)
    if where is None or found.origin is None:  # built in, or a folder
        return where is found.origin or found.origin in ("built-in", "frozen")
    return os.path.realpath(found.origin) == os.path.realpath(where) or found.cached == where


@lru_cache(maxsize=4096)
def _find_spec(name: str, path: tuple[str, ...]) -> importlib.machinery.ModuleSpec | None:
    """What a fresh interpreter would find under a name; nothing is imported."""
    parent = name.rpartition(".")[0]
    places: list[str] | None = None
    if parent:
        around = _find_spec(parent, path)
        if around is None or around.submodule_search_locations is None:
            return None
        places = list(around.submodule_search_locations)
    for finder in sys.meta_path:
        # pytest's finder finds test files in places that are on no path.
        if type(finder).__module__.startswith("_pytest.") or not hasattr(finder, "find_spec"):
            continue
        try:
            found = finder.find_spec(name, places, None)
        except (ImportError, AttributeError, ValueError):
            continue
        if found is not None:
            return found
    return None


_context_var_locations: dict[int, tuple[ContextVar[Any], tuple[str, str] | None, int]] = {}
"""By the id of a variable: itself, where it is found, and how many modules there were when it was looked for."""


def locate_context_var(variable: ContextVar[Any]) -> tuple[str, str] | None:
    """The module that a fresh interpreter can import and the name in it by which a variable is found."""
    known = _context_var_locations.get(id(variable))
    if known is not None and (known[1] is not None or known[2] == len(sys.modules)):
        return known[1]
    found = None
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", {})
        names = [word for word, value in list(held.items()) if value is variable]
        if names and is_importable(name):
            found = name, names[0]
            break
    _context_var_locations[id(variable)] = variable, found, len(sys.modules)
    return found


def context_var_at(module: str, name: str) -> ContextVar[Any]:
    """The inverse of `place_of`."""
    found: ContextVar[Any] = getattr(importlib.import_module(module), name)
    return found


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, and the code nested in it, reads from or writes to its globals."""
    known = _global_names_cache.get(code)
    if known is None:
        own = {step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPCODES}
        nested = (global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
        known = _global_names_cache[code] = tuple(sorted(own.union(*nested)))
    return known


def functions_of(attribute: Any) -> list[types.FunctionType]:
    """The functions of a function, static method, class method or property."""
    is_property = isinstance(attribute, property)
    parts = (attribute.fget, attribute.fset) if is_property else (getattr(attribute, "__func__", attribute),)
    return [part for part in parts if isinstance(part, types.FunctionType)]


def submodules_used(code: types.CodeType, values: Iterable[Any]) -> list[str]:
    """The modules that code reaches as attributes of packages (`torch.nn.functional`): they have to be imported too."""
    words = attribute_names(code)

    def under(package: str) -> Iterator[str]:
        for word in words:
            if f"{package}.{word}" in sys.modules:
                yield f"{package}.{word}"
                yield from under(f"{package}.{word}")

    packages = {value.__name__ for value in values if isinstance(value, types.ModuleType)}
    return sorted({name for package in packages for name in under(package) if is_importable(name)})


def attribute_names(code: types.CodeType) -> set[str]:
    """The names that code, and the code nested in it, has for globals and attributes."""
    nested = (attribute_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*nested)


def reduce_class(cls: type) -> tuple[Callable[..., type], tuple[Any, ...], Any, Callable[[type, Any], Any]]:
    """A class taken apart: what makes an empty one, its arguments, what fills it, and what it is filled with."""
    make, args, contents, _, _, fill = _cloudpickle_reduce_class(cls)
    # The place before the last is cloudpickle's own number for the class; ours are kept for each line.
    return make, (*args[:-2], None, args[-1]), contents, fill


def make_module(name: str, about: dict[str, Any]) -> types.ModuleType:
    """A module that is in no list of modules: its dictionary holds the globals of functions from another process."""
    module = types.ModuleType(name)
    module.__dict__.update(about, __builtins__=builtins)
    return module
