"""Sequences of different lengths: padded, packed, or as a list."""

import copy

import torch
from common import DEVICES, compare, compare_weights
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader

import instep


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 20)

    def forward(self, x):
        return self.linear(x)


class SequenceList(Padded):
    """Takes a list of sequences and returns one output for each."""

    def forward(self, sequences):
        return [self.linear(sequence).mean(0) for sequence in sequences]


class Packed(nn.Module):
    """Takes packed sequences and returns the last hidden state of each."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(10, 20)

    def forward(self, packed):
        return self.rnn(packed)[1][-1]


def train(model, loader):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for x in loader:
        out = model(x)
        loss = nn.functional.mse_loss(out, torch.randn(out.shape).to(out.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def main():
    torch.manual_seed(0)
    sequences = [torch.randn(length, 10) for length in (10, 20, 30, 40, 5, 15, 25, 35)]
    loader = DataLoader(sequences, batch_size=3, collate_fn=lambda batch: pad_sequence(batch, batch_first=True))
    plain = Padded()
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    compare("losses of padded batches", train(plain, loader), train(model, loader))
    compare_weights(plain, model)

    plain = Packed()
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    packed = pack_sequence(sequences, enforce_sorted=False)
    compare("packed sequences", plain(packed), model(packed).cpu())

    plain = SequenceList()
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    compare("a list of sequences", torch.stack(plain(sequences)), torch.stack(model(sequences)).cpu())


if __name__ == "__main__":
    main()
