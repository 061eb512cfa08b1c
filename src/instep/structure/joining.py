"""Joining by the rule of a type, where the rule itself finds that the parts do not go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.errors import InstepError, MergeError
from instep.structure.shapes import shape_of
from instep.structure.tree import tensors_in
from instep.structure.types import Kind

REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What torch and the packages raise for values that are not alike."""

NOT_OF_THE_PARTS = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)
"""Errors of torch that say nothing of what was to be joined."""

SHOWN = 6


def join_by_kind(kind: Kind, parts: Sequence[Any]) -> Any:
    """The parts joined by their type's rule; `MergeError` with what each part holds where the rule fails on them."""
    try:
        return kind.merge(parts)
    except (InstepError, *NOT_OF_THE_PARTS):
        raise
    except REFUSALS as error:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        first = said.strip().partition("\n")[0].rstrip(".")
        names = list(dict.fromkeys(type(part).__name__ for part in parts))
        raise MergeError(
            f"the parts of a {' or '.join(names)} do not go together: {held(parts)} ({type(error).__name__}: {first})"
        ) from error


def held(parts: Sequence[Any]) -> str:
    """The shapes of the tensors that each part holds; only of those that differ, where they can be told."""
    tensors = [list(tensors_in(part)) for part in parts]
    if len({len(found) for found in tensors}) == 1:
        columns = list(zip(*tensors, strict=True))
        differing = [column for column in columns if not _is_alike(column)] or columns
        tensors = [list(row) for row in zip(*differing, strict=True)] if differing else tensors
    return " and ".join(_shapes(found) for found in tensors)


def _is_alike(column: Sequence[Tensor]) -> bool:
    """Whether tensors differ in their first dim at most."""
    shapes = [shape_of(tensor) for tensor in column]
    layouts = {tensor.layout for tensor in column}
    return len(layouts) == 1 and all(shape[1:] == shapes[0][1:] for shape in shapes)


def _shapes(tensors: Sequence[Tensor]) -> str:
    shown = ", ".join(str(shape_of(tensor)) for tensor in tensors[:SHOWN])
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return f"tensors of shapes {shown}{more}" if tensors else "no tensors"
