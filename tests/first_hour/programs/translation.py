"""Sequence to sequence: GRU encoder and decoder over `[time, batch]` tokens, with teacher forcing and padding."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, START, WORDS = 0, 1, 20


class Encoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, size, padding_idx=PAD)
        self.gru = nn.GRU(size, size)

    def forward(self, source):
        _, hidden = self.gru(self.embedding(source))
        return hidden


class Decoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, size, padding_idx=PAD)
        self.gru = nn.GRU(size, size)
        self.head = nn.Linear(size, WORDS)

    def forward(self, token, hidden):
        output, hidden = self.gru(self.embedding(token).unsqueeze(0), hidden)
        return self.head(output.squeeze(0)), hidden


class Seq2Seq(nn.Module):
    def __init__(self, size=12):
        super().__init__()
        self.encoder, self.decoder = Encoder(size), Decoder(size)

    def forward(self, source, target):
        hidden = self.encoder(source)
        outputs = []
        for token in target[:-1]:  # teacher forcing: the right token goes in at every step
            output, hidden = self.decoder(token, hidden)
            outputs.append(output)
        return torch.stack(outputs)


def collate(pairs):
    sources, targets = zip(*pairs, strict=True)
    return pad_sequence(sources, padding_value=PAD), pad_sequence(targets, padding_value=PAD)


def sentences(count):
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for i in range(count):
        words = torch.randint(2, WORDS, (4 + i % 3,), generator=generator)
        pairs.append((words, torch.cat([torch.tensor([START]), words.flip(0)])))
    return pairs


def run(wrap):
    torch.manual_seed(0)
    model = wrap(Seq2Seq())
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        for source, target in DataLoader(sentences(21), batch_size=8, collate_fn=collate):
            output = model(source, target)
            loss = criterion(output.reshape(-1, WORDS), target[1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
