"""Ranks that do different things all get an error that names them, and are in step again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import instep
from instep.errors import CollectiveError, RankFailure, StateError

from ..in_ranks import DEVICE
from .conftest import Wrap

RANK, COUNT = dist.get_rank(), dist.get_world_size()
LAST = COUNT - 1

pytestmark = pytest.mark.skipif(COUNT == 1, reason="one rank agrees with itself")


@pytest.fixture(autouse=True)
def in_step_afterwards(wrap: Wrap) -> Iterator[None]:
    """After each test the ranks can work together."""
    yield
    torch.manual_seed(0)
    model = wrap(nn.Linear(3, 2))
    x = torch.ones(2 * COUNT, 3, device=DEVICE)
    torch.testing.assert_close(model(x), model.module(x))


def linear(wrap: Wrap, calls: int = 4) -> tuple[instep.DataParallel, Tensor]:
    """A wrapper that was called a few times, so that not every call is checked, and a batch."""
    model, x = wrap(nn.Linear(3, 2)), torch.randn(2 * COUNT, 3).to(DEVICE)
    for _ in range(calls):
        model(x)
    return model, x


def test_other_batches(wrap: Wrap) -> None:
    model, x = wrap(nn.Linear(3, 2)), torch.randn(2 * COUNT, 3).to(DEVICE)
    with pytest.raises(RankFailure, match=f"rank 0 and rank {LAST} were called with different batches"):
        model(x + (RANK == LAST))


def test_a_distributed_sampler_is_named(wrap: Wrap) -> None:
    model = wrap(nn.Linear(3, 2))
    dataset = TensorDataset(torch.randn(8 * COUNT, 3))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    with pytest.raises(RankFailure, match=r"This script has a DistributedSampler.*take it out, or write"):
        model(next(iter(loader))[0])


def test_other_sizes(wrap: Wrap) -> None:
    model, x = linear(wrap)
    message = rf"out of step:\n(.*\n)*.*with a batch of {2 * COUNT}\n.*with a batch of {2 * COUNT - 1}"
    with pytest.raises(RankFailure, match=message):
        model(x[RANK == LAST :])


def test_another_method(wrap: Wrap) -> None:
    class Two(nn.Linear):
        def other(self, x: Tensor) -> Tensor:
            return self(x) * 2

    model, x = wrap(Two(3, 2)), torch.randn(2 * COUNT, 3).to(DEVICE)
    with pytest.raises(
        RankFailure, match=r"(?s)call 1 of Two \(wrapper \d+\), in.*call 1 of Two \(wrapper \d+\)\.other"
    ):
        model.call("other" if RANK == LAST else "forward", x)


def test_another_structure(wrap: Wrap) -> None:
    model, x = wrap(nn.Identity()), torch.randn(2 * COUNT, 3).to(DEVICE)
    with pytest.raises(RankFailure, match="different batches"):
        model([x] if RANK == LAST else x)


def test_one_rank_evaluates(wrap: Wrap) -> None:
    model, x = linear(wrap)
    with torch.set_grad_enabled(RANK != LAST), pytest.raises(RankFailure, match="without gradients, with a batch"):
        model(x)


def test_one_rank_calls_another_wrapper(wrap: Wrap) -> None:
    first, x = linear(wrap)
    second, _ = linear(wrap)
    with pytest.raises(RankFailure, match=r"(?s)out of step:\n  rank.*Linear \(wrapper.*Linear \(wrapper"):
        (second if RANK == LAST else first)(x)


def test_another_random_state(wrap: Wrap) -> None:
    model, x = linear(wrap)
    if RANK == LAST:
        torch.rand(1)
    with pytest.raises(RankFailure, match=f"rank 0 and rank {LAST} have different random states"):
        model(x)


def test_other_parameters(wrap: Wrap) -> None:
    model, x = wrap(nn.Linear(3, 2)), torch.randn(2 * COUNT, 3).to(DEVICE)
    if RANK == LAST:
        with torch.no_grad():
            model.module.weight.add_(1)
    with pytest.raises(RankFailure, match=f"rank 0 and rank {LAST} have different parameters or buffers"):
        model(x)


def test_another_loss(wrap: Wrap) -> None:
    model, x = linear(wrap)
    loss = model(x).square().sum() * (2 if RANK == LAST else 1)
    with pytest.raises(RankFailure, match="compute different losses from the same outputs"):
        loss.backward()
    assert model.module.weight.grad is None


def test_one_rank_goes_on_to_the_next_forward(wrap: Wrap) -> None:
    model, x = linear(wrap)
    loss = model(x).sum()
    go_on = partial(model, x) if RANK == LAST else loss.backward
    with pytest.raises(RankFailure, match=r"(?s)out of step:.*backward of forward 5.*forward 6"):
        go_on()


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_other_trainable_parameters(wrap: Wrap, known: bool) -> None:
    """Also if ranks have reduced the gradients of both sets of parameters before, through memory."""
    model, x = wrap(nn.Linear(3, 2)), torch.randn(2 * COUNT, 3).to(DEVICE)

    def backward(frozen: bool) -> None:
        model.module.bias.requires_grad_(not frozen)
        model.zero_grad()
        model(x).sum().backward()

    for frozen in (False, True, False, True) if known else (False, False):
        backward(frozen)
    message = r"different parameters: 2 and 1 of them require a gradient\.\nSet requires_grad"
    with pytest.raises(RankFailure, match=message):
        backward(frozen=RANK == LAST)
    for frozen in (False, True, False):
        backward(frozen)
        expected = x.sum(0).expand(2, 3)
        torch.testing.assert_close(model.module.weight.grad, expected)


def test_other_trainable_layers_of_the_same_shape(wrap: Wrap) -> None:
    """Their gradients would be added up."""
    model, x = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), torch.randn(2 * COUNT, 3).to(DEVICE)

    def backward(frozen: int) -> None:
        for number, layer in enumerate(model.module):
            layer.requires_grad_(number != frozen)
        model.zero_grad()
        model(x).sum().backward()

    backward(0), backward(1)
    with pytest.raises(RankFailure, match="different parameters: 2 and 2 of them require a gradient"):
        backward(int(RANK == LAST))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_modules(wrap: Wrap) -> None:
    with pytest.raises(RankFailure, match="wrap different modules: 'weight' is the first parameter or buffer that"):
        wrap(nn.Linear(3, 2 + (RANK == LAST)))


def test_other_versions(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        if RANK == LAST:
            patch.setattr(torch, "__version__", "2.0.0")
        with pytest.raises(RankFailure, match=rf"rank 0 has torch .* and rank {LAST} has torch 2\.0\.0 and instep"):
            wrap(nn.Linear(3, 2))


class FailsOn(nn.Module):
    """Raises for samples with a negative value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if (x < 0).any():
            raise KeyError("negative")
        return self.layer(x)


