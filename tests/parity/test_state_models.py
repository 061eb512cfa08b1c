"""Models with state train like the plain module: equal outputs, gradients, weights and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import instep

from .compare import assert_same, assert_same_gradients
from .conftest import Pair, PairFactory

SIZES = (7, 8, 3)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def train(
    both: Pair, batch: Callable[[int], Any], loss: Callable[[Any, Tensor], Tensor], sizes: Sequence[int] = SIZES
) -> None:
    """Train both modules; assert equal outputs, gradients and state dicts after each step."""
    optimizers = [
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9) for module in both
    ]
    for size in sizes:
        x = batch(size)
        outputs = []
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(module(x))
            loss(module, outputs[-1]).backward()
        assert_same(outputs[1], outputs[0], 1e-10, "output")
        assert_same_gradients(both, 1e-10)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(both.model.state_dict(), both.plain.state_dict(), 1e-10, "state")


def squares(_: Any, out: Tensor) -> Tensor:
    return (out - 0.3).square().mean()


class Running(nn.Module):
    """Running statistics, in buffers and in an unregistered tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.total = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        self.total += y.detach().sum(0)
        self.seen += 1
        return y - self.mean


def test_running_state(pair: PairFactory) -> None:
    # `Running` subtracts the new mean of its shard, so its output depends on the shard. `After` subtracts the old mean.
    class After(Running):
        def forward(self, x: Tensor) -> Tensor:
            before = self.mean
            return super().forward(x) + self.mean - before

    both = pair(After, state={"mean": "mean", "total": "sum"})
    train(both, lambda n: normal(n, 3), squares)
    torch.testing.assert_close(both.model.total, both.plain.total)


class Auxiliary(nn.Module):
    """Stores losses in an attribute, a list, a dictionary and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.losses: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.losses.clear()
        self.losses.append(h.square().mean())
        self.cache["h"] = h
        self.first.sparsity = h.abs().mean()
        self.kl = (h - 1).square().mean()
        return self.last(h)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attribute": lambda net, out: net.kl,
    "list": lambda net, out: net.losses[0],
    "dictionary": lambda net, out: net.cache["h"].sin().sum(),
    "submodule": lambda net, out: net.first.sparsity,
    "all": lambda net, out: (
        net.kl + net.losses[0] + net.cache["h"].sin().sum() + net.first.sparsity + squares(net, out)
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_an_auxiliary_loss_stored_on_the_module(pair: PairFactory, loss: Callable[[Any, Tensor], Tensor]) -> None:
    both = pair(Auxiliary, merge={"losses": "mean", "kl": "mean", "first.sparsity": "mean"})
    train(both, lambda n: normal(n, 3), loss)


def test_backward_of_stored_losses_one_after_the_other(pair: PairFactory) -> None:
    both = pair(Auxiliary, merge={"losses": "mean", "kl": "mean", "first.sparsity": "mean"})

    def twice(net: Any, out: Tensor) -> Tensor:
        net.losses[0].backward(retain_graph=True)
        net.kl.backward(retain_graph=True)
        return squares(net, out) + net.cache["h"].sum()

    train(both, lambda n: normal(n, 3), twice)


class Contrast(nn.Module):
    """A frozen momentum encoder with a queue of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 4), nn.Linear(3, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", normalize(torch.arange(40.0).reshape(10, 4).sin(), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            keys = normalize(self.key(x), dim=1)
        queries = normalize(self.query(x), dim=1)
        out = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1)
        self.queue = torch.cat([keys, self.queue])[:10]
        return out


def newest_first(old: Tensor, new: list[Tensor], sizes: list[int]) -> Tensor:
    return torch.cat([*(part[:size] for part, size in zip(new, sizes, strict=True)), old])[: len(old)]


def test_a_momentum_encoder_with_a_queue(pair: PairFactory) -> None:
    both = pair(Contrast, state={"queue": newest_first})
    train(both, lambda n: normal(n, 3), lambda _, out: cross_entropy(out, torch.zeros(len(out), dtype=torch.long)))


