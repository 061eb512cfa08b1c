"""`all_reduce`, `all_gather` and `replica` give inside of a replica what the whole batch gives on one device."""

from __future__ import annotations

import copy
import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import instep
from instep.meeting import calls_alone

from .replicated import WAYS, assert_close, assert_same_gradients, replicated, weigh

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", WAYS)
each_engine = pytest.mark.parametrize("way", ["serial", "threads"])


class Does(nn.Module):
    """Runs a function of itself and its inputs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.other = nn.Linear(3, 4).double()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def batch(size: int = 7) -> Tensor:
    return torch.randn(size, 3, dtype=torch.float64)


def train(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = weigh) -> Any:
    out = model(x)
    loss(out).backward()
    return out


def check(body: Callable[..., Any], way: str, loss: Callable[[Any], Tensor] = weigh, **options: Any) -> None:
    """Two steps with and without replicas agree."""
    x = batch()
    with replicated(Does(body), way, **options) as (plain, model):
        for _ in range(2):
            assert_close(train(model, x, loss), train(plain, x, loss))
            assert_same_gradients(model, plain)


# What is computed.


@each_way
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_gathered_batch_is_the_whole_batch(way: str, private: bool, replicas: int) -> None:
    def contrast(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return (z @ instep.all_gather(self.other(x)).T).log_softmax(1)

    check(contrast, way, replicas=replicas, private_copies=private)


@each_way
def test_a_mean_counts_samples(way: str) -> None:
    def centre(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z - instep.all_reduce(z.mean(0), "mean")

    check(centre, way)


@each_way
def test_a_sum_over_the_batch(way: str) -> None:
    check(lambda self, x: self.layer(x) / instep.all_reduce(self.layer(x).exp().sum(0)), way)


@each_way
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_and_their_gradients(way: str, op: str) -> None:
    def extreme(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z - instep.all_reduce(z.amax(0) if op == "max" else z.amin(0), op)

    check(extreme, way)


@each_way
def test_the_gradient_of_a_tie_is_shared_by_the_replicas(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        weight = self.layer.weight.amax()
        return self.layer(x) * instep.all_reduce(weight, "max")

    check(body, way)


@each_way
def test_structures_are_reduced_leaf_by_leaf(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        got = instep.all_reduce({"z": z.sum(0), "n": len(x), "pair": (z.sum(), "name")})
        assert got["pair"][1] == "name"
        assert got["n"] == 7
        return z * got["z"] / got["n"] + got["pair"][0]

    check(body, way)


@dataclasses.dataclass
class Samples:
    z: Tensor
    names: list[str]
    sequences: list[Tensor]
    array: np.ndarray
    kind: str


@each_way
def test_structures_are_gathered_with_their_samples(way: str) -> None:
    x = batch()
    names = [f"s{i}" for i in range(7)]

    def body(self: Any, x: Tensor, names: list[str]) -> Tensor:
        z = self.layer(x)
        mine = Samples(z, names, [row[: 1 + i % 2] for i, row in enumerate(z)], np.arange(len(x)), "kind")
        got = instep.all_gather(mine)
        assert got.names == [f"s{i}" for i in range(7)]
        assert got.kind == "kind"
        assert len(got.array) == 7
        return z + torch.stack([s.sum() for s in got.sequences]).sum() / 3 + got.z.mean(0)

    def loss(out: Tensor) -> Tensor:
        return weigh(out)

    with replicated(Does(body), way) as (plain, model):
        loss(model(x, names)).backward()
        z = plain.layer(x)
        shards = z[:3], z[3:5], z[5:]
        total = sum(row[: 1 + i % 2].sum() for shard in shards for i, row in enumerate(shard))
        expected = z + total / 3 + z.mean(0)
        loss(expected).backward()
        assert_close(model(x, names), expected)
        assert_same_gradients(model, plain)


@each_way
def test_gathered_samples_may_be_written_to(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        rows = instep.all_gather(list(z))
        peers = instep.all_gather(z)
        for row in rows:
            row.mul_(2.0)
        peers.mul_(3.0)
        z.mul_(5.0)
        return z + peers.mean(0)

    def plain_body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z * 5.0 + (z * 3.0).mean(0)

    x = batch()
    with replicated(Does(body), way) as (plain, model):
        plain.body = plain_body
        with torch.no_grad():
            assert_close(model(x), plain(x))


@each_way
def test_other_dims_and_scalars_and_integers(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        wide = instep.all_gather(z.T, dim=1)
        assert wide.shape == (4, 7)
        assert torch.equal(instep.all_gather(z.T, dim=-1), wide)
        index = instep.all_gather(torch.arange(len(x)))
        assert not index.requires_grad
        flags = instep.all_reduce(torch.tensor([True, len(x) > 2]), "min")
        assert flags.tolist() == [True, len(index) == len(x)]
        totals = instep.all_gather(z.sum())
        total = totals.sum() if totals.ndim else totals
        return z @ wide + total

    check(body, way)


@each_way
def test_replica_says_where_it_is(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        here = instep.replica()
        assert here.device in (None, torch.device("cpu"))
        assert here.size in (None, len(x))
        return torch.stack([torch.tensor([here.index, here.count, here.offset + i]) for i in range(len(x))])

    x = batch()
    with replicated(Does(body), way) as (plain, model), torch.no_grad():
        assert model(x).T.tolist() == [[0, 0, 0, 1, 1, 2, 2], [3] * 7, list(range(7))]
        assert plain(x).T.tolist() == [[0] * 7, [1] * 7, list(range(7))]


def test_outside_of_a_call_nothing_happens() -> None:
    x, before = {"a": [batch()], "b": "text"}, calls_alone()
    assert instep.all_gather(x) is x
    assert instep.all_reduce(x, "max") is x
    assert (instep.replica().index, instep.replica().count) == (0, 1)
    assert calls_alone() == before + 2
    with pytest.raises(instep.CollectiveError, match="sum, mean, max, min"):
        instep.all_reduce(x, "product")


@each_way
def test_one_replica_and_one_sample_are_the_module_itself(way: str) -> None:
    same: list[bool] = []

    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        same.append(instep.all_gather(z) is z and instep.all_reduce(z) is z and instep.replica().count == 1)
        return z

    with replicated(Does(body), way) as (_, model):
        model(batch(1))
    with replicated(Does(body), way, replicas=1) as (_, model):
        model(batch())
    assert same == [True, True]


# Gradients that do not come from everywhere.


@each_way
def test_replicas_that_do_not_use_what_was_gathered(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        everything = instep.all_gather(self.other(x))
        z = self.layer(x)
        return z + everything.sum(0) if instep.replica().index == 1 else z

    def plain_body(self: Any, x: Tensor) -> Tensor:
        mask = torch.tensor([0.0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)[:, None]
        return self.layer(x) + mask * self.other(x).sum(0)

    x = batch()
    with replicated(Does(body), way) as (plain, model):
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
    with replicated(Does(body), way) as (plain, model):
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
    with replicated(Does(body), way) as (plain, model):
        plain.body = plain_body
        assert_close(train(model, x), train(plain, x))
        assert_same_gradients(model, plain)


@each_way
def test_what_is_never_used_gets_no_gradient(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        instep.all_gather(self.other(x))
        return self.layer(x)

    check(body, way)


@each_way
def test_what_needs_no_gradient_needs_none_when_gathered(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        assert not instep.all_gather(x).requires_grad
        assert not instep.all_reduce(x.sum(0)).requires_grad
        return self.layer(x) * instep.all_gather(x).sum()

    check(body, way)


@each_way
def test_outputs_whose_gradient_comes_later(way: str) -> None:
    """Each output has its own gather; the first backward must not use up the second's graph."""

    def body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x), self.other(x)
        return one * instep.all_gather(one).sum(), two * instep.all_gather(two).mean()

    x = batch()
    with replicated(Does(body), way) as (plain, model):
        for each in (plain, model):
            one, two = each(x)
            weigh(two).backward()
            weigh(one).backward()
        assert_same_gradients(model, plain)
        one, two = model(x)
        weigh(one).backward(inputs=[one])
        weigh(one + two).backward()
        with pytest.raises(RuntimeError, match="second time"):
            weigh(one).backward()


