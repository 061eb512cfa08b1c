"""Training cases (a module, its batches and its loss) and a training loop for plain and wrapped modules."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pack_sequence

from . import models

Modules = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
Arguments = tuple[Sequence[Any], dict[str, Any]]

MAX_LENGTH = 5


def _one_loss(case: Case, modules: Modules, arguments: Arguments, optimizers: Optimizers) -> tuple[Any, list[Tensor]]:
    args, kwargs = arguments
    optimizers[0].zero_grad()
    out = modules[0](*args, **kwargs)
    loss = case.loss(out)
    loss.backward()
    return out, [loss]


@dataclass(frozen=True)
class Case:
    """A module to train. `step` computes gradients for the first optimizer and returns the outputs and the losses."""

    name: str
    build: Callable[[], nn.Module | tuple[nn.Module, ...]]
    batch: Callable[[int], Arguments]
    loss: Callable[[Any], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `DataParallel`."""
    eval: bool = False
    sparse: bool = False
    """Whether gradients are sparse, which AdamW does not support."""
    step: Callable[..., tuple[Any, list[Tensor]]] = _one_loss

    def modules(self) -> list[nn.Module]:
        """New modules with the same weights at every call."""
        torch.default_generator.manual_seed(zlib.crc32(self.name.encode()))
        built = self.build()
        found = list(built) if isinstance(built, tuple) else [built]
        return [module.double().train(not self.eval) for module in found]

    def arguments(self, size: int, step: int) -> Arguments:
        """The batch of one step, equal at every call."""
        torch.default_generator.manual_seed(1000 * step + size)
        return self.batch(size)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def squares(out: Tensor) -> Tensor:
    return (out - 0.3).square().mean()


def weighted(out: Tensor) -> Tensor:
    """A loss with a different gradient for each sample."""
    weights = torch.linspace(0.5, 1.5, out.shape[0], dtype=out.dtype)
    return (weights * out[:, None].sin().flatten(1).sum(1)).mean()


def tokens(size: int) -> Tensor:
    return torch.randint(models.WORDS, (size, MAX_LENGTH))


def next_word(out: Tensor) -> Tensor:
    target = torch.arange(out.shape[0] * MAX_LENGTH) * 7 % models.WORDS
    return cross_entropy(out.flatten(0, 1), target)


def packed(size: int, enforce_sorted: bool) -> Arguments:
    lengths = torch.randint(1, MAX_LENGTH + 1, (size,))
    if enforce_sorted:
        lengths = lengths.sort(descending=True).values
    return (pack_sequence([normal(int(n), 3) for n in lengths], enforce_sorted=enforce_sorted),), {}


def packed_loss(out: Any) -> Tensor:
    sequence, (hidden, cell) = out
    positions = torch.linspace(0.5, 1.5, sequence.data.shape[0], dtype=torch.float64)
    return (positions[:, None] * sequence.data).square().mean() + weighted(hidden.transpose(0, 1)) + squares(cell)


def padded(size: int) -> Arguments:
    lengths = torch.randint(1, MAX_LENGTH + 1, (size,))
    return (normal(size, MAX_LENGTH, 3), lengths), {"state": (normal(1, size, 4), normal(1, size, 4))}


def masked(size: int) -> Arguments:
    lengths = torch.randint(1, MAX_LENGTH + 1, (size,))
    padding = torch.arange(MAX_LENGTH) >= lengths[:, None]
    mask = torch.ones(MAX_LENGTH, MAX_LENGTH, dtype=torch.bool).triu(1)
    return (tokens(size),), {"padding": padding, "mask": mask}


def dictionary(size: int) -> Arguments:
    names = ["a" * (1 + index % 4) for index in range(size)]
    return ({"x": normal(size, 3), "names": names, "mode": "tanh", "scale": 1.5},), {}


def dictionary_loss(out: dict[str, Any]) -> Tensor:
    return weighted(out["y"]) + squares(out["nested"]["first"])


def record(size: int) -> Arguments:
    weight = torch.rand(size, dtype=torch.float64) if size % 2 else None
    return (models.Batch(normal(size, 3), weight, [f"tag{index}" for index in range(size)]),), {}


def ragged(size: int) -> Arguments:
    return ([normal(3 + index % 3, 3) for index in range(size)],), {}


def ragged_loss(out: list[Tensor]) -> Tensor:
    return sum((index + 1) * squares(y) for index, y in enumerate(out)) / len(out)


