"""Collectives in forward on CUDA: one joint graph on one GPU, on several, and on a GPU and the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

from .models import Pairs, conv_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICES: dict[str, list[Any]] = {"one gpu twice": [0, 0], "one gpu three times": [0] * 3, "gpu and cpu": [0, "cpu"]}
if torch.cuda.device_count() > 1:
    DEVICES["two gpus"] = [0, 1]
LAYOUTS = [
    pytest.param(engine, private, devices, id=f"{engine}-{'private' if private else 'aliased'}-{name}")
    for engine in ("serial", "threads")
    for private in (False, True)
    for name, devices in DEVICES.items()
]
each_layout = pytest.mark.parametrize(("engine", "private", "devices"), LAYOUTS)


def assert_same_training(net: nn.Module, x: Tensor, engine: str, private: bool, devices: list[Any]) -> None:
    plain = copy.deepcopy(net).cuda()
    with instep.DataParallel(net, devices, engine=engine, private_copies=private) as model:
        for _ in range(3):
            outs = []
            for each in (plain, model):
                each.zero_grad()
                out = each(x.cuda())
                (out.sin() * torch.linspace(0.5, 2, out.numel(), device="cuda").view_as(out)).sum().backward()
                outs.append(out)
            torch.testing.assert_close(outs[1], outs[0], rtol=1e-9, atol=1e-9)
            for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()), rtol=1e-9, atol=1e-9)


@each_layout
def test_batch_normalization(engine: str, private: bool, devices: list[Any]) -> None:
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    assert_same_training(conv_net().double(), x, engine, private, devices)


@each_layout
def test_all_gather_and_all_reduce(engine: str, private: bool, devices: list[Any]) -> None:
    assert_same_training(Pairs().double(), torch.randn(7, 6, dtype=torch.float64), engine, private, devices)


@each_layout
def test_calls_on_a_stream_of_the_caller(engine: str, private: bool, devices: list[Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_same_training(Pairs().double(), torch.randn(64, 6, dtype=torch.float64), engine, private, devices)
    torch.cuda.synchronize()


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_the_error_names_the_replica_without_the_collective(engine: str) -> None:
    class Uneven(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return instep.all_reduce(x) if instep.replica().index == 0 else x

    with (
        instep.DataParallel(Uneven(), [0, 0], engine=engine) as model,
        pytest.raises(instep.CollectiveError, match="replica 1 on cuda:0 returned from forward without it"),
    ):
        model(torch.randn(4, 2, device="cuda"))
