"""A layer that reads its own device. On each replica its tensors are on that device, unregistered ones too."""

import copy

import torch
from common import DEVICES, compare, compare_weights
from torch import nn

import instep


class Layer(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, hidden))
        self.scale = torch.ones(hidden)  # a plain tensor, which .to() does not move

    def forward(self, x):
        noise = torch.zeros(self.weight.shape[1], device=self.weight.device)
        return torch.matmul(x, self.weight) * self.scale + noise


class Net(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.custom = Layer(inputs, hidden)
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x):
        return self.linear(self.custom(x))


def main():
    torch.manual_seed(0)
    plain = Net(100, 50)
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    x, y = torch.randn(33, 100), torch.randn(33, 50)
    losses = []
    for module in (plain, model):
        optimizer = torch.optim.Adam(module.parameters())
        out = module(x)
        loss = nn.functional.mse_loss(out, y.to(out.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    compare("loss", *losses)
    compare_weights(plain, model)


if __name__ == "__main__":
    main()
