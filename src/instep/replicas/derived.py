"""Attributes that a module works out from its own parameters at every call: no state, and no output."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


def is_cache(module: nn.Module, name: str) -> bool:
    """Whether an attribute only lists the module's parameters once more; it has no meaning outside one replica."""
    return isinstance(module, nn.RNNBase) and name in _FLAT_WEIGHTS


def is_derived(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch's own computes an attribute from parameters alone: equal on every replica."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)) and hook.name == name:
            return True
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
            return True
    return False
