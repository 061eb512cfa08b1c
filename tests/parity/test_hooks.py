"""Hooks, no_sync, in-place writes before the backward, deepcopy and double backward match the plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import BridgeError

from .cases import normal, weighted
from .compare import assert_same, assert_same_gradients, gradients
from .conftest import Pair, PairFactory
from .models import Each, TwoHeads, mlp

EXACT = 1e-13
"""Float64 and one backward: sums of a few terms in another order."""


def test_hooks_and_retained_gradients_of_outputs(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    found = []
    for module in both:
        out = module(x)
        out.retain_grad()
        out.register_hook(lambda gradient: gradient * 2)
        weighted(out).backward()
        found.append(out.grad)
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


def test_gradients_accumulate_over_batches(pair: PairFactory) -> None:
    both = pair(mlp)
    for n in (7, 3, 1):
        x = normal(n, 3)
        for module in both:
            weighted(module(x)).backward()
    assert_same_gradients(both, EXACT)
    for module in both:
        module.zero_grad(set_to_none=False)
        weighted(module(x)).backward()
    assert_same_gradients(both, EXACT)


def test_parameter_hooks_fire_once_with_the_whole_gradient(pair: PairFactory) -> None:
    both = pair(mlp)
    seen: tuple[list[Tensor], ...] = ([], [])
    for module, mine in zip(both, seen, strict=True):
        weight = module[2].weight
        weight.register_hook(mine.append)
        module[0].weight.register_hook(lambda gradient: gradient * 10)
        weight.register_post_accumulate_grad_hook(lambda p, mine=mine: mine.append(p.grad.clone()))
    for n in (7, 4):
        x = normal(n, 3)
        for module in both:
            weighted(module(x)).backward()
    assert len(seen[0]) == 4
    assert_same(seen[1], seen[0], EXACT)
    assert_same_gradients(both, EXACT)


def test_parameter_hooks_do_not_fire_without_a_gradient(pair: PairFactory) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        for layer in (*module.heads, *module.apart):
            layer.weight.register_hook(lambda gradient: gradient * 2)
            layer.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        weighted(module(x)[0]).backward()
        weighted(module(x)[3]).backward()
    assert_same_gradients(both, EXACT)


def test_optimizer_step_in_a_hook_of_the_backward(pair: PairFactory) -> None:
    both = pair(mlp)
    for module in both:
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.05)

            def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        x = normal(7, 3)
        for module in both:
            weighted(module(x)).backward()
    assert_same(both.model.state_dict(), both.plain.state_dict(), EXACT)


def test_no_sync_reduces_gradients_at_exit(pair: PairFactory) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 2, 1, 16)]
    found = []
    for x in batches:
        weighted(both.plain(x)).backward()
    with both.model.no_sync():
        for x in batches:
            mine = x.clone().requires_grad_()
            weighted(both.model(mine)).backward()
            found.append(mine.grad)
    assert all(gradient is not None for gradient in found)
    assert_same_gradients(both, EXACT)
    for module in both:  # after the context, gradients are reduced in every backward
        weighted(module(batches[0])).backward()
    assert_same_gradients(both, EXACT)


def test_no_sync_keeps_gradients_on_the_replicas(threads_pair: PairFactory) -> None:
    both = threads_pair(mlp)
    calls: list[Tensor] = []
    both.model[0].weight.register_hook(calls.append)
    with both.model.no_sync():
        for _ in range(3):
            x = normal(7, 3)
            weighted(both.model(x)).backward()
            weighted(both.plain(x)).backward()
        assert all(gradient is None for gradient in gradients(both.model))
    assert len(calls) == 1
    assert_same_gradients(both, EXACT)


def test_step_between_forward_and_backward_raises(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    for module in both:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        weighted(module(x)).backward()
        loss = weighted(module(x))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        weighted(module(x)).backward()  # the next call works
    assert_same_gradients(both, EXACT)


def test_write_after_the_last_use_does_not_raise(pair: PairFactory) -> None:
    both = pair(lambda: nn.Linear(3, 2))
    x = normal(7, 3)
    for module in both:
        loss = weighted(module(x))
        with torch.no_grad():
            module.weight.mul_(2)  # x needs no gradient, so the backward does not need the weight
        loss.backward()
    assert_same_gradients(both, EXACT)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain-input", "input-needs-grad"])
def test_input_written_between_forward_and_backward_raises(pair: PairFactory, needs_grad: bool) -> None:
    both = pair(mlp)
    for module in both:
        x = normal(7, 3).requires_grad_(needs_grad)
        loss = weighted(module(x))
        with torch.no_grad():
            x[6] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        module.zero_grad()


def test_input_in_a_list_written_between_forward_and_backward_raises(pair: PairFactory) -> None:
    for module in pair(Each):
        samples = [normal(2 + index % 2, 3) for index in range(5)]
        loss = sum(y.sin().sum() for y in module(samples))
        samples[4].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_deepcopy_in_the_middle_of_training(pair: PairFactory) -> None:
    both = pair(mlp)

    def learn(module: Any, seed: int) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            torch.default_generator.manual_seed(100 * seed + step)
            optimizer.zero_grad()
            weighted(module(normal(7, 3))).backward()
            optimizer.step()

    for module in both:
        learn(module, 0)
    copies = Pair(copy.deepcopy(both.plain), copy.deepcopy(both.model))
    with copies.model:
        for original, copied in zip(both, copies, strict=True):
            learn(original, 1)
            learn(copied, 2)
        assert_same(both.model.state_dict(), both.plain.state_dict(), EXACT)
        assert_same(copies.model.state_dict(), copies.plain.state_dict(), EXACT)


def penalty(module: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return (slope.norm(2, 1) - 1).square().mean()


def test_double_backward_on_the_serial_engine(serial_pair: PairFactory) -> None:
    both = serial_pair(mlp)
    x = normal(7, 3)
    losses = [penalty(module, x) for module in both]
    for loss in losses:
        loss.backward()
    assert_same(losses[1], losses[0], EXACT)
    assert_same_gradients(both, EXACT)


def test_double_backward_on_the_threads_engine_raises_and_names_alternatives(threads_pair: PairFactory) -> None:
    both = threads_pair(mlp)
    with pytest.raises(BridgeError, match=r"model\.call\('penalty'(.|\n)*engine='serial'"):
        penalty(both.model, normal(7, 3))
    x = normal(7, 3)
    for module in both:
        weighted(module(x)).backward()
    assert_same_gradients(both, EXACT)


class Inner(nn.Module):
    """Computes gradients in its methods: of the input for a penalty, and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def penalty(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(2, 1) - 1).square()

    def slopes(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.net(x).sin().sum(), self.net[0].weight, create_graph=True)
        return slope


def test_gradient_penalty_inside_the_module(pair: PairFactory) -> None:
    both = pair(Inner)
    x = normal(7, 3)
    losses = [both.plain.penalty(x), both.model.call("penalty", x)]
    assert_same(losses[1], losses[0], EXACT)
    for loss in losses:
        loss.mean().backward()
    assert_same_gradients(both, EXACT)


def test_gradient_of_a_weight_inside_the_module(pair: PairFactory) -> None:
    both = pair(Inner)
    x = normal(7, 3)
    slopes = [both.plain.slopes(x), both.model.call("slopes", x)]
    assert_same(slopes[1], slopes[0], EXACT)
    for slope in slopes:
        slope.square().sum().backward()
    assert_same_gradients(both, EXACT)
