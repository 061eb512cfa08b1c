"""What a launcher such as torchrun tells a process about its rank, in environment variables."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from instep.runtime.torch_private import call_when_cuda_starts

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_started_by_torchrun() -> bool:
    """Whether torchrun has started this process. Other launchers set some of the same variables."""
    return "TORCHELASTIC_RUN_ID" in os.environ and all(name in os.environ for name in LAUNCH_VARIABLES)


def is_primary() -> bool:
    """Whether this process is the one that prints and saves: rank 0, or the only process.

    >>> if is_primary():
    ...     print("epoch 1")
    epoch 1
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return not is_started_by_torchrun() or os.environ["RANK"] == "0"


def local_rank() -> int:
    """The number of this process among those of its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def use_own_gpu() -> None:
    """Make the GPU of this rank the current one when CUDA starts, so that `"cuda"` means it."""
    if is_started_by_torchrun():
        call_when_cuda_starts(_set_device)


def _set_device() -> None:
    if local_rank() < torch.cuda.device_count():  # otherwise the first wrapper says what is wrong
        torch.cuda.set_device(local_rank())
