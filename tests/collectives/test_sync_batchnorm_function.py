"""Batch normalization by `torch.nn.functional.batch_norm`: layers with a forward of their own, and other modules."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import batch_norm as imported_batch_norm
from torch.utils.checkpoint import checkpoint

import instep
from instep.replicas.replica import Replica

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
TORCH_BATCH_NORM = F.batch_norm


@pytest.fixture(autouse=True)
def batch_norm_is_restored() -> Iterator[None]:
    yield
    assert F.batch_norm is TORCH_BATCH_NORM


def normal(*shape: int) -> Tensor:
    return 2 + 3 * torch.randn(*shape, dtype=torch.float64)


class NormAct(nn.BatchNorm2d):
    """Normalization and activation in one layer, with a forward of its own."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.act = nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        factor = self.momentum
        tracked = self.training and self.track_running_stats
        if tracked:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        uses_batch = self.training or self.running_mean is None
        mean, var = (self.running_mean, self.running_var) if tracked or not self.training else (None, None)
        out = F.batch_norm(input, mean, var, self.weight, self.bias, uses_batch, factor or 0.0, self.eps)
        return self.act(out)


class Shifted(nn.BatchNorm1d):
    """Calls the forward of the class that it extends."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class OwnBuffers(nn.Module):
    """No layer of torch's: buffers with other names, normalization by the functional."""

    def __init__(self, features: int, affine: bool = True) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(features)) if affine else None
        self.register_buffer("level", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.level, self.spread, self.gain, training=self.training, momentum=0.3)


class WithoutStatistics(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm and activation": (lambda: NormAct(4), (4, 3, 2)),
    "cumulative": (lambda: NormAct(4, momentum=None), (4, 3, 2)),
    "calls super": (lambda: Shifted(4), (4,)),
    "own buffers": (lambda: OwnBuffers(4), (4,)),
    "own buffers, 3-d": (lambda: OwnBuffers(4, affine=False), (4, 5)),
    "own buffers, 5-d": (lambda: OwnBuffers(4), (4, 2, 3, 2)),
    "no statistics": (WithoutStatistics, (4, 3)),
}


@each_way
@pytest.mark.parametrize("name", LAYERS)
def test_three_steps_of_every_layer(way: str, name: str) -> None:
    make, shape = LAYERS[name]
    train_and_compare(nn.Sequential(make(), nn.Tanh()), normal(7, *shape), way)


@each_way
def test_shards_of_one_value_per_channel(way: str) -> None:
    train_and_compare(nn.Sequential(nn.Linear(4, 4), OwnBuffers(4), Shifted(4)), normal(3, 4), way)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_options_of_a_layer_with_its_own_forward(options: dict[str, Any]) -> None:
    train_and_compare(nn.Sequential(NormAct(4, **options)), normal(7, 4, 3, 2), "threads", private_copies=True)


@each_way
def test_a_layer_registered_twice_and_a_frozen_one(way: str) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.again = NormAct(4)
            self.mix, self.frozen = nn.Conv2d(4, 4, 1), NormAct(4)
            self.frozen.running_mean.normal_()

        def train(self, mode: bool = True) -> Blocks:
            super().train(mode)
            self.frozen.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.again(self.mix(self.first(x))))

    net = Blocks().train()
    before = net.frozen.running_mean.double().clone()
    train_and_compare(net, normal(7, 4, 3, 2), way)
    assert_close(net.frozen.running_mean, before)


@each_way
def test_instance_norm_keeps_each_samples_statistics(way: str) -> None:
    net = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.Tanh())
    train_and_compare(net, normal(7, 4, 5), way)


