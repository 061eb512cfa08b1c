"""Other uses of the autograd graph than one backward per forward match the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .cases import normal, weighted
from .compare import assert_same, assert_same_gradients, gradients
from .conftest import PairFactory
from .models import Each, TwoHeads, mlp

EXACT = 1e-13
"""Float64 and one backward: sums of a few terms in another order."""


def test_several_forwards_before_one_backward(pair: PairFactory) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 2, 1, 16)]
    for module in both:
        loss = sum(weighted(module(x)) for x in batches)
        loss.backward()
    assert_same_gradients(both, EXACT)


def test_backwards_in_another_order_than_the_forwards(pair: PairFactory) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 5, 6)]
    for module in both:
        losses = [weighted(module(x)) for x in batches]
        for index in (2, 0, 1):
            losses[index].backward()
    assert_same_gradients(both, EXACT)


def test_output_of_one_call_is_input_of_the_next(pair: PairFactory) -> None:
    both = pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = normal(7, 3)
    for module in both:
        weighted(module(module(module(x)))).backward()
    assert_same_gradients(both, EXACT)


@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0), (2, 3), (3, 0)])
def test_backward_of_one_output_then_of_another(pair: PairFactory, first: int, then: int) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        out = module(x)
        weighted(out[first]).backward(retain_graph=True)
        weighted(out[then]).backward()
    assert_same_gradients(both, EXACT)


def test_independent_outputs_need_no_retained_graph(pair: PairFactory) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        out = module(x)
        weighted(out[2]).backward()
        weighted(out[3]).backward()
        weighted(out[0]).backward()
    assert_same_gradients(both, EXACT)


def test_second_backward_through_a_freed_graph_raises(pair: PairFactory) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        out = module(x)
        weighted(out[0]).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weighted(out[1]).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weighted(out[0]).backward()


def test_several_backwards_with_a_retained_graph(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    for module in both:
        loss = weighted(module(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert_same_gradients(both, EXACT)


def test_autograd_grad(pair: PairFactory) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    found = []
    for module in both:
        mine = x.clone().requires_grad_()
        wanted = [mine, module.trunk.weight, module.heads[0].bias, module.heads[1].weight]
        out = module(mine)
        found.append(torch.autograd.grad(weighted(out[0]), wanted, allow_unused=True))
        assert mine.grad is None
        assert all(gradient is None for gradient in gradients(module))
    assert_same(found[1], found[0], EXACT)


def test_backward_to_chosen_inputs(pair: PairFactory) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        weighted(module(x)[0]).backward(inputs=[module.heads[0].weight])
    assert both.model.trunk.weight.grad is None
    assert_same_gradients(both, EXACT)


def test_inputs_that_need_gradients(pair: PairFactory) -> None:
    both = pair(mlp)
    values = normal(7, 3)
    found = []
    for module in both:
        leaf = values.clone().requires_grad_()
        base = values.clone().requires_grad_()
        between = base * 2
        between.retain_grad()
        (weighted(module(leaf)) + weighted(module(between.sin()))).backward()
        found.append([leaf.grad, base.grad, between.grad])
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, other: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * scale + other.cos() * x + shift


def test_replicated_and_repeated_inputs_get_gradients(pair: PairFactory) -> None:
    both = pair(Scaled)
    values = normal(7, 3)
    found = []
    for module in both:
        x, scale, shift = (t.clone().requires_grad_() for t in (values, torch.tensor(1.3).double(), values[:1]))
        weighted(module(x, x, scale, shift)).backward()
        found.append([x.grad, scale.grad, shift.grad])
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


class Buffered(nn.Module):
    """A buffer and a plain attribute that need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.rand(3).requires_grad_())
        self.shift = torch.rand(3, dtype=torch.float64).requires_grad_()

    def _apply(self, fn: Any, recurse: bool = True) -> Buffered:
        super()._apply(fn, recurse)
        self.scale = self.scale.detach().requires_grad_()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale + self.shift


def test_buffers_and_attributes_that_need_gradients(pair: PairFactory) -> None:
    both = pair(Buffered)
    for n in (7, 4):
        x = normal(n, 3)
        for module in both:
            weighted(module(x)).backward()
    found = [[module.scale.grad, module.shift.grad] for module in both]
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


def test_gradients_flow_through_a_computed_buffer(pair: PairFactory) -> None:
    both = pair(Buffered)
    found = []
    start = torch.rand(3, dtype=torch.float64)
    for module in both:
        hyper = start.clone().requires_grad_()
        for step in range(3):
            module.scale = hyper.exp() * (step + 1)
            weighted(module(normal(7, 3).fill_(0.1 * step))).backward()
        found.append([hyper.grad, module.shift.grad])
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


def first_in_place() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Tanh())


def test_first_layer_in_place(pair: PairFactory) -> None:
    both = pair(first_in_place)
    values = normal(7, 3)
    for module in both:
        weighted(module(values.clone())).backward()
    assert_same_gradients(both, EXACT)


def test_first_layer_in_place_and_an_input_that_needs_a_gradient(pair: PairFactory) -> None:
    both = pair(first_in_place)
    values = normal(7, 3)
    found = []
    for module in both:
        leaf = values.clone().requires_grad_()
        weighted(module(leaf * 1.5)).backward()
        found.append(leaf.grad)
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


class MixedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.tanh(self.layer(x))
        return {"y": y, "same": y, "detached": y.detach(), "best": y.argmax(1), "input": x, "positive": y > 0}


def test_outputs_that_need_no_gradient(pair: PairFactory) -> None:
    both = pair(MixedOutputs)
    x = normal(7, 3)
    outs = [module(x) for module in both]
    assert_same(outs[1], outs[0], EXACT)
    for out in outs:
        (weighted(out["y"]) + weighted(out["same"] * out["detached"])).backward()
    assert_same_gradients(both, EXACT)


def test_frozen_module_returns_outputs_without_a_graph(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    for module in both:
        module.requires_grad_(False)
    assert_same(both.model(x), both.plain(x), EXACT)
    found = []
    for module in both:
        mine = x.clone().requires_grad_()
        weighted(module(mine)).backward()
        found.append(mine.grad)
        assert all(gradient is None for gradient in gradients(module))
    assert_same(found[1], found[0], EXACT)


def test_outputs_may_be_written_in_place(pair: PairFactory) -> None:
    dense, ragged = pair(lambda: nn.Linear(3, 2)), pair(Each)
    x, samples = normal(7, 3), [normal(2 + index % 2, 3) for index in range(5)]
    for linear, listed in zip(dense, ragged, strict=True):
        y = linear(x)
        y.mul_(2).add_(1)
        ys = listed(samples)
        for each in ys:
            each.mul_(3)
        (weighted(y) + sum(each.sin().sum() for each in ys)).backward()
    assert_same_gradients(dense, EXACT)
    assert_same_gradients(ragged, EXACT)
