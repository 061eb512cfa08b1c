"""A custom layer with its own parameters."""

import copy

import torch
from common import DEVICES, compare, compare_weights
from torch import nn

import instep


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.mm(x, self.weight) + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.custom = Layer(10, 5)
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return self.linear(self.custom(x))


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(x)
    out.square().mean().backward()
    optimizer.step()
    return out.detach()


def main():
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(7, 10)
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    compare("outputs", step(plain, x), step(model, x))
    compare_weights(plain, model)


if __name__ == "__main__":
    main()
