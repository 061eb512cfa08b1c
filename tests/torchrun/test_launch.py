"""Devices, backends and the options of `instep run`, without ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import instep
from instep.cli import launch as cli
from instep.engines.torchrun import launch
from instep.errors import EngineError


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl"])
def test_a_backend_without_collectives_for_the_device(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    with pytest.raises(EngineError, match=r"backend '.*nccl', which has no collectives for cpu tensors"):
        launch._device_backend(torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("gloo", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "nccl"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
        ("nccl", "cuda", "nccl"),
    ],
)
def test_the_backend_of_a_device(monkeypatch: pytest.MonkeyPatch, config: str, device: str, expected: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert launch._device_backend(torch.device(device)) == expected


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(EngineError, match=r"this machine has 2 cuda device\(s\), and rank 2 on it has none of its own"):
        launch.rank_device(None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.rank_device(None) == torch.device("cuda", 1)


def test_one_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    options = cli.parse(["train.py", "--epochs", "3"])
    assert options.nproc_per_node == "8"
    assert options.standalone
    assert (options.training_script, options.training_script_args) == ("train.py", ["--epochs", "3"])


def test_options_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    options = cli.parse(["--nproc", "4", "--nnodes", "2", "--rdzv-endpoint", "node0:29400", "train.py", "--nproc", "7"])
    assert options.nproc_per_node == "4"
    assert not options.standalone
    assert options.training_script_args == ["--nproc", "7"]
    assert cli.parse(["train.py", "--nproc", "2", "--lr", "1"]).training_script_args == ["--lr", "1"]
    with pytest.raises(EngineError, match="there is no GPU here to take the number of ranks from"):
        cli.parse(["train.py"])


def test_cores_are_divided_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [cli.threads_per_rank(text) for text in ("4", "32", "gpu")] == [4, 1, 1]


def test_options_of_ranks_change_nothing_in_one_process() -> None:
    torch.manual_seed(0)
    net, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    for options in ({"batches": "local"}, {"gather": "sharded"}, {"reduce": "bf16"}):
        with instep.DataParallel(net, ["cpu"] * 2, engine="threads", **options) as model:
            torch.testing.assert_close(model(x), net(x))
