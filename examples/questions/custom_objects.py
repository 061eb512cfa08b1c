"""Custom objects as inputs and outputs: one object per sample, or a registered batch type."""

import copy

import torch
from common import DEVICES, compare
from torch import nn

import instep


class Origin:
    """Any object. It is passed to the replica of its sample and returned, without pickling."""

    def __init__(self, value):
        self.value = value


class Patient:
    """A custom batch type that contains tensors."""

    def __init__(self, images, names):
        self.images, self.names = images, names


instep.register(
    Patient,
    size=lambda batch: len(batch.names),
    split=lambda batch, sizes: [
        Patient(images, names)
        for images, names in zip(batch.images.split(sizes), instep.split(batch.names, len(sizes)), strict=True)
    ],
    merge=lambda parts: Patient(
        torch.cat([part.images for part in parts]), [name for part in parts for name in part.names]
    ),
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, data):
        return self.linear(data["tensor"]), data["origin"]


class PatientNet(Net):
    def forward(self, batch):
        return Patient(self.linear(batch.images), [name.title() for name in batch.names])


def main():
    torch.manual_seed(0)
    batch = {"tensor": torch.randn(5, 10), "origin": [Origin(index) for index in range(5)]}
    net = Net()
    plain, _ = copy.deepcopy(net)(batch)
    out, origins = instep.DataParallel(net, DEVICES)(batch)
    compare("one object per sample", plain, out)
    assert all(returned is passed for returned, passed in zip(origins, batch["origin"], strict=True))

    patients = Patient(torch.randn(5, 10), ["ada", "ben", "cleo", "dan", "eve"])
    net = PatientNet()
    expected = copy.deepcopy(net)(patients)
    got = instep.DataParallel(net, DEVICES)(patients)
    compare("a registered type", expected.images, got.images)
    assert got.names == expected.names


if __name__ == "__main__":
    main()
