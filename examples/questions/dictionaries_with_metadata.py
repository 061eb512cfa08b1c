"""A dictionary with tensors and metadata goes in; each sample keeps its own metadata."""

import copy

import torch
from beside import DEVICES, compare
from torch import nn

import instep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, data):
        sources = [entry["source"] for entry in data["metadata"]]
        return {"out": self.linear(data["tensor"]), "sources": sources}


class NetOfSamples(Net):
    """The same for a list with one dictionary a sample, uncollated."""

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
    net = NetOfSamples()
    plain = copy.deepcopy(net)(samples)
    # Every tensor in the list has 10 entries: only you know that the batch is the list itself.
    out = instep.DataParallel(net, DEVICES, in_dims={"data": "samples"})(samples)
    compare("a list of dictionaries", plain["out"], out["out"])
    assert out["sources"] == plain["sources"]


if __name__ == "__main__":
    main()
