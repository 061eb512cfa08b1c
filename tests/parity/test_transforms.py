"""torch.func transforms around and inside a call, and other ways to differentiate, match the plain module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

from instep.errors import BridgeError

from .cases import normal, weighted
from .compare import assert_same, assert_same_gradients
from .conftest import PairFactory
from .models import mlp

EXACT = 1e-12


def weights_of(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def functional_grad(module: Any, x: Tensor) -> Any:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        return weighted(torch.func.functional_call(module, weights, (x,)))

    return torch.func.grad(loss)(weights_of(module))


def functional_jvp(module: Any, x: Tensor) -> Any:
    return torch.func.jvp(lambda value: module(value), (x,), (x.cos(),))


def functional_vmap(module: Any, x: Tensor) -> Any:
    return torch.func.vmap(lambda shift: module(x + shift))(torch.arange(3.0, dtype=x.dtype))


def dual_numbers(module: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(x, x.cos())))
        assert tangent is not None
        return primal.detach(), tangent.detach()


def dual_numbers_without_a_graph(module: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return dual_numbers(module, x)


@pytest.mark.parametrize(
    "transform", [functional_grad, functional_jvp, functional_vmap, dual_numbers, dual_numbers_without_a_graph]
)
def test_transform_around_the_call(pair: PairFactory, transform: Callable[[Any, Tensor], Any]) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    both.model(x)  # create the replicas first
    found = [transform(module, x) for module in both]
    assert_same(found[1], found[0], EXACT)
    assert_same(both.model(x), both.plain(x), EXACT)


class PerSample(nn.Module):
    """Computes per-sample gradients with transforms in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
            return torch.func.functional_call(self.net, weights, (sample[None],)).sin().sum()

        weights = dict(self.net.named_parameters())
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        return {name.replace(".", "_"): value for name, value in found.items()}


def test_transforms_inside_the_module(pair: PairFactory) -> None:
    both = pair(PerSample)
    x = normal(7, 3)
    found = [module(x) for module in both]
    assert_same(found[1], found[0], EXACT)
    for per_sample in found:
        sum(weighted(value) for value in per_sample.values()).backward()
    assert_same_gradients(both, EXACT)


def test_functional_call_uses_the_given_weights(pair: PairFactory) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 4)]
    found = []
    for module in both:
        leaves = {name: value.requires_grad_() for name, value in weights_of(module).items()}
        weights = {name: 2 * value for name, value in leaves.items()}
        outs = [torch.func.functional_call(module, weights, (x,)) for x in batches]
        sum(weighted(out) for out in outs).backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        own = module(batches[0])
        weighted(own).backward()
        found.append([outs, own, [leaf.grad for leaf in leaves.values()], [p.grad for p in module.parameters()]])
    assert_same(found[1], found[0], EXACT)


def test_jacobian(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(4, 3)
    assert_same(jacobian(both.model, x), jacobian(both.plain, x), EXACT)


def test_jacobian_in_one_batched_backward(serial_pair: PairFactory) -> None:
    both = serial_pair(mlp)
    x = normal(4, 3)
    assert_same(jacobian(both.model, x, vectorize=True), jacobian(both.plain, x, vectorize=True), EXACT)


def test_batched_backward_on_the_threads_engine_raises_and_names_serial(threads_pair: PairFactory) -> None:
    with pytest.raises(BridgeError, match="serial"):
        jacobian(threads_pair(mlp).model, normal(4, 3), vectorize=True)


def test_saved_tensors_hooks_see_what_replicas_save(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    for module in both:
        packed: list[Tensor] = []

        def pack(tensor: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(tensor)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = module(x)
        assert packed
        weighted(out).backward()
    assert_same_gradients(both, EXACT)


class Refuses(torch.autograd.Function):
    """Raises in its backward if a gradient is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if (gradient.abs() > 50).any():
            raise KeyError("too steep")
        return gradient


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Refuses.apply(torch.tanh(self.layer(x)))


def test_a_failed_backward_adds_no_gradients(pair: PairFactory) -> None:
    both = pair(Steep)
    x = normal(7, 3)
    for module in both:
        weighted(module(x)).backward()
        with pytest.raises(KeyError, match="too steep"):
            (module(x)[6] * 100).sum().backward()
        weighted(module(x)).backward()
    assert_same_gradients(both, EXACT)


def built_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return mlp().double()


def test_module_of_inference_tensors(pair: PairFactory) -> None:
    both = pair(built_in_inference_mode)
    x = normal(7, 3)
    with torch.inference_mode():
        assert_same(both.model(x), both.plain(x), EXACT)
    with torch.no_grad():
        assert_same(both.model(x), both.plain(x), EXACT)


class GivenWeight(nn.Module):
    """Takes a weight, which may be its own, and returns weights and inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return torch.tanh(x @ weight.T) + self.layer(x), self.layer.weight, 2 * weight, x


def test_parameters_as_arguments_and_as_outputs(pair: PairFactory) -> None:
    both = pair(GivenWeight, in_dims={"weight": None}, out_dims={"1": None, "2": None})
    values = normal(7, 3)
    found = []
    for module in both:
        x = nn.Parameter(values.clone())
        out = module(x, module.layer.weight)
        sum((index + 1) * value.sin().sum() for index, value in enumerate(out)).backward()
        found.append([[value.detach() for value in out], x.grad, [parameter.grad for parameter in module.parameters()]])
    assert_same(found[1], found[0], EXACT)


def test_empty_batch(pair: PairFactory) -> None:
    both = pair(mlp)
    for n in (7, 0, 2):
        outs = [module(normal(n, 3).fill_(0.2)) for module in both]
        assert_same(outs[1], outs[0], EXACT)
        for out in outs:
            out.sum().backward()
    assert_same_gradients(both, EXACT)
