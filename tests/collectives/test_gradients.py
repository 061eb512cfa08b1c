"""Gradients through collectives equal those of one device."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep

from ..replica_helpers import (
    ENGINE_MODES,
    FunctionModule,
    assert_close,
    assert_same_gradients,
    batch,
    check,
    replicated,
    train,
    weighted_loss,
)

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)
each_engine = pytest.mark.parametrize("way", ["serial", "threads", "processes"])


@each_way
def test_replicas_that_do_not_use_the_gathered_tensor(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        everything = instep.all_gather(self.other(x))
        z = self.layer(x)
        return z + everything.sum(0) if instep.replica().index == 1 else z

    def plain_body(self: Any, x: Tensor) -> Tensor:
        mask = torch.tensor([0.0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)[:, None]
        return self.layer(x) + mask * self.other(x).sum(0)

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        plain.body = plain_body
        assert_close(train(model, x), train(plain, x))
        assert_same_gradients(model, plain)


@each_way
def test_replicas_that_use_different_gathers(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        gathered = [instep.all_gather(self.layer(x)), instep.all_gather(self.other(x)), instep.all_gather(x * 1)]
        return self.layer(x) + gathered[instep.replica().index].mean()

    def plain_body(self: Any, x: Tensor) -> Tensor:
        means = torch.stack([self.layer(x).mean(), self.other(x).mean(), x.mean()])
        return self.layer(x) + means[[0, 0, 0, 1, 1, 2, 2]][:, None]

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        plain.body = plain_body
        assert_close(train(model, x), train(plain, x))
        assert_same_gradients(model, plain)


@each_way
def test_inputs_that_were_detached_on_some_replicas(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.other(x)
        return self.layer(x) + instep.all_gather(z.detach() if instep.replica().index == 0 else z).sum(0)

    def plain_body(self: Any, x: Tensor) -> Tensor:
        z = self.other(x)
        return self.layer(x) + z[:3].detach().sum(0) + z[3:].sum(0)

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        plain.body = plain_body
        assert_close(train(model, x), train(plain, x))
        assert_same_gradients(model, plain)


@each_way
def test_an_unused_tensor_gets_no_gradient(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        instep.all_gather(self.other(x))
        return self.layer(x)

    check(body, way)


@each_way
def test_a_gathered_constant_requires_no_grad(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        assert not instep.all_gather(x).requires_grad
        assert not instep.all_reduce(x.sum(0)).requires_grad
        return self.layer(x) * instep.all_gather(x).sum()

    check(body, way)


@each_way
def test_outputs_differentiated_one_after_another(way: str) -> None:
    """Each output has its own gather; the first backward must not use up the second's graph."""

    def body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x), self.other(x)
        return one * instep.all_gather(one).sum(), two * instep.all_gather(two).mean()

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        for each in (plain, model):
            one, two = each(x)
            weighted_loss(two).backward()
            weighted_loss(one).backward()
        assert_same_gradients(model, plain)
        one, two = model(x)
        weighted_loss(one).backward(inputs=[one])
        weighted_loss(one + two).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weighted_loss(one).backward()


@each_way
def test_a_backward_of_one_output_reaches_the_collectives_of_all_replicas(way: str) -> None:
    """Only replica 0 uses the second gather, and only replica 1's part of it comes from the first."""

    def body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one, index = self.layer(x).tanh(), instep.replica().index
        first = instep.all_gather(one)
        base = first.sum(0) if index == 1 else self.other(x).tanh().sum(0)
        second = instep.all_gather(base[None])
        return (one + second.sum(0) if index == 0 else one), self.other(x)

    def plain_body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x).tanh(), self.other(x).tanh()
        total = two[:3].sum(0) + one.sum(0) + two[5:].sum(0)
        mask = torch.tensor([1.0, 1, 1, 0, 0, 0, 0], dtype=torch.float64)[:, None]
        return one + mask * total, self.other(x)

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        plain.body = plain_body
        for each in (plain, model):
            used, unused = each(x)
            weighted_loss(used).backward()
        assert_same_gradients(model, plain)
        weighted_loss(unused).backward()


@each_way
def test_retained_graphs_and_gradients_of_inputs(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) @ instep.all_gather(self.layer(x).tanh()).T

    x = batch().requires_grad_()
    with replicated(FunctionModule(body), way) as (plain, model):
        got = []
        for each in (plain, model):
            out = each(x)
            weighted_loss(out).backward(retain_graph=True)
            (grad,) = torch.autograd.grad(weighted_loss(out), x)
            got.append(grad)
        assert_close(got[1], got[0])
        assert_same_gradients(model, plain)


@each_way
def test_several_forwards_before_one_backward(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) * instep.all_reduce(self.other(x).sum(0))

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x) + each(2 * x).flip(0)).backward()
        assert_same_gradients(model, plain)


@each_way
def test_without_gradients_and_in_inference_mode(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) - instep.all_reduce(self.layer(x).mean(0), "mean") + instep.all_gather(x).sum()

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(model(x), plain(x))


