"""Calls with interruptions, modes, context variables, checkpoints and shared threads."""

from __future__ import annotations

import contextvars
import copy
import signal
import threading
import time
import traceback

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import instep

ENGINES = ["serial", "threads", "processes"]


class Waits(nn.Module):
    """Its backward waits; as long as `armed`, it is interrupted meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.armed = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * 1
        if self.armed:
            y.register_hook(wait)
        return y


def wait(gradient: Tensor) -> None:
    time.sleep(0.3)


def test_an_interrupted_backward_leaves_nothing_for_the_next_one() -> None:
    net = Waits()
    plain = copy.deepcopy(net)
    plain.armed = False
    x = torch.randn(4, 3)
    with instep.DataParallel(net, ["cpu"] * 2, hooks="per_replica") as model:
        loss = model(x).sum()
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        timer.join()
        assert net.layer.weight.grad is None
        net.armed = False
        model(x).sum().backward()
        plain(x).sum().backward()
        torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


def test_an_error_in_backward_names_the_replica() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) * 1
            if len(x) == 2:
                y.register_hook(fail)
            return y

    with instep.DataParallel(Fails(), ["cpu"] * 2, hooks="per_replica") as model:
        with pytest.raises(ZeroDivisionError) as caught:
            model(torch.randn(5, 3)).sum().backward()
        assert "raised in replica 1 on cpu" in "".join(traceback.format_exception(caught.value))


def fail(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_no_sync_leaves_autograd_grad_alone() -> None:
    net = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
        with model.no_sync():
            model(x).sum().backward()
            found = torch.autograd.grad(model(x).sum(), list(net.parameters()))
            model(x).sum().backward(inputs=[net.bias])
            assert net.weight.grad is None
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(net.weight.grad, expected[0])
        torch.testing.assert_close(net.bias.grad, expected[1] * 2)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_state_is_right_inside_frozen(engine: str) -> None:
    net = Counts()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, state={"seen": "sum"}) as model, model.frozen():
        for _ in range(3):
            model(torch.randn(4, 3))
        assert net.seen == 12


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_wins_over_equal_changes(engine: str) -> None:
    net = Counts()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, state={"seen": "sum"}) as model:
        model(torch.randn(6, 3))
        assert net.seen == 6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracing_and_counting_modes_see_the_whole_call(engine: str) -> None:
    net = nn.Linear(3, 2)
    x, other = torch.randn(4, 3), torch.randn(6, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        with torch.no_grad():
            traced = torch.jit.trace(model, x, check_trace=False)
        torch.testing.assert_close(traced(other), net(other))
        counter = FlopCounterMode(display=False)
        with counter:
            model(x)
        assert counter.get_total_flops() == 2 * 4 * 3 * 2


level = contextvars.ContextVar("level", default=0)


@pytest.mark.parametrize("engine", ["serial", "threads"])  # they belong to a process
def test_context_variables_reach_the_replicas(engine: str) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * level.get()

    with instep.DataParallel(Reads(), ["cpu"] * 2, engine=engine) as model:
        token = level.set(3)
        assert torch.equal(model(torch.ones(4)), torch.full((4,), 3.0))
        level.reset(token)
        assert torch.equal(model(torch.ones(4)), torch.zeros(4))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_used_in_inference_mode_trains_afterwards(engine: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        x = torch.randn(4, 3)
        with torch.inference_mode(), model.frozen():
            model(x)
        net[1].running_mean.add_(1)
        with torch.inference_mode():
            model(x)
        out = model(x)
        torch.testing.assert_close(out, net(x))
        out.sum().backward()
        assert net[0].weight.grad is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_may_empty_its_batch(engine: str) -> None:
    class Pops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.layer(batch.pop("x"))

    net = Pops()
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4)}
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        out = model(batch)
        torch.testing.assert_close(out, net.layer(batch["x"]))
        out.sum().backward()


def test_wrappers_with_different_replica_counts_share_threads() -> None:
    counts: dict[str, list[int]] = {"two": [], "four": []}

    class Asks(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            counts[self.name].append(torch.get_num_threads())
            return x

    mine = torch.get_num_threads()
    two, four = Asks("two"), Asks("four")
    try:
        torch.set_num_threads(4)
        with instep.DataParallel(two, ["cpu"] * 2) as pair, instep.DataParallel(four, ["cpu"] * 4) as crowd:
            for model in (pair, crowd, pair):
                model(torch.randn(8))
        assert counts == {"two": [2] * 4, "four": [1] * 4}
    finally:
        torch.set_num_threads(mine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_written_through_data_is_detected_and_restored(engine: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight.data.mul_(0.5)
            return self.layer(x)

    net = Writes()
    before = net.layer.weight.detach().clone()
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.StateError, match=r"wrote to the trainable parameter 'layer\.weight'"),
    ):
        model(torch.randn(4, 3))
    assert torch.equal(net.layer.weight, before)


class Drops(nn.Module):
    """Dropout inside checkpointed regions: recomputing must draw the same numbers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def part(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        return self.first(x) * kept

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=self.reentrant)
        kept = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        return self.second(x) * kept, kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_same_draws(reentrant: bool) -> None:
    """The gradient is that of the numbers that forward drew: moving a weight a little moves the loss as it says."""
    net = Drops(reentrant).double()
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(8, 8, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 4) as model:
        for seed in range(5):

            def loss(step: float, seed: int = seed) -> Tensor:
                torch.manual_seed(seed)
                with torch.no_grad():
                    net.first.weight.add_(direction, alpha=step)
                return model(x)[0].sum()

            net.zero_grad()
            loss(0.0).backward()
            slope = (net.first.weight.grad * direction).sum()
            ahead, behind = loss(1e-6).detach(), loss(-2e-6).detach()
            loss(1e-6)
            torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-5)


