"""A pipeline that keeps data other than tensors aligned with the samples over an epoch."""

import copy

import torch
from common import DEVICES, compare
from torch import nn
from torch.utils.data import DataLoader

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, x, numbers):
        assert len(x) == len(numbers)
        return self.linear(x), [f"sample {number}" for number in numbers]


def collate(samples):
    return torch.stack([x for x, _ in samples]), [number for _, number in samples]


def main():
    torch.manual_seed(0)
    samples = [(torch.randn(10), number) for number in range(100)]
    net = Net()
    plain, model = copy.deepcopy(net), instep.DataParallel(net, DEVICES)
    seen, outputs, expected = [], [], []
    for x, numbers in DataLoader(samples, batch_size=32, collate_fn=collate):  # the last batch has four
        out, names = model(x, numbers)
        outputs.append(out.cpu())
        seen += names
        expected.append(plain(x, numbers)[0])
    compare("outputs over the epoch", torch.cat(expected), torch.cat(outputs))
    assert seen == [f"sample {number}" for number in range(100)]


if __name__ == "__main__":
    main()
