"""Random sequences of operations: the plain and the wrapped module are equal after every one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .cases import normal, weighted
from .compare import assert_same, assert_same_gradients
from .conftest import Pair, PairFactory

TOLERANCE = 1e-9
"""About forty training steps amplify rounding differences; real errors are orders of magnitude larger."""


class Net(nn.Module):
    """A trunk with a frozen batch norm, two alternating heads, a tied weight, and a buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6).eval(), nn.ReLU(inplace=True))
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(2))
        self.tied = nn.Linear(6, 2, bias=False)
        self.tied.weight = self.heads[0].weight
        self.gate = 0
        self.register_buffer("calls", torch.zeros(()))

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.trunk[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if (x > 1000).any():
            raise ValueError("too large")
        self.calls += 1
        h = self.trunk(x)
        return torch.tanh(self.heads[self.gate](h)) + 0.1 * self.tied(h)


class RandomTraining:
    """Applies randomly chosen operations to both modules of a pair."""

    def __init__(self, both: Pair, seed: int) -> None:
        self.both = both
        self.choose = random.Random(seed)
        self.pending: list[list[Tensor]] = []
        self._make_optimizers()

    def _make_optimizers(self) -> None:
        make = self.choose.choice(
            [
                lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
                lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
                lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
            ]
        )
        self.optimizers = [make(list(module.parameters())) for module in self.both]

    def _apply_to_both(self, do: Callable[[Any], Any]) -> list[Any]:
        return [do(module) for module in self.both]

    def _batch(self) -> Tensor:
        return normal(self.choose.choice([1, 2, 3, 5, 7, 9]), 3)

    def forward(self) -> None:
        x = self._batch()
        outs = self._apply_to_both(lambda module: module(x))
        assert_same(outs[1], outs[0], TOLERANCE, "output")
        if outs[0].requires_grad:
            self.pending.append([weighted(out) for out in outs])

    def backward(self) -> None:
        if not self.pending:
            self.forward()
        if self.pending:
            for loss in self.pending.pop(self.choose.randrange(len(self.pending))):
                loss.backward()

    def step(self) -> None:
        while self.pending:
            self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def accumulate(self) -> None:
        batches = [self._batch() for _ in range(self.choose.choice([1, 2, 3]))]
        for module in self.both:
            with getattr(module, "no_sync", nullcontext)():
                for x in batches:
                    loss = weighted(module(x))
                    if loss.requires_grad:
                        loss.backward()

    def evaluate(self) -> None:
        x = self._batch()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                outs = self._apply_to_both(lambda module: module(x))
            assert_same(outs[1], outs[0], TOLERANCE, "output without graph")

    def freeze(self) -> None:
        part, state = self.choose.choice(["trunk.0", "heads.1", "trunk.1"]), self.choose.random() < 0.5
        self._apply_to_both(lambda module: module.get_submodule(part).requires_grad_(state))

    def switch_head(self) -> None:
        self._apply_to_both(lambda module: setattr(module, "gate", 1 - module.gate))

    def load(self) -> None:
        self.pending.clear()
        state = {name: 0.9 * value for name, value in self.both.plain.state_dict().items()}
        self._apply_to_both(lambda module: module.load_state_dict(state))

    def swap_memory(self) -> None:
        self.pending.clear()
        weight = normal(6, 3)
        self._apply_to_both(lambda module: setattr(module.trunk[0].weight, "data", weight.clone()))

    def nudge(self) -> None:
        self.pending.clear()
        self._apply_to_both(lambda module: module.heads[1].weight.data.mul_(0.97))
        self._apply_to_both(lambda module: module.trunk[1].running_mean.add_(0.01))

    def replace(self) -> None:
        layer = nn.Linear(6, 2).double()
        state = layer.state_dict()
        for module in self.both:
            module.heads[1] = nn.Linear(6, 2).double()
            module.heads[1].load_state_dict(state)
        self.step()
        self._make_optimizers()

    def fail(self) -> None:
        x = self._batch()
        x[-1, 0] = 2000
        for module in self.both:
            calls = module.calls.clone()
            with pytest.raises(ValueError, match="too large"):
                module(x)
            assert torch.equal(module.calls, calls)

    def change_mode(self) -> None:
        mode = self.choose.random() < 0.5
        self._apply_to_both(lambda module: module.train(mode))

    def check(self) -> None:
        assert_same_gradients(self.both, TOLERANCE)
        found = self._apply_to_both(lambda module: dict(module.state_dict()))
        assert_same(found[1], found[0], TOLERANCE, "state")


OPERATIONS = {
    RandomTraining.forward: 4,
    RandomTraining.backward: 5,
    RandomTraining.step: 5,
    RandomTraining.accumulate: 2,
    RandomTraining.evaluate: 1,
    RandomTraining.freeze: 2,
    RandomTraining.switch_head: 2,
    RandomTraining.load: 1,
    RandomTraining.swap_memory: 1,
    RandomTraining.nudge: 1,
    RandomTraining.replace: 1,
    RandomTraining.fail: 1,
    RandomTraining.change_mode: 1,
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_random_operations(pair: PairFactory, seed: int) -> None:
    training = RandomTraining(pair(Net, state={"calls": "max"}), seed)
    done = []
    for operation in training.choose.choices(list(OPERATIONS), list(OPERATIONS.values()), k=60):
        done.append(operation.__name__)
        try:
            operation(training)
            training.check()
        except BaseException as error:
            print(f"after {', '.join(done)}")
            raise error