def test_the_same_seed_gives_the_same_draws_and_replicas_differ() -> None:
    with instep.DataParallel(Drops(False), ["cpu"] * 2) as model:
        x = torch.ones(4, 8)
        masks = []
        for _ in range(3):
            torch.manual_seed(3)
            masks.append(model(x)[1])
        assert torch.equal(masks[0], masks[1])
        assert torch.equal(masks[1], masks[2])
        assert not torch.equal(masks[0][:2], masks[0][2:])


class Grows(nn.Module):
    """Makes its layer, a hook and a buffer when it is first called, or at every call."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always
        self.layer: nn.Module | None = None
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None or self.always:
            generator = torch.Generator().manual_seed(0)
            self.layer = nn.Linear(3, 2)
            with torch.no_grad():
                self.layer.weight.copy_(torch.randn(2, 3, generator=generator))
                self.layer.bias.zero_()
            self.layer.register_forward_hook(lambda module, args, out: out * 2)
        if self.late is None:
            self.late = torch.ones(2)
        return self.layer(x) + self.late


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_creates_its_layers_in_the_first_call(engine: str) -> None:
    net = Grows(always=False)
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, hooks="per_replica") as model:
        for _ in range(3):
            x = torch.randn(4, 3)
            torch.testing.assert_close(model(x), plain(x))
        assert [len(shards) for shards in (model._instep_replicas.replicas,)] == [2]
        assert len(net.layer._forward_hooks) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_that_creates_layers_in_every_call_runs_on_one_device_with_a_warning(engine: str) -> None:
    net = Grows(always=True)
    plain = copy.deepcopy(net)
    x = torch.randn(4, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, hooks="per_replica") as model:
        torch.testing.assert_close(model(x), plain(x))
        with pytest.warns(UserWarning, match="calls run on one device because every forward adds"):
            torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch", [4, 5, 6])
def test_a_returned_weight_is_the_parameter_of_the_module(engine: str, batch: int) -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3))
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x @ self.weight.T, self.weight, self.scale

    net = Shows()
    plain = copy.deepcopy(net)
    x = torch.randn(batch, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        out, expected = model(x), plain(x)
        assert out[1] is net.weight
        assert out[2] is net.scale
        (out[0].sum() + out[1].pow(2).sum()).backward()
        (expected[0].sum() + expected[1].pow(2).sum()).backward()
        torch.testing.assert_close(net.weight.grad, plain.weight.grad)


def test_cached_parametrizations_stay_in_one_thread() -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with instep.DataParallel(net, ["cpu"] * 2) as model, nn.utils.parametrize.cached():
        for _ in range(5):
            x = torch.randn(4, 3)
            torch.testing.assert_close(model(x), net(x))


class Running(nn.Module):
    """Keeps totals of as many features as a shard has samples: in a buffer, re-assigned, and unregistered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("total", torch.zeros(2))
        self.loose = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum(0)
        self.loose += x.sum(0)
        return self.norm(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_state_of_the_size_of_a_shard_is_not_split(engine: str) -> None:
    x = torch.randn(4, 2)
    with instep.DataParallel(Running(), ["cpu"] * 2, engine=engine) as model:
        with pytest.raises(instep.StateError, match="state="):
            model(x)
        assert model.total.eq(0).all()
        assert model.loose.eq(0).all()
        assert model.norm.running_mean.eq(0).all()
    rules = {"total": "sum", "loose": "sum", "norm.running_*": "mean"}
    with instep.DataParallel(Running(), ["cpu"] * 2, engine=engine, state=rules) as model:
        model(x)
        model(x)
        torch.testing.assert_close(model.total, x.sum(0) * 2)
        torch.testing.assert_close(model.loose, x.sum(0) * 2)
        assert model.norm.num_batches_tracked == 2
