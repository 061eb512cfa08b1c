"""Random numbers."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Randomness"


@scenario("A loss that depends on random numbers")
def random_loss():
    class Net(nn.Module):
        def forward(self, x):
            noise = torch.randn_like(x)
            return (x + noise).var()

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.arange(6.0))


@scenario("A generator that is an attribute and an argument")
def generator_twice():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x, generator):
            return x + torch.rand(len(x), generator=generator)

    net = Net()
    model = instep.DataParallel(net, ["cpu", "cpu"], engine="processes")
    model(torch.ones(4), net.generator)
