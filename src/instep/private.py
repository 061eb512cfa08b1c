"""What instep uses of torch that torch does not promise, each with what is done where it is missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

_autograd: Any = torch._C._autograd
_functorch: Any = torch._C._functorch


def keeps_graph() -> bool:
    """Inside a backward: whether it was asked to retain the graph. Without an answer, graphs are retained."""
    ask: Callable[[], bool] | None = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def accumulates(parameter: Tensor) -> bool:
    """Inside a backward: whether it adds to this leaf's `.grad`, rather than return gradients or leave it out."""
    if not parameter.is_leaf:
        return False
    ask: Any = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None:
        return False
    try:
        return bool(ask(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # `torch.autograd.grad` with respect to leaves has no such nodes to execute
        return False


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The hooks on saved tensors around the caller (from torch 2.8 on), except those of checkpointing.

    Checkpointing matches tensors by the order in which they are saved, which replicas do not have; without its hooks
    the call is recomputed as a whole.
    """
    ask: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Any, Any] | None = None if ask is None else ask(False)
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        return None
    return hooks


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` chose in this thread, if any."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


def follows_one_thread() -> bool:
    """Whether something is at work that sees the operations of its own thread only.

    That is `torch.func`, forward-mode differentiation, tracing, cached parametrizations, and modes that count or
    rewrite operations.
    """
    return (
        _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or bool(parametrize._cache_enabled)
        or any(not isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())
    )


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is many at once, as `is_grads_batched=True` makes them."""
    return bool(_functorch.is_legacy_batchedtensor(gradient))


def look_alike(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A quick look at some tensors: True only if sizes, strides, dtypes, devices and `requires_grad` are as they were.

    It is what compiled code asks of its inputs, in one pass. False proves nothing: it also depends on modes such as
    autocast, and is all that is said where torch has no such pass.
    """
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None:
        return lambda: False
    try:
        check = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return partial(check, *tensors) if check(*tensors) else lambda: False
    except (TypeError, RuntimeError, ValueError):
        return lambda: False


def _class_at(module: str, name: str) -> Any:
    """A class that torch keeps in a private place, or None."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


spectral_norm_class: Any = _class_at("torch.nn.utils.parametrizations", "_SpectralNorm")
"""The parametrization behind `spectral_norm`; where it is missing, its vectors have to be equal on every replica."""


def global_hooks() -> list[tuple[str, list[Any]]]:
    """Hooks that were registered for every module; none where torch keeps them elsewhere."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    held: Any = torch.nn.modules.module
    tables = ((kind, getattr(held, f"_global_{kind}", None)) for kind in kinds)
    return [(kind.replace("_", " ")[:-1], list(table.values())) for kind, table in tables if table]
