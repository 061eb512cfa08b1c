"""A character model that keeps its hidden state on the module from batch to batch."""

import torch
from torch import nn
from torch.nn import functional as F

TEXT = "she sells sea shells by the sea shore, and the shells that she sells are sea shells. " * 4
CHARS = sorted(set(TEXT))
CODES = torch.tensor([CHARS.index(c) for c in TEXT])


class CharRNN(nn.Module):
    def __init__(self, vocabulary, size=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.rnn = nn.GRU(size, size, num_layers=2, batch_first=True)
        self.head = nn.Linear(size, vocabulary)
        self.hidden = None

    def forward(self, x):
        output, hidden = self.rnn(self.embedding(x), self.hidden)
        self.hidden = hidden.detach()
        return self.head(output)


def streams(batch_size, length=8):
    rows = CODES[: len(CODES) // batch_size * batch_size].view(batch_size, -1)
    for i in range(0, 4 * length, length):
        yield rows[:, i : i + length], rows[:, i + 1 : i + 1 + length]


def run(wrap):
    torch.manual_seed(0)
    model = wrap(CharRNN(len(CHARS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batch_size in (6, 5):
        model.hidden = None
        for x, y in streams(batch_size):
            loss = F.cross_entropy(model(x).transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
