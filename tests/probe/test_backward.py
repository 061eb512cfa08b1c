"""A backward of the user's own is tried on a few samples, in parts and together, as forward is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

pytestmark = pytest.mark.usefixtures("one_core")
# what forward notes in a list is seen in this process only
each_engine = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
SIZES: list[int] = []


class Reversed(torch.autograd.Function):
    """The gradient turned round, for each sample by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient, None


class Normed(torch.autograd.Function):
    """The gradient divided by its norm, over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm(), None


class Quantised(torch.autograd.Function):
    """Rounds to steps that are learned; their gradient is scaled by the number of elements, as LSQ does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient, (gradient * ((x / scale).round() - x / scale)).sum() / x.numel() ** 0.5


class Net(nn.Module):
    def __init__(self, function: Any, loss: str = "none") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.function, self.loss = function, loss

    def forward(self, x: Tensor) -> Any:
        SIZES.append(len(x))
        out = self.last(self.norm(self.function.apply(self.first(x), self.scale)))
        if self.loss == "none":
            return {"out": out, "hidden": [out.T.sin()]}
        return out.square().mean() if self.loss == "mean" else out.square().sum()


def steps(model: Any, batches: list[Tensor]) -> list[Any]:
    found = []
    for x in batches:
        model.zero_grad()
        out = model(x)
        loss = out["out"].square().sum() + out["hidden"][0].mean() if isinstance(out, dict) else out
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return found


def twins(function: Any, loss: str) -> tuple[Net, Net, list[Tensor]]:
    plain = Net(function, loss).double()
    return plain, copy.deepcopy(plain), [torch.randn(7, 4, dtype=torch.float64) for _ in range(3)]


@each_engine
@pytest.mark.parametrize("loss", ["none", "mean", "sum"])
@pytest.mark.parametrize("function", [Normed, Quantised])
def test_a_backward_that_looks_at_the_whole_batch_runs_on_one_device(engine: str, loss: str, function: Any) -> None:
    plain, net, batches = twins(function, loss)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        with pytest.warns(UserWarning, match=rf"backward of {function.__name__} gives parts of a batch other"):
            mine = steps(model, batches[:1])
        mine += steps(model, batches[1:])  # said once: a second warning is an error here
        torch.testing.assert_close(mine, steps(plain, batches))
        SIZES.clear()
        with torch.no_grad():
            model(batches[0])
        assert sorted(SIZES) == ([3] if engine == "processes" else [2, 2, 3])  # a worker notes its own


@each_engine
@pytest.mark.parametrize("loss", ["none", "mean", "sum"])
def test_one_that_looks_at_each_sample_runs_on_all(engine: str, loss: str) -> None:
    plain, net, batches = twins(Reversed, loss)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        SIZES.clear()
        torch.testing.assert_close(steps(model, batches), steps(plain, batches))
        assert SIZES.count(7) == 3  # the plain module's


def test_where_it_cannot_be_tried_the_call_goes_on() -> None:
    def pick(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x) == 5:
            raise RuntimeError("not with five")
        return Normed.apply(self.first(x), self.scale)  # type: ignore[no-any-return]

    _, net, batches = twins(Normed, "none")
    net.__class__ = type("Picky", (Net,), {"forward": pick})
    with instep.DataParallel(net, ["cpu"] * 3, engine="serial") as model:
        assert model(batches[0]).shape == (7, 5)


def test_gradients_are_tried_once_without_side_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.probe import probe

    made: list[bool] = []
    real: Callable[..., bool] = probe.are_gradients_additive

    def counted(*args: Any) -> bool:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(probe, "are_gradients_additive", counted)
    plain, net, batches = twins(Reversed, "mean")
    with instep.DataParallel(net, ["cpu"] * 3, engine="threads") as model:
        state = torch.get_rng_state()
        for x in batches:
            model(x).backward()
        assert torch.equal(state, torch.get_rng_state())
    with instep.DataParallel(nn.Linear(4, 2).double(), ["cpu"] * 3, engine="threads") as model:
        model(batches[0])
    assert made == [True]
    for x in batches:
        plain(x).backward()
    torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
    torch.testing.assert_close(net.first.weight.grad, plain.first.weight.grad)


class Critic(nn.Module):
    """A Wasserstein critic with the gradient penalty of WGAN-GP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1).to(real) * 0 + 0.3
        x = share * real + (1 - share) * fake
        x = x if x.requires_grad else x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(2, 1) - 1).square().mean()

    def total(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope.square().sum()

    def spread(self, x: Tensor) -> Tensor:
        return self.net(x).std()


@each_engine
def test_a_gradient_penalty_gets_a_verdict(engine: str) -> None:
    """A trial runs with gradients enabled if `forward` takes gradients itself."""
    net = Critic().double()
    plain = copy.deepcopy(net)
    real, fake = torch.randn(7, 3).double(), torch.randn(7, 3).double()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for critic in (model, plain):
            loss = critic(fake).mean() - critic(real).mean()
            penalty = critic.penalty if critic is plain else functools.partial(model.call, "penalty")
            (loss + 10 * penalty(real, fake)).backward()
        binding = model._instep_runner.binding("penalty")
        assert [verdict.description for verdict in binding.probe.last_record.outputs.values()] == [
            "mean weighted by samples"
        ]
        x = torch.randn(7, 3).double().requires_grad_()
        torch.testing.assert_close(model.call("total", x), plain.total(x))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_methods_have_rules_of_their_own() -> None:
    net, x = Critic(), torch.randn(7, 3)
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine="serial", merge="first") as model,
        pytest.raises(instep.MergeError, match=r"methods=\{'spread': \{'merge': \.\.\.\}\}"),
    ):
        model.call("spread", x)
    rules = {"spread": {"merge": "max"}, "total": {"in_dims": {"x": 0}}}
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", methods=rules) as model:
        assert model.spread(x) == max(net.spread(x[:4]), net.spread(x[4:]))
        torch.testing.assert_close(model(x), net(x))
        torch.testing.assert_close(model.total(x.requires_grad_()), net.total(x))
    for wrong in ({"spread": "max"}, {"spread": {"state": {}}}):
        with pytest.raises(instep.WrapError, match="with the options of this method: in_dims, out_dims, merge"):
            instep.DataParallel(net, ["cpu"] * 2, methods=wrong)
