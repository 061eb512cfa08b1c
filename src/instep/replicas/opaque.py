"""What is seen as it is, because nothing hangs below it: numbers, texts, classes, dtypes, devices."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from instep.structure.tree import SCALARS, has_slots

_ALWAYS = (type, types.ModuleType, types.CodeType, torch.dtype, torch.device, torch.Size)


def is_opaque(value: Any) -> bool:
    """Whether nothing can be reached from a value or be changed in it.

    A number or text of a class of its own may have attributes (`class Level(int)`), and then it is an object like
    others.
    """
    cls: Any = type(value)
    return _is_opaque(cls)


@functools.cache
def _is_opaque(cls: Any) -> bool:
    return issubclass(cls, _ALWAYS) or (issubclass(cls, SCALARS) and not (cls.__dictoffset__ or has_slots(cls)))
