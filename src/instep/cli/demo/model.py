"""The demo's model: a small causal transformer over characters, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.cli.demo.corpus import LONGEST, UNKNOWN, VOCABULARY, decode, encode


@dataclass
class ReaderOutput:
    """One entry per sample: tensors, strings and numbers."""

    loss_sum: Tensor
    tokens: Tensor
    files: list[str]
    lines: list[int]

    def loss(self) -> Tensor:
        """The mean over all characters of the batch."""
        return self.loss_sum.sum() / self.tokens.sum()


class Block(nn.Module):
    """Causal self-attention followed by a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[batch, time, width]` to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        wide: Tensor = self.wide(self.norm2(x))
        return x + wide


class Reader(nn.Module):
    """Predicts the next character of source code."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.next = nn.Linear(width, VOCABULARY)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        positions = torch.arange(ids.size(1), device=ids.device)
        hidden = self.blocks(self.characters(ids) + self.positions(positions))
        logits: Tensor = self.next(self.norm(hidden))
        return logits

    def forward(self, batch: dict[str, Any]) -> ReaderOutput:
        """The loss of each sample, summed over its length, with the sample's file and line."""
        logits = self.logits(batch["ids"])
        losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        positions = torch.arange(batch["ids"].size(1), device=logits.device)
        mask = positions < batch["lengths"].to(logits.device).unsqueeze(1)
        loss_sum = (losses.view_as(mask) * mask).sum(dim=1)
        return ReaderOutput(loss_sum, mask.sum(dim=1), batch["files"], batch["lines"])


@torch.no_grad()
def write_line(model: Reader, prompt: str, seed: int, *, longest: int = 60, temperature: float = 0.7) -> str:
    """Sample a continuation of the prompt to the end of its line."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = encode("\n" + prompt)
    while len(ids) <= longest:
        logits = model.logits(torch.tensor([ids], device=device))[0, -1].float().cpu() / temperature
        logits[UNKNOWN] = -torch.inf
        ids += torch.multinomial(logits.softmax(dim=0), 1, generator=generator).tolist()
        if decode(ids[-1:]) == "\n":
            break
    return decode(ids).strip("\n")
