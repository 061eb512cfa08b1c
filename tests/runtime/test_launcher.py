"""What torchrun's environment variables say about this process."""

from __future__ import annotations

import pytest
import torch

from instep.runtime import launcher

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers with which `torch.cuda.set_device` was called, on a machine with two GPUs on which CUDA starts."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(launcher, "call_when_cuda_starts", lambda function: function())
    return chosen


def test_no_launcher(gpus: list[int]) -> None:
    assert not launcher.is_started_by_torchrun()
    assert launcher.is_primary()
    assert launcher.local_rank() == 0
    launcher.use_own_gpu()
    assert gpus == []


@pytest.mark.usefixtures("under_torchrun")
def test_torchrun(gpus: list[int]) -> None:
    assert launcher.is_started_by_torchrun()
    assert not launcher.is_primary()
    assert launcher.local_rank() == 1
    launcher.use_own_gpu()
    assert gpus == [1]


@pytest.mark.usefixtures("under_torchrun")
def test_a_rank_without_a_gpu_of_its_own(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    launcher.use_own_gpu()
    assert gpus == []


def test_variables_of_other_launchers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        if name != "TORCHELASTIC_RUN_ID":
            monkeypatch.setenv(name, value)
    assert not launcher.is_started_by_torchrun()
    assert launcher.is_primary()