def test_channels_last_and_low_precision() -> None:
    x = normal(7, 4, 3, 2).float()
    with replicated(NormAct(4), "threads") as (plain, model):
        outs = [each(x.to(memory_format=torch.channels_last)) for each in (plain, model)]
        assert outs[1].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
        for context in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
            with context:
                outs = [each(x.bfloat16()) for each in (plain, model)]
            assert outs[1].dtype == outs[0].dtype == torch.bfloat16
            torch.testing.assert_close(outs[1], outs[0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-4)
    with replicated(NormAct(4).bfloat16(), "threads") as (plain, model):
        outs = [each(x.bfloat16()) for each in (plain, model)]
        assert outs[1].dtype == torch.bfloat16
        torch.testing.assert_close(outs[1], outs[0], rtol=0.02, atol=0.02)


def test_written_running_statistics_are_reported_to_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators, where values are not compared, these are the state that a forward has written."""
    reports: list[tuple[set[int], set[int]]] = []
    read = Replica.written_state

    def record(self: Replica) -> Any:
        buffers = {id(buffer) for name, buffer in self.module.named_buffers() if "num" not in name}
        reports.append((set(self.statistics_written), buffers))
        return read(self)

    monkeypatch.setattr(Replica, "written_state", record)
    with replicated(nn.Sequential(OwnBuffers(4), nn.BatchNorm1d(4)).double(), "threads", replicas=2) as (_, model):
        model(normal(7, 4))
        assert len(reports) == 2
        assert all(written == buffers for written, buffers in reports)
        model.eval()(normal(7, 4))
    assert [written for written, _ in reports[2:]] == [set(), set()]


def test_double_backward_on_serial() -> None:
    x = normal(7, 4).requires_grad_()
    with replicated(nn.Sequential(nn.Linear(4, 4), OwnBuffers(4), nn.Tanh()).double(), "serial") as (plain, model):
        for each in (plain, model):
            (grad,) = torch.autograd.grad(weighted_loss(each(x)), x, create_graph=True)
            grad.square().sum().backward()
        assert_same_gradients(model, plain)


def test_under_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), WithoutStatistics(), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    x = normal(7, 4)
    with replicated(Checkpointed().double(), "threads") as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)


class Routed(nn.Module):
    """Normalizes some of the samples."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros_like(x).index_put((mask,), self.norm(x[mask]))


@pytest.mark.parametrize("make", [Shifted, OwnBuffers, nn.BatchNorm1d])
def test_replicas_without_samples_and_one_value_in_the_whole_batch(make: Callable[[int], nn.Module]) -> None:
    x, mask = normal(6, 4), torch.tensor([1, 1, 1, 0, 0, 0]).bool()
    with replicated(Routed(make(4)).double(), "threads") as (plain, model):
        outs = [each(x, mask) for each in (plain, model)]
        for out in outs:
            weighted_loss(out).backward()
        assert_close(outs[1], outs[0])
        assert_same_gradients(model, plain)
        messages = []
        for each in (plain, model):
            with pytest.raises(ValueError, match="Expected more than 1 value per channel") as error:
                each(x, torch.tensor([0, 0, 0, 0, 1, 0]).bool())
            messages.append(str(error.value))
        assert messages[1] == messages[0]
        assert_close(model.norm.state_dict(), {**plain.norm.state_dict(), **tracked(model.norm)})


def tracked(layer: nn.Module) -> dict[str, Any]:
    """The counter of a layer: a failed call does not increment it, unlike on one device."""
    return {name: value for name, value in layer.state_dict().items() if name == "num_batches_tracked"}


def test_tensors_of_wrong_size_are_torchs_own_error() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, x.new_ones(1), training=True)

    with replicated(Wrong(), "threads") as (plain, model):
        for each in (plain, model):
            with pytest.raises(RuntimeError, match="weight"):
                each(normal(7, 4))


class StandardizedConv(nn.Conv2d):
    """Normalizes its weights by the batch norm kernel."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


@pytest.mark.parametrize("way", ENGINE_MODES[:3])  # it counts in this process
def test_weight_standardization_exchanges_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("an exchange")

    monkeypatch.setattr("instep.collectives.sync_batchnorm.normalize", fail)
    train_and_compare(nn.Sequential(StandardizedConv(3, 4, 2), nn.Tanh()), normal(5, 3, 4, 4), way, replicas=2)


# What is not synchronized.


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_wrappers_with_and_without_synchronization(way: str) -> None:
    x = normal(7, 4, 3, 2)
    net = nn.Sequential(NormAct(4)).double()
    with (
        replicated(net, way) as (plain, model),
        replicated(net, way, sync_batchnorm=False) as (_, other),
    ):
        shards = [copy.deepcopy(plain)(shard) for shard in (x[:3], x[3:5], x[5:])]
        for step in range(2):
            assert_close(model(x), plain(x))
            if step:
                other(x)
            else:
                with pytest.warns(UserWarning, match="sync_batchnorm=False"):
                    assert_close(other(x), torch.cat(shards))


class Standardize(nn.Module):
    """Batch normalization without torch's layers and without running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True) if self.training else x