@each_way
def test_retained_graphs_and_gradients_of_inputs(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) @ instep.all_gather(self.layer(x).tanh()).T

    x = batch().requires_grad_()
    with replicated(Does(body), way) as (plain, model):
        got = []
        for each in (plain, model):
            out = each(x)
            weigh(out).backward(retain_graph=True)
            (grad,) = torch.autograd.grad(weigh(out), x)
            got.append(grad)
        assert_close(got[1], got[0])
        assert_same_gradients(model, plain)


@each_way
def test_several_forwards_before_one_backward(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) * instep.all_reduce(self.other(x).sum(0))

    x = batch()
    with replicated(Does(body), way) as (plain, model):
        for each in (plain, model):
            weigh(each(x) + each(2 * x).flip(0)).backward()
        assert_same_gradients(model, plain)


@each_way
def test_without_gradients_and_in_inference_mode(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) - instep.all_reduce(self.layer(x).mean(0), "mean") + instep.all_gather(x).sum()

    x = batch()
    with replicated(Does(body), way) as (plain, model):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(model(x), plain(x))


@each_way
def test_gradients_held_back(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) * instep.all_reduce(self.other(x).sum(0))

    x = batch()
    with replicated(Does(body), way) as (plain, model):
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
    with replicated(Does(body).float(), way) as (plain, model), torch.autocast("cpu", torch.bfloat16):
        for each in (plain, model):
            weigh(each(x)).backward()
        torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad, rtol=0.05, atol=0.05)


