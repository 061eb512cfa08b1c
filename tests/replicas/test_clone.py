"""A replica is the module around other tensors, whatever the module is made of."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import instep
from instep.replicas.replica import Replica
from instep.replicas.tensors import ParameterSharing

CPU = torch.device("cpu")


def replica_of(module: nn.Module, *, alias: bool = True) -> Replica:
    return Replica(0, module, CPU, ParameterSharing.ALIAS if alias else ParameterSharing.COPY)


def assert_parity(net: nn.Module, x: Tensor, engine: str = "threads") -> None:
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        out, expected = model(x), plain(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        expected.sum().backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_parameters_are_real_leaves_that_share_memory() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    replica = replica_of(net)
    for mine, theirs in zip(replica.module.parameters(), net.parameters(), strict=True):
        assert isinstance(mine, nn.Parameter)
        assert mine.is_leaf
        assert mine is not theirs
        assert mine.data_ptr() == theirs.data_ptr()


def test_private_parameters_share_no_memory() -> None:
    net = nn.Linear(3, 4)
    replica = replica_of(net, alias=False)
    assert replica.module.weight.data_ptr() != net.weight.data_ptr()
    assert torch.equal(replica.module.weight, net.weight)


def test_buffers_and_frozen_parameters_are_copies() -> None:
    net = nn.BatchNorm1d(3)
    net.bias.requires_grad_(False)
    replica = replica_of(net)
    assert replica.module.running_mean.data_ptr() != net.running_mean.data_ptr()
    assert replica.module.bias.data_ptr() != net.bias.data_ptr()
    assert isinstance(replica.module.bias, nn.Parameter)


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    module = replica_of(net).module
    assert module[0].weight is module[1].weight
    assert_parity(net, torch.randn(5, 3))


def test_attributes_of_a_parameter_are_kept() -> None:
    net = nn.Linear(2, 2)
    net.weight.no_decay = True
    assert replica_of(net).module.weight.no_decay is True


class Closed(nn.Module):
    """A forward that was replaced by a closure over the module and its layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layer = nn.Linear(3, 3)
        self.forward = lambda x: layer(x) * self.scale()

    def scale(self) -> Tensor:
        return self.layer.bias.sum()


def test_closures_reference_the_replica() -> None:
    net = Closed()
    module = replica_of(net).module
    cells = [cell.cell_contents for cell in module.forward.__closure__]
    assert module in cells
    assert net not in cells
    assert net.layer not in cells
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        x = torch.randn(4, 3)
        expected = nn.functional.linear(x, net.layer.weight, net.layer.bias) * net.layer.bias.sum()
        torch.testing.assert_close(model(x), expected)
        model(x).sum().backward()
        mine = net.layer.weight.grad.clone()
        net.zero_grad()
        expected.sum().backward()
        torch.testing.assert_close(mine, net.layer.weight.grad)


