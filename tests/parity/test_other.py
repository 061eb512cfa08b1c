"""What one may do with a module's graph beside one backward a forward: the same as with the plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import BridgeError

from .cases import normal, weighted
from .compare import assert_same
from .conftest import Maker, Pair
from .models import mlp

EXACT = 1e-13
"""Float64 and one backward: sums of a few terms in another order."""


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_same_gradients(both: Pair) -> None:
    assert_same(gradients(both.model), gradients(both.plain), EXACT, "gradient")


class TwoHeads(nn.Module):
    """Two outputs from one trunk, and two that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.apart = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.trunk(x))
        return (*(torch.tanh(head(h)) for head in self.heads), *(torch.tanh(layer(x)) for layer in self.apart))


def test_several_forwards_before_one_backward(pair: Maker) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 2, 1, 16)]
    for module in both:
        loss = sum(weighted(module(x)) for x in batches)
        loss.backward()
    assert_same_gradients(both)


def test_backwards_in_another_order_than_their_forwards(pair: Maker) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 5, 6)]
    for module in both:
        losses = [weighted(module(x)) for x in batches]
        for index in (2, 0, 1):
            losses[index].backward()
    assert_same_gradients(both)


def test_output_of_one_call_is_input_of_the_next(pair: Maker) -> None:
    both = pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = normal(7, 3)
    for module in both:
        weighted(module(module(module(x)))).backward()
    assert_same_gradients(both)


@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0), (2, 3), (3, 0)])
def test_backward_of_one_output_then_of_another(pair: Maker, first: int, then: int) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        out = module(x)
        weighted(out[first]).backward(retain_graph=True)
        weighted(out[then]).backward()
    assert_same_gradients(both)


def test_outputs_with_nothing_in_common_need_no_retained_graph(pair: Maker) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        out = module(x)
        weighted(out[2]).backward()
        weighted(out[3]).backward()
        weighted(out[0]).backward()
    assert_same_gradients(both)


def test_second_backward_through_a_freed_graph_raises(pair: Maker) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        out = module(x)
        weighted(out[0]).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weighted(out[1]).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weighted(out[0]).backward()


def test_retained_graph_twice(pair: Maker) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    for module in both:
        loss = weighted(module(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert_same_gradients(both)


def test_autograd_grad(pair: Maker) -> None:
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


def test_backward_to_chosen_inputs(pair: Maker) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        weighted(module(x)[0]).backward(inputs=[module.heads[0].weight])
    assert both.model.trunk.weight.grad is None
    assert_same_gradients(both)


def test_inputs_that_need_gradients(pair: Maker) -> None:
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
    assert_same_gradients(both)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, other: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * scale + other.cos() * x + shift


def test_whole_inputs_and_repeated_ones_get_their_gradients(pair: Maker) -> None:
    both = pair(Scaled)
    values = normal(7, 3)
    found = []
    for module in both:
        x, scale, shift = (t.clone().requires_grad_() for t in (values, torch.tensor(1.3).double(), values[:1]))
        weighted(module(x, x, scale, shift)).backward()
        found.append([x.grad, scale.grad, shift.grad])
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both)


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


def test_buffers_and_attributes_that_need_gradients(pair: Maker) -> None:
    both = pair(Buffered)
    for n in (7, 4):
        x = normal(n, 3)
        for module in both:
            weighted(module(x)).backward()
    found = [[module.scale.grad, module.shift.grad] for module in both]
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both)


def test_buffer_that_was_computed_leads_further(pair: Maker) -> None:
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
    assert_same_gradients(both)


def first_in_place() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Tanh())


def test_first_layer_in_place(pair: Maker) -> None:
    both = pair(first_in_place)
    values = normal(7, 3)
    for module in both:
        weighted(module(values.clone())).backward()
    assert_same_gradients(both)


def test_first_layer_in_place_and_an_input_that_needs_a_gradient(pair: Maker) -> None:
    both = pair(first_in_place)
    values = normal(7, 3)
    found = []
    for module in both:
        leaf = values.clone().requires_grad_()
        weighted(module(leaf * 1.5)).backward()
        found.append(leaf.grad)
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both)


class SomeNeedNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.tanh(self.layer(x))
        return {"y": y, "same": y, "detached": y.detach(), "best": y.argmax(1), "input": x, "positive": y > 0}


def test_outputs_that_need_no_gradient(pair: Maker) -> None:
    both = pair(SomeNeedNone)
    x = normal(7, 3)
    outs = [module(x) for module in both]
    assert_same(outs[1], outs[0], EXACT)
    for out in outs:
        (weighted(out["y"]) + weighted(out["same"] * out["detached"])).backward()
    assert_same_gradients(both)


def test_frozen_module_gives_outputs_without_graph(pair: Maker) -> None:
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


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, samples: list[Tensor]) -> list[Tensor]:
        return [self.layer(sample) for sample in samples]


