"""Modules for the GPU tests of all engines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import instep


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, bias=False),
        nn.SyncBatchNorm(4, momentum=None),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


class Tagger(nn.Module):
    """An LSTM on packed sequences, whose lengths stay on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.device.type == "cpu"
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


class Pairs(nn.Module):
    """Compares every sample with the whole batch; also gathers a structure with a CPU tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.left(x).tanh(), self.right(x).tanh()
        got = instep.all_gather({"two": two, "host": torch.arange(len(x)), "names": ["a"] * len(x)})
        assert got["two"].device == x.device
        assert got["host"].device.type == "cpu"
        assert len(got["names"]) == len(got["two"])
        return one - instep.all_reduce(one.mean(0), "mean") + (one @ got["two"].T).logsumexp(1, keepdim=True)


class FirstReplicaUsesGather(nn.Module):
    """All replicas gather, but only the first uses the result, so gathered gradients come only from it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        gathered = instep.all_gather(y)
        assert gathered.device == y.device
        return y + gathered.mean(0) if instep.replica().index == 0 else y
