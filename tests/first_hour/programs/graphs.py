"""Graph classification with torch_geometric: the model takes a `Batch` of graphs."""

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

    def forward(self, data):
        x = self.conv1(data.x, data.edge_index).relu()
        x = self.conv2(x, data.edge_index)
        return self.head(global_mean_pool(x, data.batch))


def ring(nodes, label, generator):
    """A ring of nodes; the edges of graphs with label 1 also go back."""
    start = torch.arange(nodes)
    edges = torch.stack([start, (start + 1) % nodes])
    if label:
        edges = torch.cat([edges, edges.flip(0)], dim=1)
    return Data(x=torch.randn(nodes, 4, generator=generator) + label, edge_index=edges, y=torch.tensor([label]))


def run(wrap):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    graphs = [ring(3 + i % 5, i % 2, generator) for i in range(21)]
    model = wrap(GCN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for data in DataLoader(graphs, batch_size=8):
            loss = F.cross_entropy(model(data), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
