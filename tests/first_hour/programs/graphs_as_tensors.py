"""Graph classification with torch_geometric: the model takes `x`, `edge_index` and `batch` as separate arguments."""

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(4, 16), GCNConv(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index)
        return self.head(global_mean_pool(x, batch))


def path(nodes, label, generator):
    edges = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
    return Data(x=torch.randn(nodes, 4, generator=generator) + label, edge_index=edges, y=torch.tensor([label]))


def run(wrap):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    graphs = [path(3 + i % 5, i % 2, generator) for i in range(21)]
    model = wrap(GCN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for data in DataLoader(graphs, batch_size=8):
            loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
