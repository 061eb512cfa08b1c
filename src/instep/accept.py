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


_DEPTHS = (6, 7)
"""How far up nn.DataParallel's forward would be: beyond three calls of ours and two or three of torch's."""


def refuse_outer_wrapper() -> None:
    """Being called by nn.DataParallel means that the batch was split once already.

    Where torch finds one device or none it only passes the batch through; what would go wrong elsewhere is said there
    too. It is asked at every call, so only the frames are looked at in which nn.DataParallel would be.
    """
    for depth in _DEPTHS:
        try:
            frame = sys._getframe(depth)
        except ValueError:  # nobody is that far up
            return
        if frame.f_code is nn.DataParallel.forward.__code__:
            raise WrapError(GIVEN_TO_DATA_PARALLEL)
