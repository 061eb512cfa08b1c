"""One output per sample, in the order of the samples, for any batch size."""

import copy

import torch
from common import DEVICES, compare
from torch import nn

import instep


def main():
    torch.manual_seed(0)
    plain = nn.Linear(5, 2)
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    for size in (10, 7, 1):
        x = torch.randn(size, 5)
        compare(f"{size} samples", plain(x), model(x))


if __name__ == "__main__":
    main()