def test_outputs_may_be_written_in_place(pair: Maker) -> None:
    dense, ragged = pair(lambda: nn.Linear(3, 2)), pair(Ragged)
    x, samples = normal(7, 3), [normal(2 + index % 2, 3) for index in range(5)]
    for whole, listed in zip(dense, ragged, strict=True):
        y = whole(x)
        y.mul_(2).add_(1)
        ys = listed(samples)
        for each in ys:
            each.mul_(3)
        (weighted(y) + sum(each.sin().sum() for each in ys)).backward()
    assert_same_gradients(dense)
    assert_same_gradients(ragged)


def test_hooks_and_retained_gradients_of_outputs(pair: Maker) -> None:
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
    assert_same_gradients(both)


def test_gradients_accumulate_over_batches(pair: Maker) -> None:
    both = pair(mlp)
    for n in (7, 3, 1):
        x = normal(n, 3)
        for module in both:
            weighted(module(x)).backward()
    assert_same_gradients(both)
    for module in both:
        module.zero_grad(set_to_none=False)
        weighted(module(x)).backward()
    assert_same_gradients(both)


def test_parameter_hooks_fire_once_with_the_whole_gradient(pair: Maker) -> None:
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
    assert_same_gradients(both)


def test_parameter_hooks_do_not_fire_without_a_gradient(pair: Maker) -> None:
    both = pair(TwoHeads)
    x = normal(7, 3)
    for module in both:
        for layer in (*module.heads, *module.apart):
            layer.weight.register_hook(lambda gradient: gradient * 2)
            layer.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        weighted(module(x)[0]).backward()
        weighted(module(x)[3]).backward()
    assert_same_gradients(both)


def test_optimizer_that_steps_inside_the_backward(pair: Maker) -> None:
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


def test_no_sync_brings_gradients_home_on_the_way_out(pair: Maker) -> None:
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
    assert_same_gradients(both)
    for module in both:  # outside, everything is as before
        weighted(module(batches[0])).backward()
    assert_same_gradients(both)


def test_no_sync_leaves_gradients_on_the_replicas(threads_pair: Maker) -> None:
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
    assert_same_gradients(both)


def test_step_between_forward_and_backward_raises(pair: Maker) -> None:
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
        weighted(module(x)).backward()  # and the next call is sound
    assert_same_gradients(both)


def test_write_after_the_last_use_does_not_raise(pair: Maker) -> None:
    both = pair(lambda: nn.Linear(3, 2))
    x = normal(7, 3)
    for module in both:
        loss = weighted(module(x))
        with torch.no_grad():
            module.weight.mul_(2)  # no gradient of x is asked for: nothing needs the weight again
        loss.backward()
    assert_same_gradients(both)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain-input", "input-needs-grad"])
def test_input_written_between_forward_and_backward_raises(pair: Maker, needs_grad: bool) -> None:
    both = pair(mlp)
    for module in both:
        x = normal(7, 3).requires_grad_(needs_grad)
        loss = weighted(module(x))
        with torch.no_grad():
            x[6] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        module.zero_grad()


def test_input_in_a_list_written_between_forward_and_backward_raises(pair: Maker) -> None:
    for module in pair(Ragged):
        samples = [normal(2 + index % 2, 3) for index in range(5)]
        loss = sum(y.sin().sum() for y in module(samples))
        samples[4].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_deepcopy_in_the_middle_of_training(pair: Maker) -> None:
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


def test_double_backward_on_the_serial_engine(serial_pair: Maker) -> None:
    both = serial_pair(mlp)
    x = normal(7, 3)
    losses = [penalty(module, x) for module in both]
    for loss in losses:
        loss.backward()
    assert_same(losses[1], losses[0], EXACT)
    assert_same_gradients(both)


def test_double_backward_on_the_threads_engine_names_the_ways_out(threads_pair: Maker) -> None:
    both = threads_pair(mlp)
    with pytest.raises(BridgeError, match=r"model\.call\('penalty'(.|\n)*engine='serial'"):
        penalty(both.model, normal(7, 3))
    x = normal(7, 3)
    for module in both:
        weighted(module(x)).backward()
    assert_same_gradients(both)


class Inner(nn.Module):
    """Takes gradients inside: of its input for a penalty, and of its weight for a sum of squared slopes."""

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


def test_gradient_penalty_inside_the_module(pair: Maker) -> None:
    both = pair(Inner)
    x = normal(7, 3)
    losses = [both.plain.penalty(x), both.model.call("penalty", x)]
    assert_same(losses[1], losses[0], EXACT)
    for loss in losses:
        loss.mean().backward()
    assert_same_gradients(both)


def test_gradient_of_a_weight_inside_the_module(pair: Maker) -> None:
    both = pair(Inner, merge="sum")
    x = normal(7, 3)
    slopes = [both.plain.slopes(x), both.model.call("slopes", x)]
    assert_same(slopes[1], slopes[0], EXACT)
    for slope in slopes:
        slope.square().sum().backward()
    assert_same_gradients(both)
