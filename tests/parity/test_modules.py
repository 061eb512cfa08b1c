"""Unusual modules, and contexts around a call, match the plain module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from .cases import normal, weighted
from .compare import assert_same, assert_same_gradients
from .conftest import Pair, PairFactory
from .models import mlp

EXACT = 1e-12
"""Float64 and a few steps."""


def learn(both: Pair, sizes: tuple[int, ...] = (7, 3, 8, 1), width: int = 3) -> None:
    """Train both modules; assert equal outputs, gradients and state after each step."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in both]
    for size in sizes:
        x = normal(size, width)
        outs = []
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            outs.append(module(x))
            weighted(outs[-1]).backward()
            optimizer.step()
        assert_same(outs[1], outs[0], EXACT, "output")
        assert_same_gradients(both, EXACT)
        assert_same(both.model.state_dict(), both.plain.state_dict(), EXACT, "state")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=["bfloat16", "float16"]
)
def test_autocast(pair: PairFactory, dtype: torch.dtype, tolerance: float) -> None:
    """The sum of each shard is rounded, which changes the last bits of 8 or 11."""
    both = pair(mlp)
    found = []
    x = torch.randn(7, 3)
    for module in both:
        module.float()
        with torch.autocast("cpu", dtype):
            first, second = module(x), module(2 * x)
        weighted(first.float() + second.float()).backward()
        assert first.dtype is dtype
        outside = module(x)  # autocast ends with the block
        found.append([first, second, outside, [p.grad for p in module.parameters()]])
    assert_same(found[1], found[0], tolerance)
    for module in both:  # autocast must not reuse cached casts of old weights
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(3)
    with torch.autocast("cpu", dtype):
        assert_same(both.model(x), both.plain(x), 3 * tolerance)


def test_no_grad(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3).requires_grad_()
    with torch.no_grad():
        outs = [module(x) for module in both]
    assert_same(outs[1], outs[0], EXACT)
    learn(both)


def test_inference_mode(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    with torch.inference_mode():
        outs = [module(x) for module in both]
        inference_outs = [module(normal(7, 3).fill_(0.5)) for module in both]
    assert outs[1].is_inference()
    assert_same(outs[1], outs[0], EXACT)
    assert_same(inference_outs[1], inference_outs[0], EXACT)
    learn(both)
    with torch.inference_mode():
        assert_same(both.model(x), both.plain(x), EXACT)
        inference_tensor = normal(7, 3)
    both.model(inference_tensor.clone())
    with torch.no_grad():
        assert_same(both.model(inference_tensor), both.plain(inference_tensor), EXACT)


class Force(nn.Module):
    """Returns the negative gradient of an energy, so it needs a graph even under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x)
        return -slope


def test_graph_inside_a_call_without_gradients(pair: PairFactory) -> None:
    both = pair(Force)
    x = normal(7, 3)
    with torch.no_grad():
        assert_same(both.model(x), both.plain(x), EXACT)
    assert_same(both.model(x), both.plain(x), EXACT)


class Experts(nn.Module):
    """The samples determine which parameters are used. One is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = x * 0.5
        for expert, chosen in ((self.low, x[:, 0] < 0), (self.high, x[:, 0] > 10)):
            if chosen.any():
                out = out.index_put((chosen.nonzero().squeeze(1),), torch.tanh(expert(x[chosen])))
        return out


@pytest.mark.parametrize("where", ["first", "last", "nowhere", "both"])
def test_parameters_that_only_some_replicas_use(pair: PairFactory, where: str) -> None:
    both = pair(Experts)
    x = normal(7, 3).abs()
    if where in ("first", "both"):
        x[:2, 0] = -1
    if where in ("last", "both"):
        x[6, 0] = 20 if where == "both" else -2
    found = []
    for module in both:
        mine = x.clone().requires_grad_()
        weighted(module(mine)).backward()
        found.append([mine.grad, [parameter.grad for parameter in module.parameters()]])
    assert found[1][1][-1] is None
    assert_same(found[1], found[0], EXACT)


def pruned() -> nn.Module:
    net = mlp()
    prune.l1_unstructured(net[0], "weight", amount=0.4)
    prune.random_unstructured(net[2], "bias", amount=0.4)
    return net


def old_spectral_norm() -> nn.Module:
    norm = torch.nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(3, 6)), nn.Tanh(), norm(nn.Linear(6, 2)))


