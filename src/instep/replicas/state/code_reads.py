"""Static check whether user code may read an attribute."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

_MAX_OBJECTS = 20_000


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
    pending, seen = list(values), set[int]()
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            pending.append(value.__func__)
        elif isinstance(value, property):
            pending += [value.fget, value.fset]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args]
        elif type(value) in (list, tuple):
            pending += [item for item in value if callable(item)]
        elif type(value) is dict:
            pending += [item for item in value.values() if callable(item)]
        elif isinstance(value, type):
            pending += vars(value).values() if _is_user_code(value) else ()
        elif isinstance(value, types.FunctionType) and _is_user_code(value):
            yield value.__code__
            pending += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            globals_read = [value.__globals__.get(name) for name in value.__code__.co_names]
            pending += [item for item in globals_read if isinstance(item, (type, types.FunctionType))]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False


def _code_object_reads(code: types.CodeType, name: str) -> bool:
    if name in code.co_consts:  # getattr(self, "name")
        return True
    if name in code.co_names:
        loads = ("LOAD_ATTR", "LOAD_METHOD")
        if any(step.opname in loads and step.argval == name for step in dis.get_instructions(code)):
            return True
    return any(_code_object_reads(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))
