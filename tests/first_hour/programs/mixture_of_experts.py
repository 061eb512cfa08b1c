"""A mixture of experts that returns a load-balancing loss, a product of means over the batch, beside the output."""

import torch
from torch import nn
from torch.nn import functional as F

import instep


class MoE(nn.Module):
    def __init__(self, size=8, experts=4):
        super().__init__()
        self.gate = nn.Linear(size, experts)
        self.experts = nn.ModuleList(self.expert(size) for _ in range(experts))
        self.head = nn.Linear(size, 3)

    def expert(self, size):
        return nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, size))

    def forward(self, x):
        probabilities = self.gate(x).softmax(dim=1)
        weight, chosen = probabilities.max(dim=1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            output[rows] = weight[rows, None] * expert(x[rows])
        importance = probabilities.mean(dim=0)
        load = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean(dim=0)
        importance, load = instep.all_reduce((importance, load), "mean")  # the one line
        balance = len(self.experts) * (importance * load).sum()
        return self.head(x + output), balance


def run(wrap):
    torch.manual_seed(0)
    model = wrap(MoE())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(29, 8), torch.randint(0, 3, (29,))
    losses = []
    for inputs, target in zip(x.split(12), y.split(12), strict=True):
        logits, balance = model(inputs)
        loss = F.cross_entropy(logits, target) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), balance.item()]
    return losses
