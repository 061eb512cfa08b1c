"""Modules that call `torch.nn.functional.batch_norm` themselves, on CUDA."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class OwnBuffers(nn.Module):
    """No layer of torch's. Its buffers are first written when it is no longer frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.frozen = nn.Linear(4, 4), True
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.mix(x), self.level, self.spread, training=not self.frozen)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_statistics_written_after_the_first_calls_are_merged(engine: str) -> None:
    plain = OwnBuffers().double().cuda()
    with instep.DataParallel(copy.deepcopy(plain), [0, 0], engine=engine) as model:
        for step in range(8):
            plain.frozen = model.module.frozen = step < 5
            x = torch.randn(7, 4, dtype=torch.float64, device="cuda")
            outputs = [each(x) for each in (plain, model)]
            torch.testing.assert_close(outputs[1], outputs[0])
            for output in outputs:
                output.sin().sum().backward()
            torch.testing.assert_close(model.state_dict(), plain.state_dict())
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
