"""Parameters in shared memory."""

from __future__ import annotations

import gc
from typing import Any

import torch

from instep.engines.processes.controller import shared_parameters
from instep.engines.processes.controller.shared_parameters import locate, share_parameters


def test_a_finalizer_may_remove_a_block_while_another_is_looked_up() -> None:
    dropped, kept = [torch.ones(4)], torch.ones(4)
    share_parameters(dropped)
    share_parameters([kept])
    first, second = shared_parameters._blocks[-2:]

    class DropsTensor:
        @property
        def nbytes(self) -> int:
            dropped.clear()  # its storage goes, and with it the first block
            gc.collect()
            return 0

    memory: Any = DropsTensor()
    first.memory, first.address = memory, 0  # so that its size is asked for
    found = locate(kept)
    assert first not in shared_parameters._blocks
    assert found is not None
    assert found.block is second
