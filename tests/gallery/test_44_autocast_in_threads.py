"""Autocast to bfloat16 becomes float16, or is lost, in the threads of the replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import instep

from .common import on_each_engine


@on_each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_use_the_callers_autocast(engine: str, dtype: torch.dtype) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        with torch.autocast("cpu", dtype):
            mine, plain = model(x), net(x)
        assert mine.dtype is plain.dtype is dtype
        torch.testing.assert_close(mine, plain)
        assert model(x).dtype is torch.float32
