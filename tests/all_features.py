"""A module that uses every kind of state a training step can depend on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    """Uses weights, random numbers, buffers, attributes, batch statistics and a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(8))
        self.steps = 0
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.drop(torch.relu(self.norm(self.first(x))))
        self.penalty = h.square().mean()
        self.mean = self.mean * 0.9 + 0.1 * instep.all_gather(h).detach().mean(0)
        return self.last(h + 0.01 * self.mean)
