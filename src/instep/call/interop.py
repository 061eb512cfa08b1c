"""How a wrapper appears to libraries that inspect a model: transformers.Trainer, accelerate, Lightning, peft.

- They read the name of the model's class and the signature of its `forward`. Trainer finds by them which columns of a
  dataset to pass and which of them are labels. So each wrapper has a class of its own, created by `class_like`.
- They take `model.module` if `isinstance(model, nn.DataParallel)`. A wrapper does not inherit from `nn.DataParallel`:
  its `__init__` and methods would be in the way. Only `wrapper.__class__`, which `isinstance` also reads, does.
- They read `device_ids`, `output_device`, `dim` and `hf_device_map` (`data_parallel_attributes`).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.runtime.torch_private import FUNCTIONAL_CALL_CODE, unwrap_compiled

_classes: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()
"""Results of `class_like`, by `base` and class of the module."""


def class_like(module: nn.Module, base: type) -> type:
    """The class of a wrapper: a subclass of `base` that has the name of the module's class and its `forward` signature.

    `base` is `DataParallel` or a subclass of it. Wrappers of modules of one class share their class.
    """
    like = type(unwrap_compiled(module))
    found = _classes.get((base, like))
    if found is None:
        names = {"__module__": like.__module__, "__qualname__": like.__qualname__, "__doc__": like.__doc__}
        found = type(like.__name__, (base,), {**names, "_wrapper_class": base, "forward": _forward_like(like, base)})
        found._apparent_class = type(like.__name__, (found, nn.DataParallel), names)  # type: ignore[attr-defined]
        _classes[base, like] = found
    return found


def set_class(wrapper: nn.Module, cls: type) -> None:
    """Assign the class of a wrapper. `wrapper.__class__ = cls` does not: `DataParallel.__class__` is a property."""
    object.__dict__["__class__"].__set__(wrapper, cls)


def apparent_class(wrapper: nn.Module) -> type:
    """The value of `wrapper.__class__`: a subclass of the wrapper's class and of `nn.DataParallel`, never instantiated.

    `isinstance(wrapper, cls)` is true if either `type(wrapper)` or `wrapper.__class__` is a subclass of `cls`.
    `torch.func.functional_call` raises an error for an `nn.DataParallel`, so it gets the wrapper's own class.
    """
    cls = type(wrapper)
    if sys._getframe(2).f_code is FUNCTIONAL_CALL_CODE:
        return cls
    return getattr(cls, "_apparent_class", cls)


def _forward_like(like: Any, base: Any) -> types.FunctionType:
    """A copy of the wrapper's `forward` with the signature of the module's, for `inspect.signature`.

    A copy of the function instead of a function that calls it: every call would have another stack frame.
    """
    own: types.FunctionType = base.forward
    forward = types.FunctionType(own.__code__, own.__globals__, "forward", own.__defaults__, own.__closure__)
    forward.__doc__, forward.__qualname__ = like.forward.__doc__, f"{like.__qualname__}.forward"
    with contextlib.suppress(TypeError, ValueError):  # a callable without a signature
        forward.__signature__ = inspect.signature(like.forward)  # type: ignore[attr-defined]
    return forward


def wrapper_class(wrapper: Any) -> type:
    """The class that the user instantiated, `DataParallel` or a subclass: `base` of `class_like`. Pickle needs it."""
    cls = type(wrapper)
    return getattr(cls, "_wrapper_class", cls)


def data_parallel_attributes(devices: Sequence[torch.device], output_device: torch.device, dim: int) -> dict[str, Any]:
    """The attributes of `nn.DataParallel`, and `hf_device_map`. A wrapper has those that its module does not have."""
    attributes: dict[str, Any] = {"device_ids": list(devices), "output_device": output_device, "dim": dim}
    if len(devices) > 1:
        # Trainer does not wrap a model that has several devices in its `hf_device_map` in `nn.DataParallel`. It does
        # not count equal devices, so CPU replicas have indices.
        indexed = [torch.device("cpu", i) if d.type == "cpu" else d for i, d in enumerate(devices)]
        attributes["hf_device_map"] = {f"replica {i}": device for i, device in enumerate(indexed)}
    return attributes
