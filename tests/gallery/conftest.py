"""Fixtures of the gallery."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from .ranks import run_two_ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of two ranks of DistributedDataParallel, by the name of the test file."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without Gloo")
    return run_two_ranks(tmp_path_factory.mktemp("ranks"))
