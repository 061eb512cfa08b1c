"""Fixtures of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from instep.engines.processes.lifecycle.pool import WorkerPool


@pytest.fixture(scope="module")
def gpu_workers() -> Iterator[list[WorkerPool]]:
    """Worker processes that all tests of a file share: each takes seconds to start."""
    if not torch.cuda.is_available():
        yield []
        return
    torch.zeros(1, device="cuda")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    pools = [WorkerPool([gpu] * 4), WorkerPool([cpu] * 2)]
    for pool in pools:
        pool.get(1)
    yield pools
    for pool in pools:
        pool.close()
