"""Text of different lengths: padded tokens and their lengths, packed for an LSTM inside of `forward`."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class Sentiment(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.embedding = nn.Embedding(30, size, padding_idx=0)
        self.lstm = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * size, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(torch.cat([hidden[0], hidden[1]], dim=1))


def run(wrap):
    torch.manual_seed(0)
    texts = [torch.randint(1, 30, (2 + i * 5 % 7,)) for i in range(21)]
    labels = torch.randint(0, 2, (21,))
    model = wrap(Sentiment())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for start in range(0, 21, 8):
        batch = texts[start : start + 8]
        logits = model(pad_sequence(batch, batch_first=True), torch.tensor([len(text) for text in batch]))
        loss = F.cross_entropy(logits, labels[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
