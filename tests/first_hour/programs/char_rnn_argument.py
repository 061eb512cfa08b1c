"""A character model whose hidden state is an argument and a result: `logits, hidden = model(x, hidden)`."""

import torch
from torch import nn
from torch.nn import functional as F

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow bear. " * 4
CHARS = sorted(set(TEXT))
CODES = torch.tensor([CHARS.index(c) for c in TEXT])


class CharRNN(nn.Module):
    def __init__(self, vocabulary, hidden=16, layers=2):
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x, hidden):
        output, hidden = self.lstm(self.embedding(x), hidden)
        return self.head(output), hidden

    def start(self, batch_size):
        zeros = torch.zeros(self.layers, batch_size, self.hidden)
        return zeros, zeros.clone()


def streams(batch_size, length=8):
    """`batch_size` parallel streams of the text, a few characters at a time."""
    rows = CODES[: len(CODES) // batch_size * batch_size].view(batch_size, -1)
    for i in range(0, 4 * length, length):
        yield rows[:, i : i + length], rows[:, i + 1 : i + 1 + length]


def run(wrap):
    torch.manual_seed(0)
    model = wrap(CharRNN(len(CHARS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch_size in (6, 5):
        hidden = model.start(batch_size)
        for x, y in streams(batch_size):
            hidden = tuple(h.detach() for h in hidden)
            logits, hidden = model(x, hidden)
            loss = F.cross_entropy(logits.reshape(-1, len(CHARS)), y.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses
