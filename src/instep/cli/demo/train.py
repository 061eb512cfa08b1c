"""The demo's training loop, the same for a plain module and a wrapped one, and its checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instep.cli.demo.corpus import Corpus, Snippet
from instep.cli.demo.model import Reader, Reading

BATCH = 25  # odd, so that two replicas get unequal shards
PEAK_RATE = 4e-3
WARMUP = 20

# A sum over two shards is taken in another order than over the whole: float32 then differs in its last digits.
# Adam divides a gradient by its own size, so that where a gradient is tiny those digits reach the weight as a part of
# a whole step: weights get more room. For the same reason they would hide a gradient of the wrong scale, so that
# gradients are compared too.
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 5e-5


class Learner:
    """A model with its optimizer; nothing in it depends on whether the model is wrapped."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1.0 - 0.9 * step / max(steps, 1))
        )

    def step(self, batch: dict[str, Any]) -> float:
        """Learns from one batch and returns the loss it had before. Leaves the gradients to be looked at."""
        self.optimizer.zero_grad()
        reading: Reading = self.model(batch)
        loss = reading.loss()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


@dataclass(frozen=True)
class Step:
    """One step, taken on one device and on the replicas, and how far apart that left the two."""

    plain: float
    instep: float
    gradients: float
    weights: float

    @property
    def loss(self) -> float:
        """The difference between the losses, relative to a loss above 1."""
        return abs(self.plain - self.instep) / max(1.0, abs(self.plain))

    @property
    def holds(self) -> bool:
        """Whether loss, gradients and weights are the same up to float32 rounding."""
        return self.loss <= TOLERANCE and self.gradients <= TOLERANCE and self.weights <= WEIGHT_TOLERANCE


def prove(plain: Learner, wrapped: Learner, batches: Iterable[dict[str, Any]]) -> list[Step]:
    """Takes the same steps with both and compares what comes of each."""
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
def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference between tensors of the same names; infinite if the names are not the same."""
    if ours.keys() != theirs.keys():
        return inf
    # Torch's maximum, unlike Python's, is NaN as soon as one of its values is.
    return torch.stack([(mine - theirs[name].to(mine.device)).abs().max() for name, mine in ours.items()]).max().item()


def move_batch(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on the device, as a plain module needs them."""
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@dataclass(frozen=True)
class Evaluation:
    """What was read of the held-out set: every sample's place, in the order the outputs came in."""

    places: list[tuple[str, int]]
    bits: float

    def is_exact(self, samples: list[Snippet]) -> bool:
        """Whether every sample was seen exactly once and in order."""
        return self.places == [sample.place for sample in samples]


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> Evaluation:
    """Reads the whole held-out set and returns its bits per character."""
    places: list[tuple[str, int]] = []
    loss, tokens = 0.0, 0
    model.eval()
    for batch in corpus.held_out_batches(BATCH):
        reading: Reading = model(batch)
        places += zip(reading.files, reading.lines, strict=True)
        loss += reading.loss_sum.sum().item()
        tokens += int(reading.tokens.sum())
    model.train()
    return Evaluation(places, loss / tokens / log(2))


@torch.no_grad()
def predicts_the_same(module: Reader, path: Path, batch: dict[str, Any]) -> bool:
    """Loads a checkpoint into a fresh, bare module and returns whether that reads the batch just as this one does."""
    device = next(module.parameters()).device
    bare = Reader().to(device)
    bare.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    batch = move_batch(batch, device)
    return torch.equal(bare(batch).loss_sum, module(batch).loss_sum)
