"""Whatever changes on the source, by whatever route, is there at the next call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import instep

ENGINES = [
    ("serial", False),
    ("serial", True),
    ("threads", False),
    ("threads", True),
    ("processes", False),
    ("processes", True),
]


class Config:
    def __init__(self) -> None:
        self.scale = 1.0


class Net(nn.Module):
    """Reads something of every kind in forward, so that a stale copy of any of it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(2))
        self.gain = 1.0
        self.config = Config()
        self.loose = torch.ones(2)
        self.listed = [torch.zeros(2), "note"]
        self.plain_modules = [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x))) * self.gain * self.config.scale
        y = self.plain_modules[0](y + self.shift * self.loose + self.listed[0])
        return y if self.training else y * 2


@pytest.fixture(params=ENGINES, ids=lambda p: f"{p[0]}-{'private' if p[1] else 'aliased'}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[instep.DataParallel, Net]]:
    engine, private = request.param
    net = Net().double()
    net.loose, net.listed[0] = net.loose.double(), net.listed[0].double()
    net.plain_modules[0].double()
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine, private_copies=private, hooks="per_replica") as model:
        model(torch.randn(5, 3, dtype=torch.float64))
        yield model, net


def set_data(p: Tensor, value: Tensor) -> None:
    p.data = value


def optimizer_step(net: Net, **options: bool) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def patch(net: Net, name: str, value: object) -> None:
    setattr(net, name, value)


def buffer_in_place(net: Net) -> None:
    with torch.no_grad():
        net.shift.add_(1)


def replace_buffer(net: Net) -> None:
    net.shift = net.shift + 1


def replace_layer(net: Net) -> None:
    net.last = nn.Linear(4, 2).double()


def replace_parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))


def thaw(net: Net) -> None:
    net.first.requires_grad_(False)


