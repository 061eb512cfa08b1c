"""Running statistics of batch norm layers in flat blocks."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from instep.replicas.object_graph import tensors_equal
from instep.replicas.replica import Replica
from instep.replicas.state.batch_norm import weighted_mean
from instep.replicas.tensors import ParameterSharing

from ...replica_helpers import ENGINE_MODES, assert_close, assert_same_gradients, replicated, weighted_loss

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.filterwarnings("ignore:sync_batchnorm=False:UserWarning"),
]
each_way = pytest.mark.parametrize("way", ENGINE_MODES)
both = pytest.mark.parametrize("synced", [True, False], ids=["synced", "shards"])


def normal(*shape: int) -> Tensor:
    return 2 + 3 * torch.randn(*shape, dtype=torch.float64)


class Net(nn.Module):
    """Layers that are called, that are not, and that are in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None, affine=False)
        self.linear, self.unused, self.fixed = nn.Linear(4, 4), nn.BatchNorm1d(3), nn.BatchNorm1d(4).eval()
        self.unused.running_mean.copy_(torch.tensor([0.1, -0.0, torch.inf]))
        self.unused.running_var.copy_(torch.tensor([1 / 3, torch.nan, 1e-45]))
        self.fixed.running_mean.copy_(torch.tensor([0.3, 0.7, 0.9, 1e-3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.second(self.linear(self.first(x)).sin()))


def one_step(net: Net, x: Tensor, shards: list[Tensor]) -> None:
    """The statistics of `first` after a step with those of each shard."""
    old_mean, old_var = net.first.running_mean.clone(), net.first.running_var.clone()
    net.first.running_mean.copy_(0.9 * old_mean + 0.1 * x.mean(0))
    net.first.running_var.copy_(0.9 * old_var + 0.1 * sum(len(s) * s.var(0) for s in shards) / len(x))


@each_way
@both
def test_statistics_are_merged_without_a_rule_for_each(way: str, synced: bool) -> None:
    ruled: list[str] = []
    with replicated(Net().double(), way, sync_batchnorm=synced) as (plain, model):
        model._instep_runner.state_merger.merge_value = lambda path, *_: ruled.append(str(path))
        for step in range(3):
            x = normal(7, 4) + step
            if synced:
                outs = [each(x) for each in (plain, model)]
                for out in outs:
                    weighted_loss(out).backward()
                assert_close(outs[1], outs[0])
                assert_same_gradients(model, plain)
                torch.testing.assert_close(
                    model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12, equal_nan=True
                )
            else:
                model(x)
                one_step(plain, x, [x[:3], x[3:5], x[5:]])
                assert_close(model.first.running_mean, plain.first.running_mean)
                assert_close(model.first.running_var, plain.first.running_var)
                assert model.second.num_batches_tracked == step + 1
            for name in ("unused", "fixed"):
                for mine, theirs in zip(getattr(model, name).buffers(), getattr(plain, name).buffers(), strict=True):
                    assert mine.numpy().tobytes() == theirs.numpy().tobytes(), name
    assert not ruled


def test_a_mean_keeps_the_bits_of_equal_entries_and_leaves_out_empty_shards() -> None:
    values = [torch.tensor([0.1, -0.0, torch.inf, 3.0]), torch.tensor([0.1, -0.0, torch.inf, 6.0])]
    mean = weighted_mean([*values, torch.full((4,), torch.nan)], [2, 1, 0])
    assert mean[:3].numpy().tobytes() == values[0][:3].numpy().tobytes()
    assert mean[3] == 4
    assert torch.equal(weighted_mean(values, [0, 0]), values[0])


def reset(net: Net) -> None:
    net.first.reset_running_stats()


def load(net: Net) -> None:
    net.first.load_state_dict({**net.first.state_dict(), "running_mean": torch.full((4,), 5.0)})


def assign(net: Net) -> None:
    net.first.running_mean = net.first.running_mean + 1


def move(net: Net) -> None:
    net.first.running_var.data = net.first.running_var.data.clone() + 1


def convert(net: Net) -> None:
    net.float()


def freeze(net: Net) -> None:
    net.first.eval()


def tie(net: Net) -> None:
    net.second.running_mean, net.second.running_var = net.first.running_mean, net.first.running_var


def change_momentum(net: Net) -> None:
    net.first.momentum, net.second.momentum = None, 0.3


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("change", [reset, load, assign, move, convert, freeze, tie, change_momentum])
def test_changes_of_the_module_between_calls(way: str, change: Callable[[Net], None]) -> None:
    with replicated(Net().double(), way) as (plain, model):
        for _ in range(3):
            x = normal(7, 4).to(plain.linear.weight.dtype)
            outs = [each(x) for each in (plain, model)]
            for out in outs:
                weighted_loss(out).backward()
            torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-5, equal_nan=True)
            for each in (plain, model.module):
                change(each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@both
def test_blocks_per_dtype(dtype: torch.dtype, synced: bool) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    net[1].running_mean, net[1].running_var = net[1].running_mean.to(dtype), net[1].running_var.to(dtype)
    with replicated(net, "threads", replicas=2, sync_batchnorm=synced) as (_, model):
        replica = model._instep_replicas.sync()[0]
        assert replica.statistics is not None
        assert len({tensor.untyped_storage().data_ptr() for tensor in replica.module.buffers()}) == 3
        assert [tensor.dtype for tensor in replica.module.buffers()] == [tensor.dtype for tensor in net.buffers()]


class Writes(nn.Module):
    """Has a layer whose running statistics `forward` writes itself."""

    def __init__(self, write: Callable[[nn.BatchNorm1d, Tensor], None]) -> None:
        super().__init__()
        self.norm, self.write = nn.BatchNorm1d(4), write

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        self.write(self.norm, x)
        return y


def scale(norm: nn.BatchNorm1d, x: Tensor) -> None:
    assert norm.running_mean is not None
    norm.running_mean.mul_(0.5)


def scale_data(norm: nn.BatchNorm1d, x: Tensor) -> None:
    assert norm.running_mean is not None
    norm.running_mean.data.mul_(0.5)


def set_data(norm: nn.BatchNorm1d, x: Tensor) -> None:
    assert norm.running_mean is not None
    norm.running_mean.data = norm.running_mean.data * 0.5


def run_in_training(norm: nn.BatchNorm1d, x: Tensor) -> None:
    norm.train()
    norm(x)
    norm.eval()


def call_function(norm: nn.BatchNorm1d, x: Tensor) -> None:
    F.batch_norm(x, norm.running_mean, norm.running_var, training=True, momentum=0.3)


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("write", [scale, scale_data, set_data, run_in_training, call_function])
@pytest.mark.parametrize("training", [True, False])
def test_writes_in_forward(way: str, write: Callable[[nn.BatchNorm1d, Tensor], None], training: bool) -> None:
    with replicated(Writes(write).double().train(training), way) as (plain, model):
        for _ in range(2):
            x = normal(7, 4)
            assert_close(model(x), plain(x))
            assert_close(model.state_dict(), plain.state_dict())


def add_shard_mean(norm: nn.BatchNorm1d, x: Tensor) -> None:
    assert norm.running_mean is not None
    norm.running_mean.add_(x.mean(0))


def add_shard_mean_to_data(norm: nn.BatchNorm1d, x: Tensor) -> None:
    assert norm.running_mean is not None
    norm.running_mean.data.add_(x.mean(0))


def zero_if_negative(norm: nn.BatchNorm1d, x: Tensor) -> None:
    assert norm.running_mean is not None
    if x.min() < -50:
        norm.running_mean.zero_()


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("write", [add_shard_mean, add_shard_mean_to_data, zero_if_negative])
@pytest.mark.parametrize("sample", [0, 6])
def test_writes_that_differ_between_replicas_raise(
    way: str, write: Callable[[nn.BatchNorm1d, Tensor], None], sample: int
) -> None:
    x = normal(7, 4)
    with replicated(Writes(write).double(), way, probe=False) as (_, model):
        if write is zero_if_negative:
            model(x)
        x[sample] = -100.0
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(instep.StateError, match=r"norm\.running_mean' differs between replicas"):
            model(x)
        assert_close(model.state_dict(), before)


@pytest.mark.parametrize("way", ["threads", "processes"])
@both
def test_a_failed_call_leaves_the_statistics(way: str, synced: bool) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x.max() > 100:
                raise ArithmeticError("too large")
            return y

    x = normal(7, 4)
    with replicated(Fails().double(), way, sync_batchnorm=synced) as (_, model):
        model(x)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ArithmeticError):
            model(x.index_fill(0, torch.tensor([6]), 200.0))
        assert all(tensors_equal(value, before[name]) for name, value in model.state_dict().items())
        model(x)
        assert model.first.num_batches_tracked == 2


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize("rule", ["first", "max"])
@both
def test_a_rule_of_the_user_takes_precedence(way: str, rule: str, synced: bool) -> None:
    x = normal(7, 4)
    options: dict[str, Any] = {"sync_batchnorm": synced, "state": {"*.running_mean": rule}}
    with replicated(nn.Sequential(nn.BatchNorm1d(4)).double(), way, **options) as (_, model):
        model(x)
        means = torch.stack([shard.mean(0) for shard in (x[:3], x[3:5], x[5:])])
        expected = x.mean(0) if synced else means[0] if rule == "first" else means.amax(0)
        assert_close(model[0].running_mean, 0.1 * expected)
        variances = [x.var(0)] if synced else [len(s) * s.var(0) / 7 for s in (x[:3], x[3:5], x[5:])]
        assert_close(model[0].running_var, 0.9 + 0.1 * sum(variances))


@both
def test_statistics_of_the_last_call_are_averaged_by_update_bn(synced: bool) -> None:
    batches = [normal(6, 4) for _ in range(3)]
    with replicated(nn.Sequential(nn.BatchNorm1d(4)).double(), "threads", sync_batchnorm=synced) as (plain, model):
        for each in (plain, model):
            each(batches[0])
            torch.optim.swa_utils.update_bn(batches, each)
        assert_close(model[0].running_mean, plain[0].running_mean)
        assert model[0].num_batches_tracked == 3


class ReadsStatistics(nn.Module):
    """Multiplies its output by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.running_var is not None
        scale = self.norm.running_var.clone()  # batch norm does not increment the version of what backward needs
        if self.training:
            self.norm(x)
        y: Tensor = self.linear(x) * scale
        return y


@pytest.mark.slow
@pytest.mark.timeout(120)
@both
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_replay_uses_the_statistics_from_before_the_call(synced: bool, training: bool) -> None:
    """Later calls write the statistics before the worker dies."""
    net, x = ReadsStatistics().double(), normal(6, 4)
    gradients: list[list[Tensor | None]] = []
    for kill in (False, True):
        with replicated(copy.deepcopy(net), "processes", 2, sync_batchnorm=synced) as (_, model):
            model(x)
            out = model.train(training)(x)
            model.train()
            for step in range(3):
                model(x * step)
            if kill:
                engine: Any = model._instep_engine
                os.kill(engine._pool.get(1).pid, signal.SIGKILL)
            weighted_loss(out).backward()
            gradients.append([parameter.grad for parameter in model.linear.parameters()])
            assert model.norm.num_batches_tracked == 4 + training
    for undisturbed, replayed in zip(*gradients, strict=True):
        assert undisturbed is not None
        assert replayed is not None
        assert torch.equal(replayed, undisturbed)


def test_known_statistics_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators a comparison synchronizes."""
    net = Net()
    replica = Replica(0, net, torch.device("cpu"), ParameterSharing.ALIAS)
    statistics = replica.statistics
    assert statistics is not None
    assert replica.general_state == []

    def fail(*_: Any) -> Any:
        raise AssertionError("compares values")

    monkeypatch.setattr(torch, "equal", fail)
    monkeypatch.setattr(Tensor, "item", fail)
    monkeypatch.setattr(Tensor, "cpu", fail)
    statistics.sync()
    replica.module(torch.randn(6, 4))
    written = statistics.written((), compare=False)
    assert written is not None
    assert statistics.merge([written, written._replace(blocks=())], [3, 3], synced=True)
    assert statistics.merge([written, written], [3, 3], synced=False)
    statistics.write_to_source()
    statistics.sync()
    replica.module.eval()(torch.randn(6, 4))
    assert statistics.written((), compare=False) is None
    monkeypatch.undo()
    for mine, theirs in zip(replica.module.buffers(), net.buffers(), strict=True):
        assert tensors_equal(mine, theirs)
    assert net.first.num_batches_tracked == 1
