"""What can be wrapped, what cannot, and what cannot wrap us."""

from __future__ import annotations

import sys
from types import FrameType

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


def refuse_outer_wrapper() -> None:
    """Being called by nn.DataParallel means that the batch was split once already.

    Where torch finds one device or none it only passes the batch through; what would go wrong elsewhere is said there
    too. A few frames are looked at, which takes about a microsecond.
    """
    outer = nn.DataParallel.forward.__code__
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return
        if frame.f_code is outer:
            raise WrapError(GIVEN_TO_DATA_PARALLEL)
        frame = frame.f_back