class Teacher(nn.Module):
    """Updates a teacher from its student through `.data`, and counts steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 4), nn.Linear(3, 4)
        self.teacher.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.steps += 1
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.1)
        return self.student(x), self.teacher(x)


def test_a_teacher_updated_in_forward(pair: PairFactory) -> None:
    train(pair(Teacher), lambda n: normal(n, 3), lambda _, out: mse_loss(*out))


def test_a_teacher_updated_between_calls(pair: PairFactory) -> None:
    both = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    teachers = Pair(*pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()).requires_grad_(False)))
    for size in SIZES:
        x = normal(size, 3)
        losses = []
        for student, teacher in zip(both, teachers, strict=True):
            student.zero_grad()
            losses.append(mse_loss(student(x), teacher(x)))
            losses[-1].backward()
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    theirs.data.sub_(theirs.grad, alpha=0.1)
                    mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        torch.testing.assert_close(*losses)
    assert_same(teachers.model.state_dict(), teachers.plain.state_dict(), 1e-12, "teacher")


def test_two_models_that_learn_from_each_other(pair: PairFactory) -> None:
    pairs = [pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))) for _ in range(2)]
    with torch.no_grad():
        for module in pairs[1]:
            module.module[0].weight.add_(1) if hasattr(module, "module") else module[0].weight.add_(1)
    for size in SIZES:
        x = normal(size, 3)
        for one, other in zip(*pairs, strict=True):  # the plain two, then the wrapped two
            first, second = one(x), other(x)
            loss = mse_loss(first, second.detach()) + mse_loss(second, first.detach()) + first.sin().mean()
            one.zero_grad(), other.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in (*one.parameters(), *other.parameters()):
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        for both in pairs:
            assert_same_gradients(both, 1e-12)


def test_freezing_and_unfreezing_during_training(pair: PairFactory) -> None:
    both = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    for trainable in (False, True, True, False):
        for module in both:
            module[0].requires_grad_(trainable)
        train(both, lambda n: normal(n, 3), squares, SIZES[:2])


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4, max_norm=0.7), nn.Flatten(), nn.Linear(12, 2))


class TiedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, max_norm=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).tanh() @ self.words.weight.T


@pytest.mark.filterwarnings("ignore:calls run on one device because forward renormalizes")
@pytest.mark.parametrize("build", [embedding, TiedNorm])
def test_embeddings_with_max_norm(pair: PairFactory, build: Callable[[], nn.Module]) -> None:
    train(pair(build), lambda n: torch.randint(9, (n, 3)), squares)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "instance norm 2d": lambda: nn.Sequential(
        nn.Unflatten(2, (2, 2)), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "spectral norm, old": lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
    "averaged": lambda: AveragedModel(nn.Linear(4, 3)),
    "observer": lambda: nn.Sequential(nn.Linear(4, 3), MinMaxObserver()),
    "observer, moving": lambda: nn.Sequential(nn.Linear(4, 3), MovingAverageMinMaxObserver()),
    "observer, channels": lambda: nn.Sequential(nn.Linear(4, 3), PerChannelMinMaxObserver(ch_axis=1)),
    "observer, moving channels": lambda: nn.Sequential(
        nn.Linear(4, 3), MovingAveragePerChannelMinMaxObserver(ch_axis=1)
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
def test_layers_with_state(pair: PairFactory, build: Callable[[], nn.Module]) -> None:
    train(pair(build), lambda n: normal(n, 3, 4), squares)


@pytest.mark.parametrize("what", ["backward", "zero_grad"])
def test_backward_and_zero_grad_inside_forward_raise(pair: PairFactory, what: str) -> None:
    class ChangesGradients(nn.Linear):
        active = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.active:
                y.sum().backward(retain_graph=True) if what == "backward" else self.zero_grad()
            return y

    _, model = pair(lambda: ChangesGradients(3, 2))
    x = normal(5, 3)
    model(x).sum().backward()
    before = model.weight.grad.clone()
    model.active = True
    with pytest.raises(instep.BridgeError, match=r"inside forward"):
        model(x)
    torch.testing.assert_close(model.weight.grad, before)
    model.active = False
    model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, before * 2)


def test_forward_may_freeze_a_layer(pair: PairFactory) -> None:
    class Freezes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                self.first.requires_grad_(False)
            return self.last(self.first(x))

    if (pair.engine, pair.private) == ("serial", True):  # a joint graph of copies has no leaves to freeze
        with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
            train(pair(Freezes), lambda n: normal(n, 3), squares)
        return
    train(pair(Freezes), lambda n: normal(n, 3), squares)


class Counts(nn.Module):
    """Counts samples and sums inputs in two buffers, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.total += x.detach().sum(0)
        y: Tensor = self.layer(x)
        return y


def test_buffers_reassigned_between_calls(pair: PairFactory) -> None:
    both = pair(Counts, state={"seen": "sum", "total": "sum"})
    for step in range(5):
        x = normal(7, 4)
        outputs = [module(x) for module in both]
        assert_same(outputs[1], outputs[0], 1e-12, "output")
        assert_same(both.model.state_dict(), both.plain.state_dict(), 1e-12, f"state after step {step}")
        for module in (both.plain, both.model.module):
            module.seen = torch.zeros((), dtype=torch.float64)
            if step % 2:  # may reuse the memory of the old buffer
                module.total, module.seen = torch.zeros(4, dtype=torch.float64), module.seen.clone()