def new_spectral_norm() -> nn.Module:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(3, 6)), nn.Tanh(), norm(nn.Linear(6, 2)))


def orthogonal() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))


REPARAMETRIZED = [pruned, old_spectral_norm, new_spectral_norm, orthogonal]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("build", REPARAMETRIZED)
def test_reparametrized_layers(pair: PairFactory, build: Callable[[], nn.Module], training: bool) -> None:
    both = pair(lambda: build().train(training))
    learn(both)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("build", REPARAMETRIZED)
def test_reparametrized_layers_keep_the_shape_of_their_weight(
    pair: PairFactory, build: Callable[[], nn.Module]
) -> None:
    """The shards are as large as the first dim of the weight, which must not be taken for a batch."""
    both = pair(build, replicas=2)
    x = normal(2 * both.plain[0].out_features, 3)
    for module in both:
        weighted(module(x)).backward()
    assert_same(both.model[0].weight.detach(), both.plain[0].weight.detach(), EXACT)


def test_recurrent_layer_with_weight_norm(pair: PairFactory) -> None:
    norm = torch.nn.utils.parametrizations.weight_norm
    both = pair(lambda: norm(nn.GRU(3, 4, batch_first=True), "weight_hh_l0"), out_dims={"1": 1})
    for n in (7, 3, 8):
        x = normal(n, 5, 3)
        outs = [module(x) for module in both]
        assert_same(outs[1], outs[0], EXACT, "output")
        for out, last in outs:
            (weighted(out) + weighted(last.transpose(0, 1))).backward()
        assert_same_gradients(both, EXACT)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules(pair: PairFactory) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))

    both = pair(build)
    x = normal(7, 3)
    outs = []
    for module in both:
        torch.default_generator.manual_seed(3)
        outs.append(module(x))
    assert_same(outs[1], outs[0], EXACT)
    learn(both)


class Complex(nn.Module):
    """Complex parameters and a real output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def _apply(self, fn: object, recurse: bool = True) -> Complex:
        for layer in self.layers:  # `double()` does not convert to complex
            layer.to(torch.complex128)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.layers(x.to(torch.complex128))) * self.phase).abs()


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_parameters(pair: PairFactory) -> None:
    learn(pair(Complex))


def test_freezing_and_thawing_a_layer_between_steps(pair: PairFactory) -> None:
    both = pair(mlp)
    learn(both, (7, 4))
    for module in both:
        module[0].requires_grad_(False)
        module.zero_grad()
    learn(both, (7, 4))
    for module in both:
        module[0].requires_grad_(True)
        module[2].weight.requires_grad_(False)
        module.zero_grad()
    learn(both, (7, 4))


def test_replacing_layers_and_weights_between_steps(pair: PairFactory) -> None:
    both = pair(mlp)
    learn(both, (7,))
    for module in both:
        torch.default_generator.manual_seed(5)
        module.add_module("2", nn.Linear(8, 6).double())
        module.append(nn.Linear(2, 2, bias=False).double())
        setattr(module, "4", nn.Linear(6, 2, bias=False).double())
    learn(both, (7, 2))
    state = {name: value * 0.5 for name, value in both.plain.state_dict().items()}
    for module in both:
        module.load_state_dict(state)
        module[0].weight.data = module[0].weight.data.flip(0).contiguous()
        module[0].bias.data.add_(1)
    learn(both, (7, 2))


def test_batch_in_dim_1(pair: PairFactory) -> None:
    both = pair(lambda: nn.GRU(3, 4), dim=1)
    x = normal(5, 7, 3)
    outs = [module(x) for module in both]
    assert_same(outs[1], outs[0], EXACT)
    for out, last in outs:
        (weighted(out.transpose(0, 1)) + weighted(last.transpose(0, 1))).backward()
    assert_same_gradients(both, EXACT)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise ValueError("too large")
        return torch.tanh(self.layer(x))


def test_training_continues_after_a_failed_call(pair: PairFactory) -> None:
    both = pair(Fails)
    learn(both, (7, 2))
    x = normal(7, 3)
    x[4] = 200
    for module in both:
        with pytest.raises(ValueError, match="too large"):
            module(x)
    learn(both, (7, 2))
