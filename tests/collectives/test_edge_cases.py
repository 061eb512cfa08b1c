"""Replicas that call different collectives, fail, or never arrive: an error, and no deadlock."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import instep

from ..replica_helpers import (
    ENGINE_MODES,
    FunctionModule,
    assert_close,
    assert_same_gradients,
    batch,
    replicated,
    train,
    weighted_loss,
)

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)
each_engine = pytest.mark.parametrize("way", ["serial", "threads", "processes"])


def fails(body: Callable[..., Any], way: str, error: type[BaseException], match: str, size: int = 7) -> None:
    """A call fails at once, leaves nothing, and the next one works."""
    net = FunctionModule(body)
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
def test_a_collective_after_a_replica_returned(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return instep.all_reduce(x, "max") if len(x) == 3 else x

    fails(body, way, instep.CollectiveError, r"replica 0 on cpu called all_reduce\(op='max'\).* returned from forward")


@each_way
def test_a_collective_that_only_one_replica_calls(way: str) -> None:
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
def test_replicas_that_call_different_collectives(way: str, other: Callable[..., Any]) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        other(x) if instep.replica().index == 1 else instep.all_reduce(x.sum(0))
        return x

    match = r"(?s)different collectives.*replica . on cpu called all.*replica . on cpu called all"
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
def test_leaves_that_cannot_be_combined(way: str) -> None:
    fails(lambda self, x: instep.all_gather(("a" * len(x), x)), way, instep.CollectiveError, "leaf '0' is 'aaa'")
    fails(lambda self, x: instep.all_reduce({"k": str(len(x))}), way, instep.CollectiveError, "leaf 'k' is '3'")
    fails(lambda self, x: instep.all_gather({len(x): 1}), way, instep.CollectiveError, "different collectives")
    fails(lambda self, x: instep.all_reduce(x.sum(0) > 0), way, instep.CollectiveError, "not apply to bools")
    fails(
        lambda self, x: instep.all_reduce(x.sum(0).long(), "mean"),
        way,
        instep.CollectiveError,
        "apply to torch.int64",
    )
    fails(lambda self, x: instep.all_gather({"s": x.to_sparse()}), way, instep.CollectiveError, "leaf 's'")

    def packs(self: Any, x: Tensor) -> PackedSequence:
        return instep.all_gather(pack_sequence([x]))

    fails(packs, way, instep.CollectiveError, "PackedSequence")


def test_an_exception_in_one_backward_stops_the_others() -> None:
    def explode(gradient: Tensor) -> None:
        raise ZeroDivisionError

    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x) * instep.all_reduce(self.layer(x).sum(0))
        z = z + instep.all_gather(z).mean(0)
        if instep.replica().index == 1:
            z.register_hook(explode)
        return z

    with replicated(FunctionModule(body), "threads", hooks="per_replica") as (_, model):
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
    with replicated(FunctionModule(body), way) as (plain, model):
        timer = threading.Timer(0.15, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        timer.join()
        assert_close(model(x), plain(x))


def test_an_interruption_of_a_caller_that_waits_on_serial() -> None:
    """The caller's thread waits as replica 0 while another replica runs."""

    def body(self: Any, x: Tensor) -> Tensor:
        if instep.replica().index == 2:
            time.sleep(0.5)
        return x - instep.all_reduce(x.mean(0), "mean")

    x = batch()
    with replicated(FunctionModule(body), "serial") as (plain, model):
        timer = threading.Timer(0.15, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        timer.join()
        assert_close(model(x), plain(x))


@each_way
def test_collectives_in_other_methods(way: str) -> None:
    class Has(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def centred(self, x: Tensor) -> Tensor:
            return x - instep.all_reduce(x.mean(0), "mean")

    x = batch()
    with replicated(Has(), way) as (plain, model):
        assert_close(model.call("centred", x), plain.centred(x))


@each_engine
def test_collectives_of_serialized_replicas(way: str) -> None:
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
            weighted_loss(each(x)).backward()
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

    with (
        replicated(FunctionModule(body), "threads", 2) as (plain, one),
        replicated(FunctionModule(body), "threads", 3) as (other, two),
    ):
        threads = [threading.Thread(target=work, args=pair) for pair in ((one, plain), (two, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


@each_way
def test_a_long_wait_warns_where_the_other_replicas_are(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.engines.rendezvous.WARN_AFTER_SECONDS", 0.1)
    monkeypatch.setattr("instep.engines.processes.lifecycle.watchdog.WARN_SECONDS", 0.1)
    words = "all_reduce.*has waited \\d s for replica 1 on cpu"
    if way == "processes":
        words = "replica 1 on cpu has not replied"

    def dawdle() -> None:
        time.sleep(1.2)

    def body(self: Any, x: Tensor) -> Tensor:
        if instep.replica().index == 1:
            dawdle()
        return x - instep.all_reduce(x.mean(0), "mean")

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        with pytest.warns(UserWarning, match=f"(?s){words}.*in dawdle"):
            out = model(x)
        assert_close(out, plain(x))


def holding_a_lock(self: Any, x: Tensor) -> Tensor:
    if not self.careless:
        return x - instep.all_reduce(x.mean(0), "mean")
    with self.lock:  # the others need it to come here
        return x - instep.all_reduce(x.mean(0), "mean")


@pytest.mark.filterwarnings("ignore:.*has waited:UserWarning")
def test_replicas_that_deadlock_on_a_lock_fail_with_a_timeout() -> None:
    net = FunctionModule(holding_a_lock)
    net.lock, net.careless = threading.Lock(), True
    x = batch()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", timeout=0.5, probe=False) as model:
        with pytest.raises(instep.CollectiveError, match=r"(?s)all_reduce.*has waited.*made no progress.*self\.lock"):
            model(x)
        net.careless = False
        assert_close(model(x), net(x))


@pytest.mark.filterwarnings("ignore:.*has waited:UserWarning")
def test_a_replica_that_never_arrives_fails_with_a_timeout() -> None:
    event = threading.Event()

    def body(self: Any, x: Tensor) -> Tensor:
        if self.stops and instep.replica().index == 1:
            event.wait(20)
        return x - instep.all_reduce(x.mean(0), "mean")

    net, x = FunctionModule(body), batch()
    net.stops = True
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", timeout=0.5, probe=False) as model:
        started = time.monotonic()
        with pytest.raises(instep.CollectiveError, match=r"(?s)has waited.*for replica 1 on cpu.*event\.wait"):
            model(x)
        assert time.monotonic() - started < 10
        event.set()
        net.stops = False
        assert_close(model(x), net(x))


@pytest.mark.filterwarnings("ignore:.*has waited:UserWarning")
def test_a_slow_replica_that_makes_progress_does_not_time_out() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        if instep.replica().index == 1:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                pass
        return x - instep.all_reduce(x.mean(0), "mean")

    net, x = FunctionModule(body), batch()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", timeout=1.2, probe=False) as model:
        assert_close(model(x), net(x))