def penalised(self: Any, x: Tensor) -> Tensor:
    """A penalty on a gradient that passes through a collective, differentiated again."""
    x = x.detach().requires_grad_()
    z = self.layer(x).tanh() * instep.all_reduce(self.other(x).tanh().sum(0))
    (grad,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return grad.square().sum(1)


def test_a_gradient_taken_inside_of_forward() -> None:
    check(penalised, "threads")


@pytest.mark.parametrize("way", ["serial", "joint"])
def test_a_gradient_taken_inside_of_forward_is_refused_in_a_joint_graph(way: str) -> None:
    fails(penalised, way, instep.CollectiveError, "taken inside of forward")


def test_double_backward_on_serial() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * instep.all_reduce(self.other(x).tanh().sum(0))

    x = batch().requires_grad_()
    with replicated(Does(body), "serial") as (plain, model):
        for each in (plain, model):
            (grad,) = torch.autograd.grad(weigh(each(x)), x, create_graph=True)
            grad.square().sum().backward()
        assert_same_gradients(model, plain)


# Checkpointing.


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_meets_again(reentrant: bool) -> None:
    def region(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x).tanh()
        return z * instep.all_gather(z).sum(0)

    def body(self: Any, x: Tensor) -> Tensor:
        y = checkpoint(region, self, x, use_reentrant=reentrant)
        return y + instep.all_reduce(y.sum(0)) * self.other(x)

    x = batch().requires_grad_()
    with replicated(Does(body), "threads") as (plain, model):
        for each in (plain, model):
            weigh(each(x)).backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["serial", "joint"])
def test_a_checkpointed_region_in_a_joint_graph_is_refused(way: str, reentrant: bool) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: instep.all_reduce(self.layer(x)), x, use_reentrant=reentrant)

    x = batch(6).requires_grad_()
    with replicated(Does(body), way) as (plain, model):
        with pytest.raises(instep.CollectiveError, match="checkpoint"):
            model(x)
        with torch.no_grad():
            assert model(x).shape == plain(x).shape


