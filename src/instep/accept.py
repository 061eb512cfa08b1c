"""What can be wrapped, what cannot, and what cannot wrap us."""

from __future__ import annotations

import sys

import torch
from torch import nn

from instep.errors import WrapError
from instep.face import GIVEN_TO_DATA_PARALLEL
from instep.replicas.clone import Wrapper


def accept(module: nn.Module) -> nn.Module:
    """The module to wrap, or the reason why it cannot be."""
    if isinstance(module, Wrapper):
        module.close()
        return module.module
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        name = type(module).__name__
        raise WrapError(
            f"this module is wrapped by {name} already: wrap the bare one, instep.DataParallel(model.module)."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            "a ScriptModule's code is bound to its own parameters, so it has no replicas.\n"
            "Wrap the nn.Module that it was made from; torch.compile it instead of scripting it."
        )
    if not isinstance(module, nn.Module):  # types do not hold at run time
        raise WrapError(f"instep.DataParallel wraps an nn.Module, not a {type(module).__name__}.")
    return module


_OUTER = nn.DataParallel.forward.__code__
_CALLS_OF_TORCH = (3, 4)
"""How far up from ours nn.DataParallel's forward would be: torch makes two or three calls in between."""


def refuse_outer_wrapper(ours: int) -> None:
    """Being called by nn.DataParallel means that the batch was split once already.

    Where torch finds one device or none it only passes the batch through; what would go wrong elsewhere is said there
    too. It is asked at every call (but of one replica on the CPU that is being compiled, which has frames of another
    kind), so only the frames are looked at in which nn.DataParallel would be: so many calls of ours away, and those of
    torch.
    """
    for calls in _CALLS_OF_TORCH:
        try:
            frame = sys._getframe(ours + calls)
        except ValueError:  # nobody is that far up
            return
        if frame.f_code is _OUTER:
            raise WrapError(GIVEN_TO_DATA_PARALLEL)