def test_hooks_that_reference_the_source_are_copied() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].register_forward_hook(lambda module, args, out: out + net[1].bias)
    net[1].register_forward_pre_hook(functools.partial(shifted, net[0]))
    with instep.DataParallel(net, ["cpu"] * 2, hooks="per_replica") as model:
        x = torch.randn(4, 3)
        out, expected = model(x), net(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        mine = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        expected.sum().backward()
        for grad, p in zip(mine, net.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad)


def shifted(layer: nn.Linear, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + layer.bias,)


class Owner:
    """An object that is no module and points back at one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reference = weakref.ref(module)
        self.method = module.extra_repr
        self.again = self


def test_objects_that_reference_the_module_are_copied() -> None:
    net = nn.Linear(2, 2)
    net.owner = Owner(net)
    net.bound = net.owner.method
    module = replica_of(net).module
    assert module.owner is not net.owner
    assert module.owner.module is module
    assert module.owner.reference() is module
    assert module.owner.again is module.owner
    assert module.bound.__self__ is module


def test_other_objects_are_shared() -> None:
    net = nn.Linear(2, 2)
    net.config = types.SimpleNamespace(nested={"a": [1, 2]})
    module = replica_of(net).module
    assert module.config is net.config


def numbers() -> Iterator[int]:
    yield 1


def test_objects_that_cannot_be_copied_are_shared(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()
    net.numbers = numbers()
    with (tmp_path / "log").open("w") as file, instep.DataParallel(net, ["cpu"] * 2) as model:
        net.file = file
        x = torch.randn(4, 2)
        torch.testing.assert_close(model(x), net(x))
        assert model._instep_replicas.replicas[1].module.file is file


class Child(nn.Module):
    """Reaches its parent through a proxy."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent, self.layer = weakref.proxy(parent), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.parent.first(x))
        return out


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.child = nn.Linear(4, 5), Child(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.child(x)
        return out


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_weak_proxies_reference_the_replica(engine: str) -> None:
    net, x = Parent(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=True) as model:
        model(x).sum().backward()
        mine = net.first.weight.grad.clone()
        net.zero_grad()
        net(x).sum().backward()
        torch.testing.assert_close(mine, net.first.weight.grad)
        replica: Any = model._instep_replicas.replicas[1].module
        assert replica.child.parent.first is replica.first


class Guarded(nn.Module):
    """Holds a lock in the same object as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.store = types.SimpleNamespace(lock=threading.Lock(), bias=torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with self.store.lock:
            return self.layer(x) + self.store.bias


def test_an_object_with_a_lock_and_a_tensor() -> None:
    net = Guarded()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        x = torch.randn(4, 2)
        torch.testing.assert_close(model(x), net(x))
        net.store.bias.add_(3)
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_parametrizations(engine: str) -> None:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), parametrizations.orthogonal(nn.Linear(4, 4)))
    assert_parity(net.double(), torch.randn(5, 3).double(), engine)


def test_a_user_parametrization() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    assert_parity(layer, torch.randn(5, 3))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_parameter_lists_and_dicts_are_copied(engine: str) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})

        def forward(self, x: Tensor) -> Tensor:
            assert len(list(self.parameters())) == 4
            return x * sum(self.many) + self.named["a"]

    assert_parity(Bag(), torch.randn(5, 3), engine)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_lazy_modules_are_initialized_on_the_source(engine: str) -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        x = torch.randn(6, 3)
        torch.testing.assert_close(model(x), net(x))
        torch.testing.assert_close(model(x), net(x))
        assert len(model._instep_replicas.replicas) == 2


def test_a_clone_made_in_inference_mode_trains_afterwards() -> None:
    net = nn.BatchNorm1d(3).eval()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        x = torch.randn(4, 3)
        with torch.inference_mode():
            model(x)
        model(x).sum().backward()
        assert net.weight.grad is not None


def test_lists_that_reference_each_other() -> None:
    net = nn.Linear(2, 2)
    net.ring = [net, []]
    net.ring[1].append(net.ring)
    module = replica_of(net).module
    assert module.ring[0] is module
    assert module.ring[1][0] is module.ring


def test_attributes_that_are_named_like_hooks() -> None:
    net = nn.Linear(2, 2)
    net.feature_hooks = []
    net._require_grads_hooks = [net.bias]
    net._forward_hooks_note = "a word"
    module = replica_of(net).module
    assert module.feature_hooks is net.feature_hooks
    assert module._require_grads_hooks[0] is module.bias
    assert module._forward_hooks_note == "a word"


def test_attributes_of_a_buffer_are_kept() -> None:
    net = nn.BatchNorm1d(2)
    net.running_mean.unit = "metre"
    assert replica_of(net).module.running_mean.unit == "metre"


def test_a_generator_of_the_module_repeats() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = x + torch.rand(x.shape, generator=self.generator)
            return x

    net = Noisy()
    with instep.DataParallel(net, ["cpu"] * 3) as model:
        runs = []
        for _ in range(3):
            net.generator.manual_seed(1)
            runs.append(model(torch.zeros(6, 4)))
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[1], runs[2])


@pytest.mark.filterwarnings("ignore:Pickle, copy:DeprecationWarning")  # an iterator on its way to a worker
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_an_iterator_advances_once_per_call(engine: str) -> None:
    class Scheduled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(self.schedule)

    net, plain = Scheduled(3, 2), Scheduled(3, 2)
    plain.load_state_dict(net.state_dict())
    net.schedule, plain.schedule = itertools.count(1), itertools.count(1)
    x = torch.randn(6, 3)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        with pytest.warns(UserWarning, match="because forward uses 'schedule'"):
            first = model(x)
        torch.testing.assert_close(first, plain(x))
        for _ in range(3):
            torch.testing.assert_close(model(x), plain(x))
