"""The autograd node between the caller's graph and the replicas' graphs."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.autograd.bridge import CallGraph
from instep.engines.thread_pool import is_replica_thread


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


@pytest.fixture(params=[False, True], ids=["aliased", "private"])
def model(net: nn.Module, request: pytest.FixtureRequest) -> Iterator[instep.DataParallel]:
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", private_copies=request.param) as wrapped:
        yield wrapped


def batch() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64)


def test_a_second_backward_raises_the_error_of_torch(model: instep.DataParallel) -> None:
    loss = model(batch()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_error_names_both_alternatives(model: instep.DataParallel) -> None:
    x = batch().requires_grad_()
    with pytest.raises(instep.BridgeError, match=r"model\.call\('penalty', \.\.\.\).*engine='serial'") as caught:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert "create_graph" in str(caught.value)


class Leaky(nn.Module):
    """Lets a tensor out by a list that the module does not own."""

    def __init__(self, out: list[Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.keep = out.append

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.keep(y)
        return y


def test_a_tensor_that_escapes_forward_cannot_be_differentiated() -> None:
    out: list[Tensor] = []
    net = Leaky(out)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        model(torch.randn(4, 3))
        with pytest.raises(instep.BridgeError, match="outside of the backward of its call"):
            sum(y.sum() for y in out).backward()
        assert net.layer.weight.grad is None


def test_a_call_is_freed_with_its_graph(model: instep.DataParallel) -> None:
    def spans() -> int:
        return sum(isinstance(item, CallGraph) for item in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = spans()
        out = model(batch())
        assert spans() == before + 1
        del out
        assert spans() == before  # at once, not when the collector comes by
        loss = model(batch()).sum()
        loss.backward()
        del loss
        assert spans() == before
    finally:
        gc.enable()


def test_the_inner_graph_is_freed_by_backward(net: nn.Module) -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.layer(x))

    kept: list[weakref.ref[object]] = []
    with instep.DataParallel(Big(), ["cpu"] * 2) as model:

        class Sentinel:
            pass

        def pack(tensor: Tensor) -> object:
            held = Sentinel()
            kept.append(weakref.ref(held))
            return held, tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
            loss = model(torch.randn(4, 3)).sum()
        assert kept
        assert all(reference() is not None for reference in kept)
        loss.backward()
        gc.collect()
        assert all(reference() is None for reference in kept)


@pytest.mark.slow
def test_nothing_grows_over_a_thousand_calls() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with instep.DataParallel(net, ["cpu"] * 2) as model:

        def step(count: int) -> None:
            for index in range(count):
                out = model(torch.randn(4, 3))
                if index % 3:
                    out.sum().backward()

        step(100)
        gc.collect()
        before, threads = len(gc.get_objects()), threading.active_count()
        step(1000)
        gc.collect()
        assert len(gc.get_objects()) - before < 50
        assert threading.active_count() <= threads


class UsesCollectives(nn.Module):
    """Passes only when every replica is in forward, and in backward, at the same time."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.forwards = threading.Barrier(parties, timeout=20)
        self.backwards = threading.Barrier(parties, timeout=20)

    def forward(self, x: Tensor) -> Tensor:
        assert is_replica_thread()
        self.forwards.wait()
        y = self.layer(x)
        y.register_hook(self.meet)
        return y

    def meet(self, gradient: Tensor) -> None:
        self.backwards.wait()


def test_cpu_replicas_run_forward_and_backward_at_the_same_time() -> None:
    with instep.DataParallel(UsesCollectives(3), ["cpu"] * 3, hooks="per_replica") as model:
        model(torch.randn(6, 3)).sum().backward()
        assert model.layer.weight.grad is not None


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.get_num_threads())
        return self.layer(x)


def test_replicas_share_the_intra_op_threads_and_the_caller_keeps_its_own() -> None:
    mine = torch.get_num_threads()
    net = Counting()
    try:
        torch.set_num_threads(4)
        with instep.DataParallel(net, ["cpu"] * 2) as model:
            model(torch.randn(6, 3))
            assert net.seen == [2]
            assert torch.get_num_threads() == 4
            torch.set_num_threads(2)
            model(torch.randn(6, 3))
            assert net.seen == [2, 1]
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert found == [2]
    finally:
        torch.set_num_threads(mine)


def test_a_failed_backward_leaves_no_gradient_behind(net: nn.Module) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.fail = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if self.fail and x.shape[0] == 2:
                y.register_hook(refuse)
            return y * 1

    failing = Fails()
    with instep.DataParallel(failing, ["cpu"] * 2, hooks="per_replica") as model:
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(5, 3)).sum().backward()
        assert failing.layer.weight.grad is None
        failing.fail = False
        x = torch.randn(5, 3)
        plain = copy.deepcopy(failing)
        model(x).sum().backward()
        plain(x).sum().backward()
        torch.testing.assert_close(failing.layer.weight.grad, plain.layer.weight.grad)


def refuse(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_two_threads_may_call_two_wrappers() -> None:
    nets = [nn.Linear(3, 3) for _ in range(2)]
    models = [instep.DataParallel(net, ["cpu"] * 2) for net in nets]
    problems: list[str] = []

    def work(index: int) -> None:
        for _ in range(30):
            x = torch.randn(5, 3)
            if not torch.allclose(models[index](x), nets[index](x), atol=1e-6):
                problems.append(f"model {index}")
            models[index](x).sum().backward()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for model in models:
        model.close()
    assert not problems


def test_dropping_the_wrapper_ends_its_threads() -> None:
    before = threading.active_count()
    model = instep.DataParallel(nn.Linear(3, 3), ["cpu"] * 2)
    model(torch.randn(4, 3))
    assert threading.active_count() == before + 2
    del model
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_wrappers_share_threads_and_shutdown_ends_them() -> None:
    def count() -> int:
        return sum(thread.name.startswith("instep-cpu") for thread in threading.enumerate())

    before = count()
    models = [instep.DataParallel(nn.Linear(3, 3), ["cpu"] * 2) for _ in range(3)]
    for model in models:
        model(torch.randn(4, 3))
    assert count() == before + 2
    instep.shutdown()
    assert count() == before
    models[0](torch.randn(4, 3))  # a call after shutdown starts them again
    assert count() == before + 2
    for model in models:
        model.close()
    assert count() == before


GO_ON = threading.Event()


class Slow(nn.Module):
    """Is interrupted while it waits, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert GO_ON.wait(60)
        return self.layer(x)


def test_an_interrupted_call_does_not_answer_the_next_one() -> None:
    net = Slow()
    with instep.DataParallel(net, ["cpu"] * 2, probe=False) as model:  # it is a replica that is interrupted
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):  # while both replicas wait
            model(torch.zeros(4, 3))
        timer.join()
        GO_ON.set()
        x = torch.randn(4, 3)
        torch.testing.assert_close(model(x), net(x))
