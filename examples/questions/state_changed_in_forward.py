"""Unregistered state that forward changes: a state rule says how to merge it."""

import copy

import torch
from common import DEVICES, compare
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 2)
        self.total = torch.zeros(10)

    def forward(self, x):
        self.total += x.sum(dim=0)
        return self.linear(x), self.total


def main():
    torch.manual_seed(0)
    plain = Net()
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES, state={"total": "sum"})
    for size in (8, 5, 1):
        x = torch.randn(size, 10)
        (expected, total), (out, got) = plain(x), model(x)
        compare("outputs", expected, out)
        compare("the total that forward returned", total, got)
    compare("the total on the module", plain.total, model.total)

    # Without a rule the call raises an error that names the rule to write, and changes nothing.
    model = instep.DataParallel(Net(), DEVICES)
    try:
        model(torch.randn(5, 10))
    except instep.StateError as error:
        print(str(error).splitlines()[0])
    assert not model.total.any()


if __name__ == "__main__":
    main()