def _adversarial(
    case: Case, modules: Modules, arguments: Arguments, optimizers: Optimizers
) -> tuple[Any, list[Tensor]]:
    """Train the discriminator; then the generator, with the discriminator frozen."""
    generator, discriminator = modules
    (noise, real), _ = arguments
    optimizers[1].zero_grad()
    fake = generator(noise)
    on_real, on_fake = discriminator(real), discriminator(fake.detach())
    ones, zeros = torch.ones_like(on_real), torch.zeros_like(on_fake)
    d_loss = binary_cross_entropy_with_logits(on_real, ones) + binary_cross_entropy_with_logits(on_fake, zeros)
    d_loss.backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    discriminator.requires_grad_(False)
    optimizers[0].zero_grad()
    judged = discriminator(generator(noise))
    g_loss = binary_cross_entropy_with_logits(judged, ones)
    g_loss.backward()
    discriminator.requires_grad_(True)
    return {"fake": fake, "judged": judged}, [d_loss, g_loss]


CASES = [
    Case("mlp", models.mlp, lambda n: ((normal(n, 3),), {}), weighted),
    Case("conv-eval", models.ConvNet, lambda n: ((normal(n, 2, 6, 6),), {}), weighted, eval=True),
    Case("conv-train", models.BatchNormNet, lambda n: ((normal(n, 2, 6, 6),), {}), weighted),
    Case(
        "contrastive",
        models.Contrastive,
        lambda n: ((normal(n, 3), normal(n, 4)), {}),
        lambda out: out[0].mean() + squares(out[1]),
    ),
    Case(
        "lstm-packed-sorted",
        models.PackedLSTM,
        lambda n: packed(n, enforce_sorted=True),
        packed_loss,
        {"out_dims": {"1.*": 1}},
    ),
    Case(
        "lstm-packed-unsorted",
        models.PackedLSTM,
        lambda n: packed(n, enforce_sorted=False),
        packed_loss,
        {"out_dims": {"1.*": 1}},
    ),
    Case("lstm-padded", models.PaddedLSTM, padded, weighted, {"in_dims": {"state": 1}}),
    Case("transformer", models.Transformer, masked, next_word, {"in_dims": {"mask": None}}),
    Case("sparse-embedding", models.SparseBag, lambda n: ((tokens(n),), {}), weighted, sparse=True),
    Case("tied", models.Tied, lambda n: ((tokens(n),), {}), next_word),
    Case("weight-norm-old", models.old_weight_norm, lambda n: ((normal(n, 3),), {}), weighted),
    Case("weight-norm-new", models.new_weight_norm, lambda n: ((normal(n, 3),), {}), weighted),
    Case("checkpoint-reentrant", lambda: models.Checkpointed(True), lambda n: ((normal(n, 3),), {}), weighted),
    Case("checkpoint", lambda: models.Checkpointed(False), lambda n: ((normal(n, 3),), {}), weighted),
    Case(
        "gan",
        lambda: (models.Generator(), models.Discriminator()),
        lambda n: ((normal(n, 3), normal(n, 4)), {}),
        squares,
        step=_adversarial,
    ),
    Case("dict", models.Dictionary, dictionary, dictionary_loss),
    Case("dataclass", models.Record, record, lambda out: weighted(out.y)),
    # A list of one tensor could also be a structure with one batched tensor: in_dims decides.
    Case("ragged-list", models.Ragged, ragged, ragged_loss, {"in_dims": {"samples": "samples"}}),
    Case(
        "inner-loss",
        models.InnerLoss,
        lambda n: ((), {"x": normal(n, 3), "target": torch.arange(n) % 4}),
        lambda out: out["loss"],
        {"merge": {"loss": "mean"}},
    ),
]
BY_NAME = {case.name: case for case in CASES}


@dataclass
class History:
    """The results of a training run."""

    outputs: list[Any] = field(default_factory=list)
    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    """After the first step's last backward."""
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """After the last step."""


def train(case: Case, modules: Modules, sizes: Sequence[int], make_optimizer: Callable[..., Any]) -> History:
    """One step for each batch size."""
    optimizers = [make_optimizer(list(module.parameters())) for module in modules]
    history = History()
    for index, size in enumerate(sizes):
        out, losses = case.step(case, modules, case.arguments(size, index), optimizers)
        if index == 0:
            history.gradients = [_copy(p.grad) for module in modules for p in module.parameters()]
        optimizers[0].step()
        history.outputs.append(out)
        history.losses.append([loss.detach() for loss in losses])
    history.weights = [module.state_dict() for module in modules]
    return history


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()
