"""Dictionary outputs: every entry is merged by its type, with gradients."""

import copy

import torch
from common import DEVICES, compare, compare_weights
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return {"predictions": self.linear(x), "auxiliary": x.mean(dim=1), "states": (self.linear(x).tanh(), [x])}


def main():
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(10, 5)
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    outputs = []
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        out = module(x)
        (out["predictions"].square().mean() + out["states"][0].sum()).backward()
        optimizer.step()
        outputs.append(out)
    expected, got = outputs
    compare("predictions", expected["predictions"], got["predictions"])
    compare("auxiliary", expected["auxiliary"], got["auxiliary"])
    compare("states", expected["states"][0], got["states"][0])
    assert type(got["states"]) is tuple
    assert type(got["states"][1]) is list
    compare_weights(plain, model)


if __name__ == "__main__":
    main()
