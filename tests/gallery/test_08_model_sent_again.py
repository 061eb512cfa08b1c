"""Slower than one device: the model is copied to every device at each forward."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .common import on_each_engine


@on_each_engine
def test_replicas_are_created_once_and_share_parameters(engine: str) -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        model(x)
        ids = [id(replica.module) for replica in model._instep_replicas.replicas]
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            torch.testing.assert_close(model(x), net(x))
        assert [id(replica.module) for replica in model._instep_replicas.replicas] == ids
        for replica in model._instep_replicas.replicas:
            for mine, theirs in zip(replica.module.parameters(), net.parameters(), strict=True):
                assert mine.data_ptr() == theirs.data_ptr()