CHANGES: dict[str, Callable[[Net], object]] = {
    "in place": lambda net: torch.no_grad()(net.first.weight.add_)(1),
    "data in place": lambda net: net.first.weight.data.mul_(2),
    "data replaced": lambda net: set_data(net.first.weight, torch.randn(4, 3, dtype=torch.float64)),
    "data transposed": lambda net: set_data(net.first.weight, net.first.weight.data.flip(0)),
    "optimizer": lambda net: optimizer_step(net, foreach=False),
    "fused optimizer": lambda net: optimizer_step(net, fused=True),
    "load_state_dict": lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
    "load_state_dict assign": lambda net: net.load_state_dict(
        {k: v + 1 for k, v in net.state_dict().items()}, assign=True
    ),
    "buffer in place": buffer_in_place,
    "buffer data": lambda net: net.shift.data.add_(3),
    "buffer replaced": replace_buffer,
    "mode": lambda net: net.eval(),
    "attribute": lambda net: patch(net, "gain", 3.0),
    "nested attribute": lambda net: patch(net.config, "scale", 0.5),
    "object replaced": lambda net: patch(net, "config", Config()),
    "unregistered tensor in place": lambda net: net.loose.add_(2),
    "unregistered tensor replaced": lambda net: patch(net, "loose", net.loose + 5),
    "tensor in a list": lambda net: net.listed.__setitem__(0, net.listed[0] + 7),
    "tensor in a list, in place": lambda net: net.listed[0].add_(4),
    "module in a plain list": lambda net: net.plain_modules.__setitem__(0, nn.Linear(2, 2).double()),
    "layer replaced": replace_layer,
    "parameter replaced": replace_parameter,
    "frozen": thaw,
    "hook": lambda net: net.first.register_forward_hook(lambda module, args, out: out * 2),
    "weights of two layers swapped": lambda net: net.first.weight.data.copy_(net.first.weight.data.flip(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_reaches_the_next_call(pair: tuple[instep.DataParallel, Net], change: Callable[[Net], object]) -> None:
    model, net = pair
    change(net)
    plain = copy.deepcopy(net)
    x = torch.randn(5, 3, dtype=torch.float64)
    out, expected = model(x), plain(x)
    torch.testing.assert_close(out, expected)
    out.pow(2).mean().backward()
    expected.pow(2).mean().backward()
    for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_removed_hook_does_not_run(pair: tuple[instep.DataParallel, Net]) -> None:
    model, net = pair
    x = torch.randn(5, 3, dtype=torch.float64)
    handle = net.first.register_forward_hook(lambda module, args, out: out * 2)
    doubled = model(x)
    handle.remove()
    assert not torch.allclose(model(x), doubled)
    torch.testing.assert_close(model(x), net(x))


def test_requires_grad_is_read_at_each_call(pair: tuple[instep.DataParallel, Net]) -> None:
    model, net = pair
    x = torch.randn(5, 3, dtype=torch.float64)
    for trainable in (False, True, False, True):
        net.first.requires_grad_(trainable)
        net.zero_grad()
        model(x).sum().backward()
        assert (net.first.weight.grad is not None) == trainable
        assert net.last.weight.grad is not None


def test_everything_frozen_needs_no_gradient(pair: tuple[instep.DataParallel, Net]) -> None:
    model, net = pair
    net.requires_grad_(False)
    net.plain_modules[0].requires_grad_(False)
    assert not model(torch.randn(5, 3, dtype=torch.float64)).requires_grad


def test_a_changed_dtype_reaches_the_replicas() -> None:
    net = nn.Linear(3, 2)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        assert model(torch.randn(4, 3)).dtype is torch.float32
        model.double()
        assert model(torch.randn(4, 3).double()).dtype is torch.float64
        model.bfloat16()
        assert model(torch.randn(4, 3).bfloat16()).dtype is torch.bfloat16


def test_nothing_is_sent_again_inside_frozen() -> None:
    net = nn.Linear(3, 2)
    with instep.DataParallel(net, ["cpu"] * 2, private_copies=True) as model, torch.no_grad():
        x = torch.randn(4, 3)
        before = model(x)
        with model.frozen():
            net.weight.add_(1)
            torch.testing.assert_close(model(x), before)
        torch.testing.assert_close(model(x), net(x))


def test_an_attribute_set_on_the_wrapper_is_set_on_the_module() -> None:
    net = Net()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        model.gain = 4.0
        assert net.gain == 4.0
        model.extra = nn.Linear(1, 1)
        assert "extra.weight" in net.state_dict()
        del model.extra
        assert not hasattr(net, "extra")
        x = torch.randn(4, 3)
        torch.testing.assert_close(model(x), net(x))


class Hidden(nn.Module):
    """Holds tensors where only a walk through everything finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.helper = Helper()
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("same", torch.ones(2))
        self.again = self.same
        self.pair = (self.shift, "note")
        self.add = functools.partial(torch.add, self.shift)
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("unknown", torch.tensor([float("nan"), 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.helper.scale + self.pair[0] + self.again
        return self.add(y) @ self.sparse.to_dense() + self.unknown.nan_to_num() * self.same


class Helper:
    def __init__(self) -> None:
        self.scale = 1.0
        self.tensor = torch.zeros(2)


HIDDEN: dict[str, Callable[[Hidden], object]] = {
    "nothing": lambda net: None,
    "an attribute of an object that holds a tensor": lambda net: setattr(net.helper, "scale", 5.0),
    "a buffer that is also in a tuple and a partial": lambda net: net.shift.add_(3),
    "one of two names of a buffer": lambda net: setattr(net, "same", torch.full((2,), 7.0)),
    "the tensor of two names": lambda net: net.same.add_(4),
    "both": lambda net: (setattr(net, "same", torch.full((2,), 7.0)), net.again.mul_(9)),
    "a sparse buffer": lambda net: setattr(net, "sparse", (torch.eye(2) * 3).to_sparse()),
    "a buffer with a NaN": lambda net: net.unknown[1].fill_(6),
}


@pytest.mark.parametrize(("engine", "private"), ENGINES)
@pytest.mark.parametrize("change", HIDDEN.values(), ids=HIDDEN.keys())
def test_changes_in_nested_objects_reach_the_replicas(
    engine: str, private: bool, change: Callable[[Hidden], object]
) -> None:
    net = Hidden()
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        model(x)
        for _ in range(2):
            change(net)
            out, expected = model(x), net(x)
            torch.testing.assert_close(out, expected)
        gradients = torch.autograd.grad(out.sum(), list(net.parameters()))
        for mine, theirs in zip(gradients, torch.autograd.grad(expected.sum(), list(net.parameters())), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("engine", "private"), ENGINES)
def test_a_buffer_that_starts_to_require_a_gradient(engine: str, private: bool) -> None:
    net = Hidden()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        model(torch.randn(4, 3))
        net.shift.requires_grad_()
        model(torch.randn(4, 3)).sum().backward()
        torch.testing.assert_close(net.shift.grad, torch.full((2,), 8.0))


class Stateful(nn.Module):
    """Leaves containers with tensors on itself at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.hidden = (y.detach(), y.detach() * 2)
        self.listed = [y.detach()]
        return y


@pytest.mark.parametrize(("engine", "private"), ENGINES)
def test_copies_of_replaced_containers_are_freed(engine: str, private: bool) -> None:
    net = Stateful()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        sizes = []
        for _ in range(12):
            x = torch.randn(4, 3)
            torch.testing.assert_close(model(x), net.layer(x))
            torch.testing.assert_close(net.hidden[1], net.layer(x) * 2)
            replica = model._instep_replicas.replicas[1]
            sizes.append((len(replica.tensors.state), len(replica.cloner.containers)))
        assert sizes[-1] == sizes[2]


def test_an_edit_after_frozen_is_kept_by_a_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 2)
    net.settings = {"scale": 1}  # type: ignore[assignment]
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        model(torch.randn(4, 3))
        with model.frozen():
            pass
        net.settings["scale"] = 2

        def fail() -> None:
            raise RuntimeError("no replicas")

        monkeypatch.setattr(model._instep_replicas, "sync", fail)
        with pytest.raises(RuntimeError, match="no replicas"):
            model(torch.randn(4, 3))
    assert net.settings == {"scale": 2}
