"""Ranks that share one GPU: by NCCL, as processes that claim to be different hosts, and by Gloo."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from instep.engines.torchrun.local_buckets import _pin

from ..torchrun.launch import ROOT, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCRIPT = str(ROOT / "tests/torchrun/pytest_on_rank.py")
NCCL = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "backend"), [(1, None), (2, None), (4, None), (2, "gloo"), (4, "gloo")])
def test_training_and_disagreements(tmp_path: Path, ranks: int, backend: str | None) -> None:
    variables = NCCL if backend is None else {"INSTEP_TEST_BACKEND": backend}
    job = run_ranks(
        tmp_path, ranks, [SCRIPT, "tests/torchrun/ranks"], timeout=280, INSTEP_TEST_DEVICE="cuda:0", **variables
    )
    assert " passed" in job.check().ranks[0]


class Owner:
    """Something that memory is pinned for."""


def test_memory_is_pinned_until_its_owner_is_freed() -> None:
    """A second registration of the same memory fails, and the next kernel does not raise its error."""
    memory, device = mmap.mmap(-1, 2**16), torch.device("cuda", 0)
    values = torch.frombuffer(memory, dtype=torch.float32)
    owner, other = Owner(), Owner()
    _pin(owner, memory, device, [])
    assert values.is_pinned()
    _pin(other, memory, device, [])
    assert float((values.to(device, non_blocking=True) + 1).sum()) == len(values)
    del other
    assert values.is_pinned()
    del owner
    gc.collect()
    assert not values.is_pinned()
