"""`with_loss` with a function that returns the mean of a torch loss: its sum and divisor are summed over replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import instep
from instep.call.torch_losses import divisor_of
from instep.probe import probe as probe_module

ENGINES = ["serial", "threads", "processes"]
CLASSES = 5
WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 3.0, 1.0], dtype=torch.float64)


class Tokens(nn.Module):
    """Logits of every token, `[batch, length, classes]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 4, dtype=torch.float64), nn.Linear(4, CLASSES).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def flat(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), WEIGHTS, ignore_index=3)


def next_token(output: Tensor, target: Tensor) -> Tensor:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return criterion(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


class Criterion(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.nll_loss(output.log_softmax(-1).flatten(0, 1), target.flatten(), reduction="mean")


FUNCTIONS: list[Callable[..., Tensor]] = [flat, weighted, next_token, Criterion()]

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def batch(step: int, size: int = 5, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Ids and targets. From the third step on, most targets of the first samples are ignored."""
    generator = torch.Generator().manual_seed(step)
    ids, target = torch.randint(CLASSES, (2, size, 6), generator=generator)
    if step >= 2:
        target[:2, 1:] = ignored
    return ids, target


def runs_with_sums(model: instep.DataParallel) -> bool:
    return model._instep_runner.methods["forward"].replica_method == "_instep_mean_parts"


def assert_same_step(model: instep.DataParallel, plain: nn.Module, criterion: Any, ids: Tensor, target: Tensor) -> None:
    losses = [model(ids, target), criterion(plain(ids), target)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("criterion", FUNCTIONS, ids=["flat", "weighted", "next token", "module"])
def test_training(criterion: Any, engine: str) -> None:
    plain = Tokens()
    with instep.DataParallel(instep.with_loss(copy.deepcopy(plain), criterion), ["cpu"] * 2, engine=engine) as model:
        for step in range(5):
            assert_same_step(model, plain, criterion, *batch(step, 5 + step % 2, 3 if criterion is weighted else -100))
        assert runs_with_sums(model)


def test_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them would make the host wait for the device in every call."""
    model = instep.DataParallel(instep.with_loss(Tokens(), flat), ["cpu"] * 2, engine="threads")
    for _ in range(3):
        model(*batch(0))
    monkeypatch.setattr(probe_module, "WeightTransfer", None)
    model(*batch(3)).backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_criterion_that_changes(engine: str) -> None:
    plain = Tokens()
    ids, target = batch(0)
    other = target.clone()
    other[:, 0] = CLASSES  # not a class: it chooses the other loss

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        if labels[0, 0] < CLASSES:
            return flat(output, labels)
        return flat(output[:, 1:], labels[:, 1:]) + output.square().mean()

    with instep.DataParallel(instep.with_loss(copy.deepcopy(plain), loss), ["cpu"] * 2, engine=engine) as model:
        for _ in range(3):
            assert_same_step(model, plain, loss, ids, target)
        assert runs_with_sums(model)
        for labels in (other, target, other):
            assert_same_step(model, plain, loss, ids, labels)
        assert not runs_with_sums(model)


def test_other_values_are_inferred() -> None:
    """A value that was computed from a mean is not one."""
    plain = Tokens()

    def half(output: Tensor, target: Tensor) -> Tensor:
        return flat(output, target) / 2

    model = instep.DataParallel(instep.with_loss(copy.deepcopy(plain), half), ["cpu"] * 2, engine="threads")
    for step in range(4):
        assert_same_step(model, plain, half, *batch(step))
    assert not runs_with_sums(model)


@pytest.mark.parametrize("engine", ENGINES)
def test_means_that_are_changed_in_place(engine: str) -> None:
    """The returned tensor is that of the mean, and its value is not."""
    plain = Tokens()

    def scaled(output: Tensor, target: Tensor) -> Tensor:
        loss = flat(output, target)
        loss *= 1.5
        return loss

    def penalized(output: Tensor, target: Tensor) -> Tensor:
        loss = flat(output, target)
        if target[0, 0] == 4:
            loss += output.square().mean()
        return loss

    for criterion in (scaled, penalized):
        with instep.DataParallel(
            instep.with_loss(copy.deepcopy(plain), criterion), ["cpu"] * 2, engine=engine
        ) as model:
            plain.zero_grad()
            for step in range(5):
                ids, target = batch(0, 6)
                target[:, 0] = 4 if step == 3 else 2
                assert_same_step(model, plain, criterion, ids, target)
            with torch.inference_mode():
                for start in (2, 4):
                    target[:, 0] = start
                    torch.testing.assert_close(model(ids, target), criterion(plain(ids), target))


def test_two_wrappers_of_one_module() -> None:
    plain = Tokens()
    module = instep.with_loss(copy.deepcopy(plain), flat)
    first = instep.DataParallel(module, ["cpu"] * 2, engine="threads")
    second = instep.DataParallel(module, ["cpu"] * 3, engine="threads")
    for step in range(4):
        ids, target = batch(step, 6)
        for model in (first, second, second, first):
            torch.testing.assert_close(model(ids, target), flat(plain(ids), target))


def test_a_trial_that_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sum over the divisor is not the mean, the mean is inferred as before."""
    plain = Tokens()
    model = instep.DataParallel(instep.with_loss(copy.deepcopy(plain), flat), ["cpu"] * 2, engine="threads")
    assert_same_step(model, plain, flat, *batch(0))
    monkeypatch.setattr("instep.call.loss.divisor_of", lambda criterion, output, target: 3)
    for step in range(1, 4):
        assert_same_step(model, plain, flat, *batch(step))
    assert not runs_with_sums(model)


def test_a_rule_of_the_user_stays() -> None:
    plain = Tokens()
    rule = instep.weighted_by(lambda target, **_: (target != -100).sum())
    model = instep.DataParallel(instep.with_loss(copy.deepcopy(plain), flat), ["cpu"] * 2, merge=rule, engine="threads")
    for step in range(4):
        assert_same_step(model, plain, flat, *batch(step))
    assert not runs_with_sums(model)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_compiled(engine: str) -> None:
    plain = Tokens()
    model = instep.DataParallel(instep.with_loss(copy.deepcopy(plain), flat), ["cpu"] * 2, engine=engine)
    model.compile(backend="eager")
    for step in range(4):
        assert_same_step(model, plain, flat, *batch(step))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_criterion(engine: str) -> None:
    plain = Tokens()
    compiled = torch.compile(Criterion(), backend="eager")
    with instep.DataParallel(instep.with_loss(copy.deepcopy(plain), compiled), ["cpu"] * 2, engine=engine) as model:
        for step in range(4):
            assert_same_step(model, plain, Criterion(), *batch(step))


@pytest.mark.parametrize("length", [6, 256, 257, 1000])
def test_counted_targets(length: int) -> None:
    """Targets are counted in Python or by torch, depending on their length."""
    target = torch.arange(length) % 4 - 1
    divisor = divisor_of(nn.CrossEntropyLoss(ignore_index=-1), torch.zeros(length, 3), target)
    assert isinstance(divisor, int) == (length <= 256)
    assert int(divisor) == int((target >= 0).sum())


@pytest.mark.parametrize("shape", [(6,), (300,), (3, 2)])
def test_classes_in_uint8(shape: tuple[int, ...]) -> None:
    """Class 156 is not -100, the default of `ignore_index`, although it is in the arithmetic of uint8."""
    target = torch.full(shape, 156, dtype=torch.uint8)
    assert int(divisor_of(nn.CrossEntropyLoss(), torch.zeros(*shape[:1], 200, *shape[1:]), target)) == target.numel()


def test_targets_under_vmap_are_counted_by_torch() -> None:
    criterion, targets = nn.CrossEntropyLoss(ignore_index=1), torch.tensor([[0, 1, 2], [1, 1, 2]])
    count = torch.func.vmap(lambda target: divisor_of(criterion, torch.zeros(3, 3), target))
    assert count(targets).tolist() == [2, 1]
