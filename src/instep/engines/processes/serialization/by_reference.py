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

# Private functions of cloudpickle. Both are as old as its support for classes that are created at run time.
_cloudpickle_reduce_class: Callable[[type], tuple[Any, ...]] = _cloudpickle._dynamic_class_reduce
_cloudpickle_by_reference: Callable[..., bool] = _cloudpickle._should_pickle_by_reference


def is_by_reference(thing: Any) -> bool:
    """Whether a worker can import a function or class by its name."""
    return bool(_cloudpickle_by_reference(thing)) and is_importable(getattr(thing, "__module__", None) or "builtins")


def is_importable(name: str) -> bool:
    """Whether a fresh interpreter with this one's `sys.path` would import a module from the same file."""
    if name == "instep" or name.startswith("instep.") or name == "builtins":
        return True
    module = sys.modules.get(name)
    if name == "__main__" or not isinstance(module, types.ModuleType):
        return False
    file = getattr(module, "__file__", None)
    file = file if isinstance(file, str) else None
    if name.partition(".")[0] in sys.stdlib_module_names:
        # A worker imports the standard library's module, even if the path has another one of that name.
        return file is None or _is_stdlib_file(file)
    return _is_importable(name, file, tuple(sys.path))


@lru_cache(maxsize=4096)
def _is_stdlib_file(file: str) -> bool:
    return os.path.realpath(file).startswith(_STDLIB_PREFIX) and "site-packages" not in file


@lru_cache(maxsize=4096)
def _is_importable(name: str, file: str | None, path: tuple[str, ...]) -> bool:
    spec = _find_spec(name, path)
    if spec is None:  # a module without a file, which its package creates
        parent = name.rpartition(".")[0]
        return bool(parent) and is_importable(parent)
    if file is None or spec.origin is None:  # builtin, or a namespace package
        return file is spec.origin or spec.origin in ("built-in", "frozen")
    return os.path.realpath(spec.origin) == os.path.realpath(file) or spec.cached == file


@lru_cache(maxsize=4096)
def _find_spec(name: str, path: tuple[str, ...]) -> importlib.machinery.ModuleSpec | None:
    """The spec that a fresh interpreter would find for a name. Nothing is imported."""
    parent = name.rpartition(".")[0]
    locations: list[str] | None = None
    if parent:
        parent_spec = _find_spec(parent, path)
        if parent_spec is None or parent_spec.submodule_search_locations is None:
            return None
        locations = list(parent_spec.submodule_search_locations)
    for finder in sys.meta_path:
        # pytest's finder finds test files outside the path.
        if type(finder).__module__.startswith("_pytest.") or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(name, locations, None)
        except (ImportError, AttributeError, ValueError):
            continue
        if spec is not None:
            return spec
    return None


_context_var_locations: dict[int, tuple[ContextVar[Any], tuple[str, str] | None, int]] = {}
"""By the `id()` of a variable: the variable, its location, and the number of modules at the time of the search."""


def locate_context_var(variable: ContextVar[Any]) -> tuple[str, str] | None:
    """The importable module and the name by which a worker finds a context variable."""
    cached = _context_var_locations.get(id(variable))
    if cached is not None and (cached[1] is not None or cached[2] == len(sys.modules)):
        return cached[1]
    location = None
    for module_name, module in list(sys.modules.items()):
        attributes = list(getattr(module, "__dict__", {}).items())
        names = [name for name, value in attributes if value is variable]
        if names and is_importable(module_name):
            location = module_name, names[0]
            break
    _context_var_locations[id(variable)] = variable, location, len(sys.modules)
    return location


def context_var_at(module: str, name: str) -> ContextVar[Any]:
    """The inverse of `locate_context_var`."""
    variable: ContextVar[Any] = getattr(importlib.import_module(module), name)
    return variable


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that code, and code nested in it, reads or writes."""
    cached = _global_names_cache.get(code)
    if cached is None:
        names = {step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPCODES}
        nested = (global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
        cached = _global_names_cache[code] = tuple(sorted(names.union(*nested)))
    return cached


def functions_of(attribute: Any) -> list[types.FunctionType]:
    """The functions of a function, static method, class method or property."""
    is_property = isinstance(attribute, property)
    parts = (attribute.fget, attribute.fset) if is_property else (getattr(attribute, "__func__", attribute),)
    return [part for part in parts if isinstance(part, types.FunctionType)]


def submodules_used(code: types.CodeType, values: Iterable[Any]) -> list[str]:
    """The modules that code uses as attributes of packages (`torch.nn.functional`), which have to be imported, too."""
    names = attribute_names(code)

    def submodules(package: str) -> Iterator[str]:
        for name in names:
            if f"{package}.{name}" in sys.modules:
                yield f"{package}.{name}"
                yield from submodules(f"{package}.{name}")

    packages = {value.__name__ for value in values if isinstance(value, types.ModuleType)}
    return sorted({name for package in packages for name in submodules(package) if is_importable(name)})


def attribute_names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in code, and in code nested in it."""
    nested = (attribute_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*nested)


def reduce_class(cls: type) -> tuple[Callable[..., type], tuple[Any, ...], Any, Callable[[type, Any], Any]]:
    """Reduce a class: the function that creates it empty, its arguments, the contents, and the function to set them."""
    make, args, contents, _, _, fill = _cloudpickle_reduce_class(cls)
    # The last argument but one is cloudpickle's id of the class, which is not used: registries have their own.
    return make, (*args[:-2], None, args[-1]), contents, fill


def make_module(name: str, attributes: dict[str, Any]) -> types.ModuleType:
    """Create a module that is not in `sys.modules`: the globals of functions from another process."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes, __builtins__=builtins)
    return module