def test_an_error_on_one_rank_keeps_its_type(wrap: Wrap) -> None:
    model, x = wrap(FailsOn(), probe=False), torch.ones(2 * COUNT, 3, device=DEVICE)
    x[-1] = -1
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="negative") as caught:
        model(x)
    assert f"raised in rank {LAST}" in caught.value.__notes__[-1]
    assert model.module.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    model(x.abs())
    assert model.module.calls == 1


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if (grad == 0).any():
            raise ZeroDivisionError
        return grad


class FailsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Divides.apply(self.layer(x))


def test_an_error_in_one_backward(wrap: Wrap) -> None:
    model, x = wrap(FailsInBackward(), probe=False), torch.ones(2 * COUNT, 3, device=DEVICE)
    weights = torch.ones(2 * COUNT, 1, device=DEVICE)
    weights[-1] = 0
    with pytest.raises(ZeroDivisionError):
        (model(x) * weights).sum().backward()
    assert model.module.layer.weight.grad is None
    model(x).sum().backward()


class Collective(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            return instep.all_reduce(x, "sum")
        return x


def test_a_collective_that_one_rank_calls(wrap: Wrap) -> None:
    model, x = wrap(Collective(), probe=False), torch.ones(2 * COUNT, 3, device=DEVICE)
    x[-1] = -1
    with pytest.raises(CollectiveError, match=f"rank {LAST} called all_reduce.*and rank 0 ended without it"):
        model(x)


class SometimesUnusual(nn.Module):
    """Has an effect that only its own rank can see, where a sample is negative."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.layer, self.effect, self.log = nn.Linear(3, 2), effect, [[0]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if (x < 0).any():
            if self.effect == "retain_grad":
                y.retain_grad()
            elif self.effect == "append":
                self.log[0].append(1)
            else:
                with torch.no_grad():
                    self.layer.weight.mul_(2)
        return y


@pytest.mark.filterwarnings("ignore:calls run on one device")
@pytest.mark.parametrize("ordinary_calls", [0, 6])
@pytest.mark.parametrize(("effect", "error"), [("retain_grad", ""), ("append", "log"), ("write", r"layer\.weight")])
def test_an_effect_on_one_rank(wrap: Wrap, effect: str, error: str, ordinary_calls: int) -> None:
    model, x = wrap(SometimesUnusual(effect), probe=False), torch.ones(2 * COUNT, 3, device=DEVICE)
    for _ in range(ordinary_calls):
        model(x).sum().backward()
    x[-1] = -1
    if error:
        with pytest.raises(StateError, match=error):
            model(x)
    else:
        torch.testing.assert_close(model(x), model.module.layer(x))
    if effect != "write":  # in place, as the message says: the weight is no longer that of the other ranks
        torch.testing.assert_close(model(x.abs()), model.module.layer(x.abs()))


@pytest.mark.skipif(COUNT < 3, reason="needs an idle rank beside two others")
@pytest.mark.parametrize("other", ["nothing", "all_gather"])
def test_different_collectives_beside_an_idle_rank(wrap: Wrap, other: str) -> None:
    class Mismatched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x < 0).any():
                return instep.all_reduce(x, "sum")
            return x if other == "nothing" else instep.all_gather(x)[: len(x)]

    model, x = wrap(Mismatched(), probe=False), torch.tensor([[1.0], [-1.0]], device=DEVICE)
    with pytest.raises(CollectiveError):
        model(x)


class ReducesInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(Divides.apply(y + instep.all_reduce(y.sum())))


def test_a_failed_backward_leaves_no_gradients(wrap: Wrap) -> None:
    torch.manual_seed(0)
    plain = ReducesInForward().to(DEVICE)
    model, x = wrap(plain, probe=False), torch.randn(2 * COUNT, 3).to(DEVICE)
    weights = torch.ones(2 * COUNT, 1, device=DEVICE)
    weights[:2] = 0
    with pytest.raises((ZeroDivisionError, CollectiveError)):
        (model(x) * weights).sum().backward()
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_numpy_batches(wrap: Wrap) -> None:
    model, x = wrap(FromNumpy()), np.ones((2 * COUNT, 3), np.float32)
    with pytest.raises(RankFailure, match="different batches"):
        model(x * (1 + (RANK == LAST)))


class FromNumpy(nn.Module):
    def forward(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x)


@pytest.mark.filterwarnings("ignore:calls run on one device")
def test_a_hook_on_one_rank(wrap: Wrap) -> None:
    model, x = wrap(nn.Sequential(nn.Linear(3, 2))), torch.ones(2 * COUNT, 3, device=DEVICE)
    if RANK == LAST:
        model.module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RankFailure, match=r"call 1 of Sequential .* on one device, because the module has hooks"):
        model(x)


def test_an_exit_on_one_rank(wrap: Wrap) -> None:
    class Exits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x < 0).any():
                raise SystemExit(3)
            return x

    model, x = wrap(Exits(), probe=False), torch.ones(2 * COUNT, 3, device=DEVICE)
    x[-1] = -1
    with pytest.raises(SystemExit):
        model(x)
