"""Synchronized batch normalization: statistics of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.collectives.sync_batchnorm import SyncedForward
from instep.engines.rendezvous import Rendezvous

from ..replica_helpers import (
    ENGINE_MODES,
    assert_close,
    assert_same_gradients,
    replicated,
    train_and_compare,
    weighted_loss,
)

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)


def normal(*shape: int) -> Tensor:
    return 2 + 3 * torch.randn(*shape, dtype=torch.float64)


def compare(layer: nn.Module, x: Tensor, way: str, replicas: int = 3, steps: int = 3, **options: Any) -> None:
    """Outputs, gradients and running statistics of a layer, for some steps and then in eval."""
    train_and_compare(nn.Sequential(layer, nn.Tanh()), x, way, replicas, steps, **options)


SHAPES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (4,)),
    "1d-length": (nn.BatchNorm1d, (4, 5)),
    "2d": (nn.BatchNorm2d, (4, 3, 2)),
    "3d": (nn.BatchNorm3d, (4, 2, 3, 2)),
    "sync": (nn.SyncBatchNorm, (4, 3, 2)),
}


@each_way
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("batch", "replicas"), [(7, 3), (3, 3), (5, 4)])
def test_batch_norm_layers_of_every_kind(way: str, kind: str, batch: int, replicas: int) -> None:
    make, shape = SHAPES[kind]
    compare(make(4), normal(batch, *shape), way, replicas)


@each_way
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("private", [False, True])
def test_every_option(way: str, options: dict[str, Any], private: bool) -> None:
    compare(nn.BatchNorm2d(4, **options), normal(7, 4, 3, 2), way, private_copies=private)


@each_way
def test_layers_without_some_of_their_tensors(way: str) -> None:
    layer = nn.BatchNorm1d(4)
    layer.num_batches_tracked = None
    layer.bias.requires_grad_(False)
    compare(layer, normal(5, 4), way)


@each_way
def test_a_lazy_layer_after_its_first_call(way: str) -> None:
    net, plain = (nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(3)).double() for _ in range(2))
    x = normal(7, 4)
    engine = "serial" if way == "serial" else "threads"
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        torch.manual_seed(0)
        first = model(x)
        torch.manual_seed(0)
        assert_close(first, plain(x))
        for _ in range(2):
            assert_close(model(x), plain(x))
        assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@each_way
def test_double_use_and_two_forwards_before_a_backward(way: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.mix(self.norm(x).tanh()))

    x = normal(7, 4)
    with replicated(Twice().double(), way) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x) + each(x.flip(0)).sin()).backward()
        assert_same_gradients(model, plain)
        assert_close(model.state_dict(), plain.state_dict())


@each_way
def test_a_call_in_eval_between_training_calls_keeps_its_graph(way: str) -> None:
    x = normal(7, 4)
    with replicated(nn.BatchNorm1d(4).double(), way) as (plain, model):
        for each in (plain, model):
            trained = each(x)
            each.eval()
            fixed = each(2 * x)
            each.train()
            weighted_loss(trained + fixed).backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("way", ENGINE_MODES[:3])  # it counts in this process
def test_layers_in_eval_exchange_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    share = instep.collectives.sync_batchnorm.normalize

    def noted(context: Any, *rest: Any) -> Any:
        met.append(context)
        return share(context, *rest)

    monkeypatch.setattr("instep.collectives.sync_batchnorm.normalize", noted)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    net[0].eval()
    x = normal(7, 4)
    with replicated(net, way) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)
        assert len(met) == 3  # the second layer, once on each replica
        model.eval()
        with torch.no_grad():
            model(x)
        assert len(met) == 3


def test_each_layer_exchanges_once_in_forward_and_once_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    exchange = Rendezvous.exchange

    def count(self: Any, index: int, label: str, payload: Any) -> Any:
        if index == 0:
            met.append(label)
        return exchange(self, index, label, payload)

    monkeypatch.setattr(Rendezvous, "exchange", count)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    with replicated(net, "threads") as (_, model):
        weighted_loss(model(normal(7, 4))).backward()
    assert [label.startswith("the backward") for label in met] == [False, False, True, True]


@pytest.mark.parametrize("way", ENGINE_MODES[:3])  # it counts in this process
def test_hooks_run_and_the_source_is_untouched(way: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4)).double()
    seen: list[int] = []
    with replicated(net, way, hooks="per_replica") as (_, model):
        model.module[0].register_forward_hook(lambda module, args, out: seen.append(len(out)))
        model(normal(7, 4))
        assert "forward" not in model.module[0].__dict__
        assert all(isinstance(replica.module[0].forward, SyncedForward) for replica in model._instep_replicas.replicas)
    assert sorted(seen) == [2, 2, 3]


@each_way
def test_layers_added_later_are_synchronized(way: str) -> None:
    x = normal(7, 4)
    with replicated(nn.Sequential(nn.Identity(), nn.Tanh()), way) as (plain, model):
        model(x)
        model.module[0], plain[0] = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
        assert_close(model(x), plain(x))
        assert_close(model.state_dict(), plain.state_dict())


@each_way
def test_low_precision(way: str) -> None:
    x = normal(8, 4, 5).bfloat16()
    with replicated(nn.BatchNorm1d(4), way) as (plain, model):
        outs = [each(x) for each in (plain, model)]
        assert outs[1].dtype == outs[0].dtype == torch.bfloat16
        torch.testing.assert_close(outs[1], outs[0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=1e-4, atol=1e-4)


@each_way
def test_wrong_input_is_torchs_own_error(way: str) -> None:
    with replicated(nn.BatchNorm2d(4).double(), way) as (plain, model):
        for each in (plain, model):
            with pytest.raises(ValueError, match="expected 4D input"):
                each(normal(7, 4))
        assert_close(model.state_dict(), nn.BatchNorm2d(4).double().state_dict())


def test_double_backward_on_serial() -> None:
    x = normal(7, 4).requires_grad_()
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    with replicated(net, "serial") as (plain, model):
        for each in (plain, model):
            (grad,) = torch.autograd.grad(weighted_loss(each(x)), x, create_graph=True)
            grad.square().sum().backward()
        assert_same_gradients(model, plain)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_under_checkpointing() -> None:
    x = normal(7, 4)
    with replicated(Checkpointed().double(), "threads") as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)


# Some versions of torch complain of a checkpoint that is given up in another thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["serial", "joint"])
def test_checkpointing_in_a_joint_graph_is_an_error(way: str) -> None:
    with (
        replicated(Checkpointed().double(), way) as (_, model),
        pytest.raises(instep.CollectiveError, match="sync_batchnorm=False"),
    ):
        model(normal(7, 4))


# Without synchronisation.


@each_way
def test_unsynchronized_statistics_are_averaged_with_one_warning(way: str) -> None:
    x = normal(7, 4)
    with replicated(nn.BatchNorm1d(4).double(), way, sync_batchnorm=False) as (plain, model):
        with pytest.warns(UserWarning, match="sync_batchnorm=False: .* each replica's shard"):
            out = model(x)
        shards = x[:3], x[3:5], x[5:]
        assert_close(out, torch.cat([copy.deepcopy(plain)(shard) for shard in shards]))
        assert_close(model.running_mean, 0.1 * x.mean(0))
        variance = sum(len(shard) * shard.var(0) for shard in shards) / 7
        assert_close(model.running_var, 0.9 + 0.1 * variance)
        assert model.num_batches_tracked.item() == 1
        model(x)  # warnings are errors: nothing is said again


@each_way
def test_unsynchronized_layers_in_eval_do_not_warn(way: str) -> None:
    with replicated(nn.BatchNorm1d(4).double().eval(), way, sync_batchnorm=False) as (plain, model):
        x = normal(7, 4)
        assert_close(model(x), plain(x))


@each_way
def test_a_state_rule_of_the_user_takes_precedence(way: str) -> None:
    x = normal(7, 4)
    options: dict[str, Any] = {"sync_batchnorm": False, "state": {"running_mean": "first"}}
    with replicated(nn.BatchNorm1d(4).double(), way, **options) as (_, model):
        with pytest.warns(UserWarning, match="sync_batchnorm"):
            model(x)
        assert_close(model.running_mean, 0.1 * x[:3].mean(0))


@pytest.mark.parametrize("chosen", [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_replica_without_samples_takes_part(engine: str, chosen: list[int]) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.layer(x)
            return torch.zeros_like(h).index_put((mask,), self.norm(h[mask]))

    net = Routed().double()
    plain, x, mask = copy.deepcopy(net), torch.randn(6, 4).double(), torch.tensor(chosen).bool()
    weights = torch.arange(18.0).view(6, 3)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        for module in (model, plain):
            (module(x, mask) * weights).square().sum().backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
