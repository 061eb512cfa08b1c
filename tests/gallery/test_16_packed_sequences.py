"""PackedSequence, and lengths that are not split with the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import scatter
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .common import on_each_engine, train_both


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return out


class ReadsPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        out: PackedSequence = self.rnn(packed)[0]
        return out


LENGTHS = torch.tensor([2, 5, 1, 4, 3])


@on_each_engine
def test_padded_sequences_with_lengths(engine: str) -> None:
    x = torch.randn(5, 5, 3)
    train_both(Reader(), [x, x], lambda model, x: model(x, LENGTHS).square().mean(), engine)


@on_each_engine
@pytest.mark.parametrize("in_order", [True, False])
def test_packed_sequences(engine: str, in_order: bool) -> None:
    lengths = LENGTHS.sort(descending=True).values if in_order else LENGTHS
    packed = pack_padded_sequence(torch.randn(5, 5, 3), lengths, batch_first=True, enforce_sorted=in_order)
    train_both(ReadsPacked(), [packed, packed], lambda model, x: model(x).data.square().mean(), engine)


def test_torch_passes_all_lengths_to_every_device() -> None:
    lengths = LENGTHS.tolist()
    assert scatter(lengths, [0, 1]) == [lengths, lengths]
