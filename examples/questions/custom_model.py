"""Training of a custom model. One line differs from plain torch."""

import copy

import torch
from common import DEVICES, compare, compare_weights
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(10, 5)
        self.relu = nn.ReLU()
        self.linear2 = nn.Linear(5, 2)

    def forward(self, x):
        return self.linear2(self.relu(self.linear1(x)))


def train(model):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for size in (8, 8, 7, 3, 1):
        x, y = torch.randn(size, 10), torch.randint(2, (size,))
        out = model(x)
        loss = nn.functional.cross_entropy(out, y.to(out.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def main():
    torch.manual_seed(0)
    plain = Net()
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)  # with one device or none, just Net()
    compare("losses", train(plain), train(model))
    compare_weights(plain, model)


if __name__ == "__main__":
    main()
