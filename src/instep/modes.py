"""Modes of torch that instep's own work is done in, and several of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from instep.private import inference_mode


def inference(on: bool) -> AbstractContextManager[Any]:
    """`torch.inference_mode(on)`, where it is not so already.

    What torch enters sets everything as it was when it is cleared away, too: if an interruption keeps it from its end,
    that is long after, and turns gradients off for the rest of the program. So it is entered only where it must be, and
    in a `with` statement no interruption comes in between. Whoever leaves inference mode finds gradients turned on.
    """
    return nullcontext() if torch.is_inference_mode_enabled() == on else inference_mode(on)


class All(ExitStack):
    """Several context managers, entered together."""

    def __init__(self, managers: Sequence[AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._managers = managers

    def __enter__(self) -> All:
        super().__enter__()
        for manager in self._managers:
            self.enter_context(manager)
        return self
