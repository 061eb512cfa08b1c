"""Ranks that share one GPU: by NCCL, as processes that claim to be different hosts, and by Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..torchrun.launch import ROOT, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCRIPT = str(ROOT / "tests/torchrun/pytest_on_rank.py")
NCCL = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "backend"), [(1, None), (2, None), (4, None), (2, "gloo")])
def test_training_and_disagreements(tmp_path: Path, ranks: int, backend: str | None) -> None:
    variables = NCCL if backend is None else {"INSTEP_TEST_BACKEND": backend}
    job = run_ranks(
        tmp_path, ranks, [SCRIPT, "tests/torchrun/ranks"], timeout=280, INSTEP_TEST_DEVICE="cuda:0", **variables
    )
    assert " passed" in job.check().ranks[0]