@pytest.mark.parametrize("way", ["threads", "processes"])
def test_modules_of_other_classes_warn_once_without_synchronization(way: str) -> None:
    x = normal(7, 4)
    with replicated(Standardize(), way, sync_batchnorm=False) as (plain, model):
        model.eval()
        assert_close(model(x), x)  # warnings are errors: nothing is said in evaluation
        model.train()
        with pytest.warns(UserWarning, match="sync_batchnorm=False: .* each replica's shard"):
            assert_close(model(x), torch.cat([plain(shard) for shard in (x[:3], x[3:5], x[5:])]))
        model(x)


def test_plain_models_in_other_threads_are_not_synchronized() -> None:
    x, entered, leave = normal(6, 4), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if instep.replica().count > 1:
                entered.set()
                assert leave.wait(20)
            return F.batch_norm(x, None, None, training=True)

    with instep.DataParallel(Waits(), ["cpu"] * 2, engine="threads") as model:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        assert entered.wait(20)
        assert F.batch_norm is not TORCH_BATCH_NORM
        assert_close(F.batch_norm(x, None, None, training=True), TORCH_BATCH_NORM(x, None, None, training=True))
        leave.set()
        thread.join()
    assert F.batch_norm is TORCH_BATCH_NORM


class Arithmetic(nn.BatchNorm1d):
    """Computes batch statistics itself."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        var, mean = torch.var_mean(input, 0, correction=0)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        return (input - mean) / (var + self.eps).sqrt()


class Imported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return imported_batch_norm(x, None, None, training=True)


class Halves(nn.BatchNorm1d):
    """Normalizes the halves of its batch separately."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.second = nn.BatchNorm1d(features)

    def forward(self, input: Tensor) -> Tensor:
        first, second = input.chunk(2)
        return torch.cat([super().forward(first), self.second(second)])


@pytest.mark.parametrize("layer", [Arithmetic(4), Imported(), Halves(4)], ids=lambda layer: type(layer).__name__)
def test_other_arithmetic_is_an_error(layer: nn.Module) -> None:
    with (
        replicated(nn.Sequential(layer).double(), "threads") as (_, model),
        pytest.raises(instep.MergeError, match="depend on other samples"),
    ):
        model(normal(8, 4))


def test_other_arithmetic_without_the_probe_shows_in_the_running_statistics() -> None:
    with (
        replicated(nn.Sequential(Arithmetic(4)).double(), "threads", probe=False) as (_, model),
        pytest.raises(instep.StateError, match=r"'0\.running_mean' differs between replicas"),
    ):
        model(normal(7, 4))


# Compiled code.


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("make", [Shifted, OwnBuffers])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_modules_are_synchronized(engine: str, make: Callable[[int], nn.Module]) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(4, 4), make(4), nn.Tanh()).double()
    plain = copy.deepcopy(net)
    net.compile(backend="aot_eager")
    x = normal(7, 4)
    assert_close(net(x), plain(x))  # now there is compiled code without synchronization
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for _ in range(3):
            outs = [each(x) for each in (plain, model)]
            for out in outs:
                weighted_loss(out).backward()
            assert_close(outs[1], outs[0])
            assert_same_gradients(model, plain)
            assert_close(model.state_dict(), plain.state_dict())
    counters.clear()
    assert_close(net(x), plain(x))
    assert not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_modules_in_eval_have_no_graph_break() -> None:
    torch._dynamo.reset()
    counters.clear()
    net = nn.Sequential(nn.Linear(4, 4), OwnBuffers(4), nn.Tanh()).double().eval()
    plain, x = copy.deepcopy(net), normal(7, 4)
    net.compile(backend="aot_eager")
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        assert_close(model(x), plain(x))
    assert not counters["graph_break"]
    torch._dynamo.reset()
    fresh = nn.Sequential(OwnBuffers(4)).double()
    fresh.compile(backend="eager", fullgraph=True)
    assert_close(fresh(x), copy.deepcopy(fresh)(x))
    torch._dynamo.reset()