@each_way
def test_no_grad_collectives_detach_on_one_device_too(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            others = instep.all_gather({"z": self.layer(x)})["z"].sum(0)
            total = instep.all_reduce(self.layer.weight, "max") + instep.all_reduce(self.other.weight, "min")
        return self.layer(x) * others + total.sum()

    check(body, way)


@each_way
def test_gradients_under_no_sync(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) * instep.all_reduce(self.other(x).sum(0))

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        with model.no_sync():
            for _ in range(2):
                train(model, x)
        for _ in range(2):
            train(plain, x)
        assert_same_gradients(model, plain)


@each_way
def test_under_autocast(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        assert z.dtype == torch.bfloat16
        return z.float() + instep.all_gather(z).float().sum(0)

    x = torch.randn(7, 3)
    with replicated(FunctionModule(body).float(), way) as (plain, model), torch.autocast("cpu", torch.bfloat16):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad, rtol=0.05, atol=0.05)


def penalised(self: Any, x: Tensor) -> Tensor:
    """A penalty on a gradient that passes through a collective, differentiated again."""
    x = x.detach().requires_grad_()
    z = self.layer(x).tanh() * instep.all_reduce(self.other(x).tanh().sum(0))
    (grad,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return grad.square().sum(1)


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_a_gradient_taken_inside_forward(way: str) -> None:
    check(penalised, way)


@pytest.mark.parametrize("way", ["serial", "joint"])
def test_a_gradient_taken_inside_forward_is_an_error_in_a_joint_graph(way: str) -> None:
    with (
        replicated(FunctionModule(penalised), way) as (_, model),
        pytest.raises(instep.CollectiveError, match="taken inside forward"),
    ):
        model(batch())


def test_double_backward_on_serial() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * instep.all_reduce(self.other(x).tanh().sum(0))

    x = batch().requires_grad_()
    with replicated(FunctionModule(body), "serial") as (plain, model):
        for each in (plain, model):
            (grad,) = torch.autograd.grad(weighted_loss(each(x)), x, create_graph=True)
            grad.square().sum().backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_collectives_in_a_checkpointed_region(way: str, reentrant: bool) -> None:
    def region(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x).tanh()
        return z * instep.all_gather(z).sum(0)

    def body(self: Any, x: Tensor) -> Tensor:
        y = checkpoint(region, self, x, use_reentrant=reentrant)
        return y + instep.all_reduce(y.sum(0)) * self.other(x)

    x = batch().requires_grad_()
    with replicated(FunctionModule(body), way) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)


# Some versions of torch complain of a checkpoint that is given up in another thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["serial", "joint"])
def test_collectives_in_a_checkpointed_region_are_an_error_in_a_joint_graph(way: str, reentrant: bool) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: instep.all_reduce(self.layer(x)), x, use_reentrant=reentrant)

    x = batch(6).requires_grad_()
    with replicated(FunctionModule(body), way) as (plain, model):
        with pytest.raises(instep.CollectiveError, match="checkpoint"):
            model(x)
        with torch.no_grad():
            assert model(x).shape == plain(x).shape


@each_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_whole_call(way: str, reentrant: bool) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * instep.all_gather(self.other(x)).sum(0)

    x = batch().requires_grad_()
    with replicated(FunctionModule(body), way) as (plain, model):
        for each in (plain, model):
            weighted_loss(checkpoint(each, x, use_reentrant=reentrant)).backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_that_only_some_replicas_use_never_hangs(reentrant: bool) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: instep.all_gather(self.other(x)).tanh(), x, use_reentrant=reentrant)
        return self.layer(x) + y.sum(0) if instep.replica().index == 0 else self.layer(x)

    def plain_body(self: Any, x: Tensor) -> Tensor:
        mask = torch.tensor([1.0, 1, 1, 0, 0, 0, 0], dtype=torch.float64)[:, None]
        return self.layer(x) + mask * self.other(x).tanh().sum(0)

    x = batch().requires_grad_()
    with replicated(FunctionModule(body), "threads") as (plain, model):
        plain.body = plain_body
        if reentrant:  # its inner graph is unknown until it runs
            with pytest.raises(instep.CollectiveError, match="finished its backward"):
                train(model, x)
            return
        train(model, x)
        train(plain, x)
        assert_same_gradients(model, plain)


MADE: list[weakref.ref[Tensor]] = []


@each_way
def test_a_graph_that_is_dropped_is_freed(way: str) -> None:
    MADE.clear()

    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        MADE.append(weakref.ref(z))
        return z * instep.all_reduce(z.tanh().sum(0))

    with replicated(FunctionModule(body), way) as (_, model):
        out = model(batch())
        assert any(ref() is not None for ref in MADE)
        del out
        gc.collect()
        assert all(ref() is None for ref in MADE)


KEPT: list[Tensor] = []  # a global, for what a module holds is the replica's own in a replica


class Around(nn.Module):
    """Takes a gradient of what another wrapper has computed."""

    def forward(self, x: Tensor) -> Tensor:
        loss, weight = KEPT
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        return x * grad.sum()


@each_way
def test_a_backward_inside_a_replica_of_another_wrapper(way: str) -> None:
    """There the replicas' own threads may be waiting, and the backward has to find others."""

    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * instep.all_reduce(self.other(x).tanh().sum(0))

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model), replicated(Around(), "threads") as (_, other):
        (expected,) = torch.autograd.grad(weighted_loss(plain(x)), plain.other.weight)
        KEPT[:] = weighted_loss(model(x)), model.other.weight
        try:
            with torch.no_grad():
                assert_close(other(x), x * expected.sum())
        finally:
            KEPT.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_worker_that_dies_between_two_backwards_of_one_call() -> None:
    """The second is of a forward that was run again, of which the first has used up a part."""

    def body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x), self.other(x)
        return one * instep.all_gather(one).sum(), two * instep.all_gather(two).mean()

    x = batch()
    with replicated(FunctionModule(body), "processes") as (plain, model):
        for each in (plain, model):
            one, two = each(x)
            weighted_loss(one).backward()
            if each is model:
                engine: Any = model._instep_engine
                os.kill(engine._pool.get(1).pid, signal.SIGKILL)
            weighted_loss(two).backward()
        assert_same_gradients(model, plain)
