"""Static check whether user code may read an attribute."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from instep.replicas.object_graph import References, cell_contents, walk


def code_reads_attribute(modules: Sequence[nn.Module], name: str) -> bool:
    """Whether user code that the modules can run may read an attribute called `name`.

    Covers the code of the modules' classes, of functions that the modules hold, and of functions and classes that this
    code names. Code of Python, torch and instep is skipped.
    """
    classes = {cls for module in modules for cls in type(module).__mro__}
    attributes = [value for module in modules for value in module.__dict__.values()]
    return any(_code_object_reads(code, name) for code in _iter_code_objects([*classes, *attributes]))


def _is_user_code(value: Any) -> bool:
    root = (getattr(value, "__module__", None) or "").partition(".")[0]
    is_library = root in ("torch", "numpy", "instep", "builtins") or root in sys.stdlib_module_names
    return root == "__main__" or not is_library


def _iter_code_objects(values: Iterable[Any]) -> Iterator[types.CodeType]:
    """Code objects of user functions reachable from `values`; runs none of them."""
    visits = walk((("", value) for value in values), _code_references, skip=lambda _: False)
    for value in (visit.value for visit in visits):
        if isinstance(value, types.FunctionType) and _is_user_code(value):
            yield value.__code__


def _code_references(value: Any) -> References:
    """The functions and classes that a value can call."""
    found: Iterable[Any] = ()
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        found = (value.__func__,)
    elif isinstance(value, property):
        found = (value.fget, value.fset)
    elif isinstance(value, functools.partial):
        found = (value.func, *value.args)
    elif type(value) in (list, tuple):
        found = filter(callable, value)
    elif type(value) is dict:
        found = filter(callable, value.values())
    elif isinstance(value, type) and _is_user_code(value):
        found = vars(value).values()
    elif isinstance(value, types.FunctionType) and _is_user_code(value):
        globals_read = map(value.__globals__.get, value.__code__.co_names)
        found = (
            *map(cell_contents, value.__closure__ or ()),
            *(item for item in globals_read if isinstance(item, (type, types.FunctionType))),
        )
    return (("", item) for item in found)


def _code_object_reads(code: types.CodeType, name: str) -> bool:
    if name in code.co_consts:  # getattr(self, "name")
        return True
    if name in code.co_names:
        loads = ("LOAD_ATTR", "LOAD_METHOD")
        if any(step.opname in loads and step.argval == name for step in dis.get_instructions(code)):
            return True
    return any(_code_object_reads(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))
