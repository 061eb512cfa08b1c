"""An output whose size does not depend on the batch size: a merge rule says how to combine the parts."""

import copy

import torch
from common import DEVICES, compare
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return torch.unique(self.linear(x), dim=0)


def main():
    torch.manual_seed(0)
    plain = Net()
    x = torch.randn(4, 5).repeat(3, 1)  # twelve samples, four of them distinct
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES, merge="unique")
    with torch.no_grad():
        compare("unique rows", plain(x), model(x))

    # Without a rule the call raises an error that lists the rules.
    try:
        instep.DataParallel(copy.deepcopy(plain), DEVICES)(x)
    except instep.MergeError as error:
        print(str(error).splitlines()[0])


if __name__ == "__main__":
    main()
