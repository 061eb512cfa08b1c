"""Text classification by an `EmbeddingBag`: a batch is a list of texts of different lengths."""

import torch
from torch import nn
from torch.nn import functional as F


class BagOfWords(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.embedding = nn.EmbeddingBag(30, size)
        self.head = nn.Linear(size, 3)

    def forward(self, texts):
        offsets = torch.tensor([0] + [len(text) for text in texts[:-1]]).cumsum(0)
        return self.head(self.embedding(torch.cat(texts), offsets))


def run(wrap):
    torch.manual_seed(0)
    texts = [torch.randint(0, 30, (3 + i * 5 % 7,)) for i in range(21)]
    labels = torch.randint(0, 3, (21,))
    model = wrap(BagOfWords())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for start in range(0, 21, 8):
        loss = F.cross_entropy(model(texts[start : start + 8]), labels[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
