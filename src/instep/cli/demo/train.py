"""The demo's training loop, which is the same for a plain and a wrapped module, and its checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instep.cli.demo.corpus import Corpus, Snippet
from instep.cli.demo.model import Reader, ReaderOutput

BATCH = 25  # odd, so that two replicas get unequal shards
PEAK_RATE = 4e-3
WARMUP = 20

# Sums over shards add in another order than sums over the whole batch, so float32 results differ in the last digits.
# Adam divides gradients by their magnitude, which amplifies these digits where a gradient is tiny: weights get a larger
# tolerance. It also hides gradients of the wrong scale, so gradients are compared too.
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 5e-5


class Learner:
    """A model with its optimizer and learning rate schedule."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1.0 - 0.9 * step / max(steps, 1))
        )

    def step(self, batch: dict[str, Any]) -> float:
        """Run one training step and return its loss. Gradients stay, to be compared."""
        self.optimizer.zero_grad()
        output: ReaderOutput = self.model(batch)
        loss = output.loss()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


@dataclass(frozen=True)
class Step:
    """Losses of one step on one device and on the replicas, and the differences of gradients and weights."""

    plain: float
    instep: float
    gradients: float
    weights: float

    @property
    def loss(self) -> float:
        """The difference of the losses; relative if the loss is above 1."""
        return abs(self.plain - self.instep) / max(1.0, abs(self.plain))

    @property
    def holds(self) -> bool:
        """Whether loss, gradients and weights are equal up to float32 rounding."""
        return self.loss <= TOLERANCE and self.gradients <= TOLERANCE and self.weights <= WEIGHT_TOLERANCE


def prove(plain: Learner, wrapped: Learner, batches: Iterable[dict[str, Any]]) -> list[Step]:
    """Run the same steps with both and compare them after each."""
    device = next(plain.model.parameters()).device
    return [
        Step(
            plain.step(move_batch(batch, device)),
            wrapped.step(batch),
            difference(gradients(plain.model), gradients(wrapped.model)),
            difference(dict(plain.model.named_parameters()), dict(wrapped.model.named_parameters())),
        )
        for batch in batches
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@torch.no_grad()
def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between tensors of the same name; infinite if the names differ."""
    if first.keys() != second.keys():
        return inf
    # Unlike Python's max, torch's returns NaN if any value is NaN.
    return torch.stack([(a - second[name].to(a.device)).abs().max() for name, a in first.items()]).max().item()


def move_batch(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on a device."""
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out set: the samples' locations in the order of the outputs, and bits per character."""

    locations: list[tuple[str, int]]
    bits: float

    def is_exact(self, samples: list[Snippet]) -> bool:
        """Whether every sample was seen exactly once and in order."""
        return self.locations == [sample.location for sample in samples]


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> Evaluation:
    """Evaluate the model on the held-out set."""
    locations: list[tuple[str, int]] = []
    loss, tokens = 0.0, 0
    model.eval()
    for batch in corpus.held_out_batches(BATCH):
        output: ReaderOutput = model(batch)
        locations += zip(output.files, output.lines, strict=True)
        loss += output.loss_sum.sum().item()
        tokens += int(output.tokens.sum())
    model.train()
    return Evaluation(locations, loss / tokens / log(2))


@torch.no_grad()
def predicts_the_same(module: Reader, path: Path, batch: dict[str, Any]) -> bool:
    """Whether a plain module that loads the checkpoint has the same losses as `module`."""
    device = next(module.parameters()).device
    bare = Reader().to(device)
    bare.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    batch = move_batch(batch, device)
    return torch.equal(bare(batch).loss_sum, module(batch).loss_sum)
