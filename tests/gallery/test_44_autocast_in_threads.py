"""Autocast to bfloat16 becomes float16, or nothing, in the threads of the replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep

from .beside import on_each_engine


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.dtypes.add(out.dtype)
        return out


@on_each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_cast_as_the_caller_does(engine: str, dtype: torch.dtype) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        with torch.autocast("cpu", dtype):
            mine, plain = model(x), net(x)
        assert mine.dtype is plain.dtype is dtype
        torch.testing.assert_close(mine, plain)
        assert model(x).dtype is torch.float32
