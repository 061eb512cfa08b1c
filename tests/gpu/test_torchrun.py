"""Ranks that share one GPU: by NCCL, as processes that claim to be different hosts, and by Gloo.

Under the NVIDIA Multi-Process Service (MPS) they use the GPU at the same time, each its part of the multiprocessors.
"""

from __future__ import annotations

import gc
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instep.engines.torchrun.local_buckets import _pin

from ..torchrun.launch import ROOT, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCRIPT = str(ROOT / "tests/torchrun/pytest_on_rank.py")
NCCL = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.fixture
def mps() -> Iterator[dict[str, str]]:
    """Starts MPS; yields the environment variables of processes that use it."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` is too long for the path of a socket
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        yield variables
        subprocess.run(["nvidia-cuda-mps-control"], env=environment, input="quit\n", text=True, check=True)


def run_tests(folder: Path, ranks: int, backend: str | None, **variables: str) -> None:
    variables |= NCCL if backend is None else {"INSTEP_TEST_BACKEND": backend}
    job = run_ranks(
        folder, ranks, [SCRIPT, "tests/torchrun/ranks"], timeout=280, INSTEP_TEST_DEVICE="cuda:0", **variables
    )
    assert re.search(r"\b[1-9]\d+ passed", job.check().ranks[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "backend"), [(1, None), (2, None), (4, None), (2, "gloo"), (4, "gloo")])
def test_training_and_disagreements(tmp_path: Path, ranks: int, backend: str | None) -> None:
    run_tests(tmp_path, ranks, backend)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "backend"), [(2, None), (4, None), (2, "gloo"), (4, "gloo")])
def test_training_and_disagreements_under_mps(
    tmp_path: Path, mps: dict[str, str], ranks: int, backend: str | None
) -> None:
    run_tests(tmp_path, ranks, backend, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(100 // ranks), **mps)


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
