"""Dictionaries of tensors and metadata: each sample keeps its metadata."""

import copy

import torch
from common import DEVICES, compare
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, data):
        sources = [entry["source"] for entry in data["metadata"]]
        return {"out": self.linear(data["tensor"]), "sources": sources}


class ListNet(Net):
    """The same for an uncollated list of one dictionary per sample."""

    def forward(self, data):
        out = self.linear(torch.stack([sample["tensor"] for sample in data]))
        return {"out": out, "sources": [sample["metadata"]["source"] for sample in data]}


def main():
    torch.manual_seed(0)
    metadata = [{"id": index, "source": "AB"[index % 2]} for index in range(5)]
    batch = {"tensor": torch.randn(5, 10), "metadata": metadata}
    net = Net()
    plain = copy.deepcopy(net)(batch)
    out = instep.DataParallel(net, DEVICES)(batch)
    compare("a dictionary of columns", plain["out"], out["out"])
    assert out["sources"] == plain["sources"] == ["A", "B", "A", "B", "A"]

    samples = [{"tensor": row, "metadata": entry} for row, entry in zip(batch["tensor"], metadata, strict=True)]
    net = ListNet()
    plain = copy.deepcopy(net)(samples)
    # Each tensor in the list has 10 entries, so the list could also be 5 tensors with a batch of 10: in_dims decides.
    out = instep.DataParallel(net, DEVICES, in_dims={"data": "samples"})(samples)
    compare("a list of dictionaries", plain["out"], out["out"])
    assert out["sources"] == plain["sources"]


if __name__ == "__main__":
    main()