@each_way
def test_a_checkpoint_around_the_whole_call(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * instep.all_gather(self.other(x)).sum(0)

    x = batch().requires_grad_()
    with replicated(Does(body), way) as (plain, model):
        for each in (plain, model):
            weigh(checkpoint(each, x, use_reentrant=False)).backward()
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
    with replicated(Does(body), "threads") as (plain, model):
        plain.body = plain_body
        if reentrant:  # its inner graph is unknown until it runs
            with pytest.raises(instep.CollectiveError, match="came to the end of its backward"):
                train(model, x)
            return
        train(model, x)
        train(plain, x)
        assert_same_gradients(model, plain)


# Replicas that do not agree.


def fails(body: Callable[..., Any], way: str, error: type[BaseException], match: str, size: int = 7) -> None:
    """A call fails at once, leaves nothing, and the next one works."""
    net = Does(body)
    x = batch(size)
    with replicated(net, way) as (plain, model):
        before = copy.deepcopy(model.state_dict())
        start = time.monotonic()
        with pytest.raises(error, match=match):
            model(x)
        assert time.monotonic() - start < 5
        assert_close(model.state_dict(), before)
        model.body = plain.body = lambda self, x: self.layer(x) * instep.all_reduce(x.sum(0))[0]
        assert_close(model(x), plain(x))


@each_way
def test_a_replica_that_returned(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return instep.all_reduce(x, "max") if len(x) == 3 else x

    fails(body, way, instep.CollectiveError, r"replica 0 on cpu called all_reduce\(op='max'\).* returned from forward")


@each_way
def test_a_replica_that_comes_once_too_often(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        for _ in range(1 + instep.replica().index):
            x = x - instep.all_reduce(x.sum(0))
        return x

    fails(body, way, instep.CollectiveError, "replica 0 on cpu returned from forward without it")


@each_way
@pytest.mark.parametrize(
    "other",
    [
        lambda x: instep.all_reduce(x.sum(0), "max"),
        lambda x: instep.all_gather(x.sum(0)),
        lambda x: instep.all_reduce(x.sum(0).float()),
        lambda x: instep.all_reduce((x.sum(0),)),
        lambda x: instep.all_reduce(x.sum()),
    ],
    ids=["op", "kind", "dtype", "structure", "shape"],
)
def test_replicas_at_different_operations(way: str, other: Callable[..., Any]) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        other(x) if instep.replica().index == 1 else instep.all_reduce(x.sum(0))
        return x

    match = r"(?s)different operations.*replica . on cpu called all.*replica . on cpu called all"
    fails(body, way, instep.CollectiveError, match)


@each_way
def test_one_replica_without_gradients(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(instep.replica().index != 1):
            return self.layer(x) + instep.all_reduce(self.layer(x).sum(0))

    fails(body, way, instep.CollectiveError, "without gradients")


@each_way
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_exception_keeps_its_type(way: str, culprit: int) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = instep.all_reduce(x.sum(0))
        if instep.replica().index == culprit:
            raise KeyError("mine")
        return instep.all_gather(x)

    fails(body, way, KeyError, "mine")


@each_way
def test_leaves_that_cannot_be_joined(way: str) -> None:
    fails(lambda self, x: instep.all_gather(("a" * len(x), x)), way, instep.CollectiveError, "leaf '0' is 'aaa'")
    fails(lambda self, x: instep.all_reduce({"k": str(len(x))}), way, instep.CollectiveError, "leaf 'k' is '3'")
    fails(lambda self, x: instep.all_gather({len(x): 1}), way, instep.CollectiveError, "different operations")
    fails(lambda self, x: instep.all_reduce(x.sum(0) > 0), way, instep.CollectiveError, "sum of bools")
    fails(
        lambda self, x: instep.all_reduce(x.sum(0).long(), "mean"), way, instep.CollectiveError, "mean of torch.int64"
    )
    fails(lambda self, x: instep.all_gather({"s": x.to_sparse()}), way, instep.CollectiveError, "leaf 's'")

    def packs(self: Any, x: Tensor) -> PackedSequence:
        return instep.all_gather(pack_sequence([x]))

    fails(packs, way, instep.CollectiveError, "PackedSequence")


def test_an_exception_in_one_backward_ends_the_others() -> None:
    def explode(gradient: Tensor) -> None:
        raise ZeroDivisionError

    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x) * instep.all_reduce(self.layer(x).sum(0))
        z = z + instep.all_gather(z).mean(0)
        if instep.replica().index == 1:
            z.register_hook(explode)
        return z

    with replicated(Does(body), "threads") as (_, model):
        with pytest.raises(ZeroDivisionError):
            train(model, batch())
        assert model.layer.weight.grad is None
        model.body = lambda self, x: self.layer(x) - instep.all_reduce(self.layer(x).mean(0), "mean")
        train(model, batch())
        assert model.layer.weight.grad is not None


@each_engine
def test_an_interruption_while_replicas_wait(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        if instep.replica().index == (1 if way == "threads" else 0):
            time.sleep(0.5)
        return x - instep.all_reduce(x.mean(0), "mean")

    x = batch()
    with replicated(Does(body), way) as (plain, model):
        timer = threading.Timer(0.15, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        timer.join()
        assert_close(model(x), plain(x))


def test_an_interruption_of_a_waiting_caller_on_serial() -> None:
    """The caller's thread waits as replica 0 while another replica runs."""

    def body(self: Any, x: Tensor) -> Tensor:
        if instep.replica().index == 2:
            time.sleep(0.5)
        return x - instep.all_reduce(x.mean(0), "mean")

    x = batch()
    with replicated(Does(body), "serial") as (plain, model):
        timer = threading.Timer(0.15, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        timer.join()
        assert_close(model(x), plain(x))


@each_way
def test_other_methods_meet_too(way: str) -> None:
    class Has(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def centred(self, x: Tensor) -> Tensor:
            return x - instep.all_reduce(x.mean(0), "mean")

    x = batch()
    with replicated(Has(), way) as (plain, model):
        assert_close(model.call("centred", x), plain.centred(x))


@each_engine
def test_replicas_that_run_in_turn_meet(way: str) -> None:
    """A module with a generator of its own: its replicas run one at a time."""

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3, generator=self.generator)
            z = self.layer(x)
            return z - instep.all_reduce(z.mean(0), "mean") + instep.all_gather(z.tanh()).sum(0)

    x = batch()
    with replicated(Draws(), way) as (plain, model):
        for each in (plain, model):
            weigh(each(x)).backward()
        assert_same_gradients(model, plain)


def test_two_wrappers_in_two_threads() -> None:
    """They share the replicas' threads; neither waits for a replica that stands behind the other."""

    def body(self: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x - instep.all_reduce(x.mean(0), "mean")
        return self.layer(x)

    x = batch()
    failed: list[BaseException] = []

    def work(model: Any, plain: Any) -> None:
        try:
            for _ in range(20):
                assert_close(train(model, x), train(plain, x))
        except BaseException as error:
            failed.append(error)

    with replicated(Does(body), "threads", 2) as (plain, one), replicated(Does(body), "threads", 3) as (other, two):
        threads = [threading.Thread(target=work, args=pair) for pair in ((one, plain), (two, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
