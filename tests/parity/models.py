"""Small modules whose training is compared with and without replicas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import instep

WORDS = 11


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 2))


class ConvNet(nn.Module):
    """Convolutions and batch normalization whose running statistics differ from the defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2)
        )
        self.head = nn.Linear(3, 4)
        norm = self.layers[1]
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.5, 1.5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image).mean((2, 3)))


class BatchNormNet(nn.Module):
    """Convolutions and several kinds of batch normalization in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 3, 3, stride=2, bias=False),
            nn.BatchNorm2d(3, affine=False, momentum=None),
        )
        self.head = nn.Linear(3, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(image)).mean((2, 3)))


class Contrastive(nn.Module):
    """A contrastive loss of each sample against the whole batch, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 5)
        self.right = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one = nn.functional.normalize(self.left(x), dim=1)
        two = nn.functional.normalize(self.right(y), dim=1)
        labels = instep.replica().offset + torch.arange(len(x))
        forth = nn.functional.cross_entropy(self.scale * one @ instep.all_gather(two).T, labels, reduction="none")
        back = nn.functional.cross_entropy(self.scale * two @ instep.all_gather(one).T, labels, reduction="none")
        return (forth + back) / 2, one


class PackedLSTM(nn.Module):
    """Takes packed sequences and returns packed sequences and the last states, whose batch is in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, tuple[Tensor, Tensor]]:
        return self.lstm(packed)


class PaddedLSTM(nn.Module):
    """Takes padded sequences, their lengths and initial states, whose batch is in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed, state)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return self.head(padded)


class Transformer(nn.Module):
    """A transformer with a padding mask per sample and one causal mask for all samples."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(WORDS, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, padding: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), mask=mask, src_key_padding_mask=padding))


class SparseBag(nn.Module):
    """A module whose parameters all have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)
        self.bags = nn.EmbeddingBag(WORDS, 4, mode="sum", sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.words(tokens)).sum(1) * self.bags(tokens)


class Tied(nn.Module):
    """The embedding and the output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.mix = nn.Linear(5, 5)
        self.out = nn.Linear(5, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        norm = torch.nn.utils.weight_norm
        return nn.Sequential(norm(nn.Linear(3, 6)), nn.Tanh(), norm(nn.Linear(6, 2), dim=None))


def new_weight_norm() -> nn.Module:
    norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(3, 6)), nn.Tanh(), norm(nn.Linear(6, 2)))


class Checkpointed(nn.Module):
    """Checkpointed blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 6), nn.LeakyReLU(0.1, inplace=True), nn.Linear(6, 4))


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.Linear(6, 1))


class Dictionary(nn.Module):
    """Takes and returns a dictionary with tensors, strings per sample, one string for all samples, numbers and None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        y = self.layer(batch["x"]) * batch["scale"]
        y = torch.tanh(y) if batch["mode"] == "tanh" else y
        lengths = torch.tensor([len(name) for name in batch["names"]], dtype=y.dtype)
        return {
            "y": y * lengths[:, None],
            "names": [name.upper() for name in batch["names"]],
            "mode": batch["mode"],
            "nested": {"first": y[:, 0], "whole": batch["scale"]},
            "nothing": None,
        }


@dataclass
class Batch:
    """The input of `Record`."""

    x: Tensor
    weight: Tensor | None
    tags: list[str]
    temperature: float = 2.0


@dataclass(frozen=True)
class Result:
    """The output of `Record`."""

    y: Tensor
    score: Tensor
    tags: tuple[str, ...]
    temperature: float


class Record(nn.Module):
    """Takes a dataclass and returns a frozen dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, batch: Batch) -> Result:
        y = self.layer(batch.x) / batch.temperature
        y = y if batch.weight is None else y * batch.weight[:, None]
        return Result(y, y.detach().sum(1), tuple(batch.tags), batch.temperature)


class Ragged(nn.Module):
    """Takes a list of tensors of different lengths and returns one tensor for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, samples: Sequence[Tensor]) -> list[Tensor]:
        return [torch.tanh(self.layer(sample - sample.mean(0))) for sample in samples]


class InnerLoss(nn.Module):
    """Computes its loss, a mean over samples, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


class TwoHeads(nn.Module):
    """Returns two outputs of one trunk and two outputs of separate layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.apart = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.trunk(x))
        return (*(torch.tanh(head(h)) for head in self.heads), *(torch.tanh(layer(x)) for layer in self.apart))


class Each(nn.Module):
    """Applies one layer to each tensor of a list, without other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, samples: list[Tensor]) -> list[Tensor]:
        return [self.layer(sample) for sample in samples]
