"""How a wrapper appears to other libraries: a class like the module's, and the attributes of `nn.DataParallel`.

To `isinstance`, a wrapper is an `nn.DataParallel`, so that libraries unwrap it where they would unwrap that. They also
read the name of a model's class and the signature of its `forward`: transformers.Trainer finds by them which columns of
a dataset to pass and which are labels.
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
"""By class of the wrapper and class of the module: the class of such wrappers."""


def class_like(module: nn.Module, base: type) -> type:
    """A subclass of the wrapper's class `base` with the name of the module's class and its `forward`'s signature."""
    like = type(unwrap_compiled(module))
    found = _classes.get((base, like))
    if found is None:
        names = {"__module__": like.__module__, "__qualname__": like.__qualname__, "__doc__": like.__doc__}
        found = type(like.__name__, (base,), {**names, "_wrapper_class": base, "forward": _forward_like(like, base)})
        found._apparent_class = type(like.__name__, (found, nn.DataParallel), names)  # type: ignore[attr-defined]
        _classes[base, like] = found
    return found


def set_class(wrapper: nn.Module, cls: type) -> None:
    """Change the class of a wrapper, whose `__class__` is a property (see `apparent_class`)."""
    object.__dict__["__class__"].__set__(wrapper, cls)


def apparent_class(wrapper: nn.Module) -> type:
    """What `wrapper.__class__` and so `isinstance` see: the wrapper's class, derived from `nn.DataParallel` too.

    `torch.func.functional_call` refuses an `nn.DataParallel` and sees the wrapper's class itself.
    """
    cls = type(wrapper)
    if sys._getframe(2).f_code is FUNCTIONAL_CALL_CODE:
        return cls
    return getattr(cls, "_apparent_class", cls)


def _forward_like(like: Any, base: Any) -> types.FunctionType:
    """A copy of the wrapper's `forward`, without another stack frame, that has the signature of the module's."""
    own: types.FunctionType = base.forward
    forward = types.FunctionType(own.__code__, own.__globals__, "forward", own.__defaults__, own.__closure__)
    forward.__doc__, forward.__qualname__ = like.forward.__doc__, f"{like.__qualname__}.forward"
    with contextlib.suppress(TypeError, ValueError):  # a callable without a signature
        forward.__signature__ = inspect.signature(like.forward)  # type: ignore[attr-defined]
    return forward


def wrapper_class(wrapper: Any) -> type:
    """The class that a wrapper was created from: `base` of `class_like`."""
    cls = type(wrapper)
    return getattr(cls, "_wrapper_class", cls)


def data_parallel_attributes(devices: Sequence[torch.device], output_device: torch.device, dim: int) -> dict[str, Any]:
    """Attributes of a wrapper whose module has none of that name."""
    attributes: dict[str, Any] = {"device_ids": list(devices), "output_device": output_device, "dim": dim}
    if len(devices) > 1:
        # transformers.Trainer then leaves the placement to the model, instead of wrapping it in `nn.DataParallel` too.
        indexed = [torch.device("cpu", i) if d.type == "cpu" else d for i, d in enumerate(devices)]
        attributes["hf_device_map"] = {f"replica {i}": device for i, device in enumerate(indexed)}
    return attributes
