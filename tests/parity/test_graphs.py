"""A torch_geometric network on a Batch and on a list of Data, with graphs of different sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

pytest.importorskip("torch_geometric")
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool


def graphs() -> list[Any]:
    data = []
    for nodes in (4, 2, 6, 3, 5):
        edges = torch.randint(nodes, (2, 2 * nodes))
        data.append(Data(x=torch.randn(nodes, 3, dtype=torch.float64), edge_index=edges, y=torch.randn(1).double()))
    return data


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GCNConv(3, 8), GCNConv(8, 8), nn.Linear(8, 1)

    def forward(self, data: Any) -> Tensor:
        batch = Batch.from_data_list(data) if isinstance(data, list) else data
        x = torch.relu(self.first(batch.x, batch.edge_index))
        x = torch.relu(self.second(x, batch.edge_index))
        out: Tensor = self.head(global_mean_pool(x, batch.batch)).squeeze(1)
        return out


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("as_list", [True, False], ids=["list", "batch"])
def test_training_equals_the_plain_networks(as_list: bool, replicas: int, engine: str) -> None:
    data = graphs()
    plain = Net().double()
    net = copy.deepcopy(plain)
    theirs, ours = (torch.optim.AdamW(module.parameters(), lr=0.01) for module in (plain, net))
    with instep.DataParallel(net, ["cpu"] * replicas, engine=engine) as model:
        for count in (5, 5, 3, 2):
            batch = data[:count] if as_list else Batch.from_data_list(data[:count])
            target = torch.cat([graph.y for graph in data[:count]])
            losses = []
            for module, optimizer in ((plain, theirs), (model, ours)):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(module(batch), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
