"""Text classification by an `EmbeddingBag`: all tokens of the batch in one tensor, and the offset of each text."""

import torch
from torch import nn
from torch.nn import functional as F


class BagOfWords(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.embedding = nn.EmbeddingBag(30, size)
        self.head = nn.Linear(size, 3)

    def forward(self, text, offsets):
        return self.head(self.embedding(text, offsets))


def run(wrap):
    torch.manual_seed(0)
    texts = [torch.randint(0, 30, (3 + i * 5 % 7,)) for i in range(21)]
    labels = torch.randint(0, 3, (21,))
    model = wrap(BagOfWords())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for start in range(0, 21, 8):
        batch = texts[start : start + 8]
        offsets = torch.tensor([0, *map(len, batch[:-1])]).cumsum(0)
        loss = F.cross_entropy(model(torch.cat(batch), offsets), labels[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
