"""'DataParallel' object has no attribute; other methods than forward do not run in parallel."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor, nn

import instep

from .common import on_each_engine


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3, 2), nn.Linear(4, 2)
        self.temperature = 0.5

    def encode_text(self, x: Tensor) -> Tensor:
        if os.getpid() == PROCESS:  # workers have their own globals
            threads.add(threading.current_thread().name)
        out: Tensor = self.text(x) / self.temperature
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.image(x)
        return out


threads: set[str] = set()
PROCESS = os.getpid()


@on_each_engine
def test_attributes_are_forwarded_and_methods_run_in_parallel(engine: str) -> None:
    net, x = Clip(), torch.randn(5, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, methods=("encode_text",)) as model:
        assert model.temperature == 0.5
        model.temperature = 2.0
        assert net.temperature == 2.0
        expected = net.encode_text(x)
        threads.clear()
        torch.testing.assert_close(model.encode_text(x), expected)
        torch.testing.assert_close(model.call("encode_text", x), expected)
        assert engine != "threads" or len(threads) >= 2


def test_torch_hides_attributes_and_methods() -> None:
    with pytest.raises(AttributeError, match="'DataParallel' object has no attribute 'encode_text'"):
        nn.DataParallel(Clip()).encode_text(torch.randn(5, 4))
