"""The demo's model: a small causal transformer over characters. It knows nothing of instep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.cli.demo.corpus import LONGEST, UNKNOWN, VOCABULARY, decode, encode


@dataclass
class Reading:
    """What the model says of a batch, an entry per sample: strings and numbers beside tensors."""

    loss_sum: Tensor
    tokens: Tensor
    files: list[str]
    lines: list[int]

    def loss(self) -> Tensor:
        """The mean over every character of the batch, however the samples' lengths differ."""
        return self.loss_sum.sum() / self.tokens.sum()


class Block(nn.Module):
    """Attention to what came before, then a small network for each position."""

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
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        wide: Tensor = self.wide(self.norm2(x))
        return x + wide


class Reader(nn.Module):
    """Reads source code a character at a time and says which comes next."""

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
        """For every position, a score for each character that may come next."""
        places = torch.arange(ids.size(1), device=ids.device)
        read = self.blocks(self.characters(ids) + self.positions(places))
        scores: Tensor = self.next(self.norm(read))
        return scores

    def forward(self, batch: dict[str, Any]) -> Reading:
        """The loss of each sample, summed over its true length, and the sample's place as it came in."""
        scores = self.logits(batch["ids"])
        losses = F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        places = torch.arange(batch["ids"].size(1), device=scores.device)
        real = places < batch["lengths"].to(scores.device).unsqueeze(1)
        loss_sum = (losses.view_as(real) * real).sum(dim=1)
        return Reading(loss_sum, real.sum(dim=1), batch["files"], batch["lines"])


@torch.no_grad()
def write_line(model: Reader, prompt: str, seed: int, *, longest: int = 60, temperature: float = 0.7) -> str:
    """Continues the prompt to the end of its line. The same weights and seed give the same line."""
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(seed)
    ids = encode("\n" + prompt)
    while len(ids) <= longest:
        scores = model.logits(torch.tensor([ids], device=device))[0, -1].float().cpu() / temperature
        scores[UNKNOWN] = -torch.inf
        ids += torch.multinomial(scores.softmax(dim=0), 1, generator=draws).tolist()
        if decode(ids[-1:]) == "\n":
            break
    return decode(ids).strip("\n")
