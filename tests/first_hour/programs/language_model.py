"""A Transformer language model over `[time, batch]` tokens, with the causal mask as an argument."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 24


class LanguageModel(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, size)
        self.position = nn.Parameter(torch.randn(32, 1, size) * 0.1)
        layer = nn.TransformerEncoderLayer(size, nhead=2, dim_feedforward=32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(size, WORDS)

    def forward(self, tokens, mask):
        x = self.embedding(tokens) + self.position[: len(tokens)]
        return self.head(self.encoder(x, mask))


def run(wrap):
    torch.manual_seed(0)
    model = wrap(LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    text = torch.randint(0, WORDS, (60, 6))  # [time, batch]
    losses = []
    for start in range(0, len(text) - 1, 12):
        inputs, target = text[start : start + 12], text[start + 1 : start + 13]
        inputs = inputs[: len(target)]
        mask = nn.Transformer.generate_square_subsequent_mask(len(inputs))
        output = model(inputs, mask)
        loss = F.cross_entropy(output.view(-1, WORDS), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
