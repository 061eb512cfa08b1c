"""State rules: those of the user, and those for layers of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from instep.errors import MergeError, StateError
from instep.replicas.diff import MISSING
from instep.runtime.torch_private import spectral_norm_class
from instep.structure.merge import Merger

StateRule = str | Callable[..., Any]
STATE_RULES = ("sum", "mean", "max", "min", "first", "cat")


def apply_state_rule(
    rule: StateRule, old: Any, new: list[Any], sizes: Sequence[int], path: str, *, entry: bool = False
) -> Any:
    """The new value under a rule. An `entry` of a container may be new: its old value counts as zero."""
    if callable(rule):
        return rule(None if old is MISSING else old, [None if v is MISSING else v for v in new], list(sizes))
    try:
        return _apply_named_rule(rule, old, new, sizes, path, entry)
    except StateError:
        raise
    except (MergeError, TypeError, ValueError, RuntimeError) as error:
        kind = type(next((value for value in new if value is not MISSING), None)).__name__
        why = str(error).partition("\n")[0].removeprefix("cannot merge the output: ")
        raise StateError(
            f"state={{{path!r}: {rule!r}}} cannot be applied to a {kind}: {why}\n"
            f"Write another rule, or a function (old, new, sizes) -> value."
        ) from error


def _apply_named_rule(rule: str, old: Any, new: list[Any], sizes: Sequence[int], path: str, entry: bool) -> Any:
    if rule == "first":
        return new[0]
    if rule == "sum":
        return _sum_changes(old, new, path, entry)
    present = [(value, size) for value, size in zip(new, sizes, strict=True) if value is not MISSING]
    values = [value for value, _ in present]
    if rule == "cat" and all(isinstance(value, (list, tuple)) for value in values):
        return type(values[0])(item for value in values for item in value)
    return Merger.from_options(rule).merge(_on_one_device(values), [size for _, size in present])


def _sum_changes(old: Any, new: list[Any], path: str, entry: bool) -> Any:
    if old is MISSING or old is None:
        if not entry:
            raise StateError(f"state={{{path!r}: 'sum'}} needs a value from before the call: set it in __init__.")
        present = [value for value in _on_one_device(new) if value is not MISSING]
        return sum(present[1:], start=present[0])
    device = old.device if isinstance(old, Tensor) else None
    total = old
    for value in new:
        if value is not MISSING:
            total = total + ((value.to(device) if device is not None else value) - old)
    return total


def _on_one_device(values: list[Any]) -> list[Any]:
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def check_state_rule(pattern: str, rule: Any) -> None:
    """Raise `StateError` for a rule that does not exist."""
    if not callable(rule) and rule not in STATE_RULES:
        raise StateError(
            f"state={{{pattern!r}: {rule!r}}}: write one of {', '.join(STATE_RULES)} or a function (old, new, sizes)."
        )


def builtin_rule(module: nn.Module | None, name: str) -> StateRule | None:
    """The rule for state of a layer of torch, or None.

    Batch norm counts calls, equally on every replica. Instance norm averages over samples, so the weighted mean is
    exact. The vectors of spectral norm depend only on the weights. Quantization observers keep minima and maxima, or
    moving averages of them.
    """
    if isinstance(module, _BatchNorm) and name == "num_batches_tracked":
        return "first"
    if isinstance(module, _InstanceNorm) and name in ("running_mean", "running_var"):
        return "mean"
    if spectral_norm_class is not None and isinstance(module, spectral_norm_class) and name in ("_u", "_v"):
        return "first"
    if name in ("min_val", "max_val") and isinstance(module, _observer_classes()):
        return "min" if name == "min_val" else "max"
    return None


def _observer_classes() -> tuple[Any, ...]:
    """The observer classes, if their module is imported."""
    module = sys.modules.get("torch.ao.quantization.observer")
    names = ("MinMaxObserver", "PerChannelMinMaxObserver")
    return () if module is None else tuple(getattr(module, name) for name in names if hasattr(module, name))


def may_be_shard_size(old: Any, new: Any, sizes: Sequence[int]) -> bool:
    """Whether a value that is equal on all replicas may come from the size of their equal shards.

    It may if it is a number that grew by that size or is that size, or a shape that starts with it.
    """
    size = sizes[0]
    if size < 2 or len(set(sizes)) > 1 or isinstance(new, (bool, np.bool_)):
        return False
    if isinstance(new, torch.Size) or (isinstance(new, tuple) and new and all(type(n) is int for n in new)):
        return bool(new) and new[0] == size
    if isinstance(new, Tensor):
        if new.ndim or new.requires_grad or new.is_meta:
            return False
        new = new.item()
    if isinstance(old, Tensor):
        old = old.item() if not old.ndim else MISSING
    if not isinstance(new, (int, float)):
        return False
    grown = new - old if isinstance(old, (int, float)) else new
    return grown == size or (new == size and grown != 1)


_FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


def is_parameter_cache(module: nn.Module, name: str) -> bool:
    """Whether an attribute is a list of the module's own parameters, which every replica creates for itself."""
    return isinstance(module, nn.RNNBase) and name in _FLAT_WEIGHTS


def is_computed_from_parameters(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch computes an attribute from parameters only, equally on every replica."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)) and hook.name == name:
            return True
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
            return True
    return False
