"""The NCCL manager, tested on the CPU with Gloo in place of NCCL."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import instep
from instep.collectives.buckets import gradient_buckets
from instep.collectives.group import current_context
from instep.engines.processes.controller import nccl_manager
from instep.engines.processes.controller.backward import ReplicaBackward
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.nccl_reduction import GradientReduction
from instep.engines.processes.controller.overlapped_reduction import OverlappedReduction
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.engine import ProcessesEngine
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.messages import JoinGroupRequest
from instep.engines.processes.nccl import group
from instep.engines.processes.nccl.bucket_reducer import BucketReducer
from instep.engines.processes.nccl.group import NCCL_ENVIRONMENT, GroupAborted, NcclGroup, override_environment
from instep.errors import WorkerFailure
from instep.runtime.process_role import inside_worker

from ....interference import run_before_next_call
from ....system_usage import wait_for_threads


@pytest.fixture(scope="module")
def up(workers: WorkerPool) -> None:
    """Workers that are there before the first test."""
    workers.get(1)
    workers.get(2)


@pytest.fixture(params=["in the caller", pytest.param("in threads", marks=pytest.mark.slow)])
def grouped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, up: None) -> Iterator[None]:
    """Replicas of the CPU are taken for replicas of different GPUs.

    The caller asks all workers, as if their GPUs reached the memory of the caller's, or each worker has its own thread.
    """
    in_caller = request.param == "in the caller"
    monkeypatch.setattr(ProcessesEngine, "_needs_no_threads", property(lambda _: in_caller))
    monkeypatch.setattr(nccl_manager, "BACKEND", "gloo")
    monkeypatch.setattr(nccl_manager, "are_distinct_gpus", lambda _: True)
    monkeypatch.setattr("instep.engines.processes.controller.remote_module.needs_staging", lambda _: True)
    monkeypatch.setattr("instep.engines.processes.controller.remote_module.needs_device_copies", lambda _: True)
    yield
    nccl_manager.abort_all_groups()


class Net(nn.Module):
    """A buffer that moves, weights of two dtypes, one that few use and one that nobody does, sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.single = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(6).double())
        self.unused = nn.Parameter(torch.ones(2).double())
        self.table = nn.Embedding(5, 6, sparse=True).double()
        self.register_buffer("seen", torch.zeros(()).double())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        if (x[:, 2] == 77).any() and inside_worker():
            raise KeyError("no luck")
        hidden = self.first(x).relu() + self.table(x[:, 0].abs().long().clamp(max=4))
        far = x[:, 1:2] > 5
        if far.any():
            hidden = torch.where(far, hidden * self.rare, hidden)
        return self.last(hidden) + self.single


def wrap(net: nn.Module, count: int, **options: Any) -> instep.DataParallel:
    state = {"seen": "sum"} if hasattr(net, "seen") else {}
    model = instep.DataParallel(net, ["cpu"] * count, engine="processes", state=state, probe=False, **options)
    engine: Any = model._instep_engine
    engine._on_cpu = False
    return model


def controller_group(model: instep.DataParallel) -> Any:
    engine: Any = model._instep_engine
    return engine._nccl._group


def batch(step: int) -> Tensor:
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(step)).double()
    x[-1, 1] = 10.0 if step % 2 else 0.0
    return x


def nothing(*_: Any) -> None:
    pass


def train(net: nn.Module, model: nn.Module, steps: int = 4, during: Callable[[int, str], None] = nothing) -> None:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.dtype == torch.float64], 1e-2)
    for step in range(steps):
        during(step, "forward")
        out = model(batch(step))
        during(step, "backward")
        net.zero_grad()
        out.square().mean().backward()
        optimizer.step()


def assert_alike(net: nn.Module, plain: nn.Module) -> None:
    for mine, other in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.single.grad, plain.single.grad)
    assert net.unused.grad is None


@pytest.fixture
def plain() -> Net:
    torch.manual_seed(0)
    net = Net()
    train(net, net)
    return net


@pytest.mark.usefixtures("grouped")
def test_training_in_a_group(plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net()
    by_host = copy.deepcopy(net)
    with wrap(net, 3) as model:
        train(net, model)
        assert controller_group(model).process_group.last_sequence_number == controller_group(model).sequence_base + 8
        assert net.table.weight.grad.is_sparse
    assert_alike(net, plain)
    monkeypatch.setenv("INSTEP_NCCL", "0")
    with wrap(by_host, 3) as model:
        train(by_host, model)
        assert controller_group(model) is None
    assert_alike(by_host, plain)


@pytest.mark.usefixtures("grouped")
def test_a_call_whose_group_is_aborted_runs_again(plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers may have run with weights that had not arrived completely."""
    torch.manual_seed(0)
    net, forwards = Net(), []
    with wrap(net, 3) as model:
        engine: Any = model._instep_engine
        run = engine.forward
        monkeypatch.setattr(engine, "forward", lambda call: (forwards.append(step_number), run(call))[1])
        step_number = 0

        def during(step: int, phase: str) -> None:
            nonlocal step_number
            step_number = step
            if (step, phase) == (2, "forward"):
                module = "processes.engine" if engine._needs_no_threads else "concurrent"
                run_before_next_call(  # when the broadcast is complete in this process
                    f"instep.engines.{module}.raise_first_error",
                    lambda: controller_group(model).process_group.abort("a member has failed"),
                    monkeypatch,
                )

        train(net, model, during=during)
        assert forwards == [0, 1, 2, 2, 3]
    assert_alike(net, plain)


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_a_forward_beside_the_reduction_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both need the lock of the group and those of the clients."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, outputs = torch.randn(6, 4).double(), []
    with wrap(net, 3) as model:
        for _ in range(2):
            model(x).sum().backward()
        loss = model(x).sum()
        sending = threading.Event()
        send = WorkerClient.sync_module

        def send_slowly(client: WorkerClient, replica: Any) -> Any:
            sending.set()
            time.sleep(0.1)
            return send(client, replica)

        def collect(reduction: GradientReduction) -> None:
            forward.start()
            sending.wait(1)
            reduce(reduction)

        forward = threading.Thread(target=lambda: outputs.append(model(x)), daemon=True)
        reduce = GradientReduction._collect
        monkeypatch.setattr(GradientReduction, "_store_sums", lambda _: False)  # reduce after the backward
        monkeypatch.setattr(WorkerClient, "sync_module", send_slowly)
        monkeypatch.setattr(GradientReduction, "_collect", collect)
        net.zero_grad()
        backward = threading.Thread(target=loss.backward, daemon=True)
        backward.start()
        backward.join(30)
        forward.join(30)
        assert not backward.is_alive()
        assert not forward.is_alive()
        torch.testing.assert_close(outputs[0], net(x))
        torch.testing.assert_close(net.weight.grad, x.sum(0).expand(3, 4))


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_a_forward_of_a_wrapper_with_the_same_group_while_a_backward_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is in use, so its weights go through host memory."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, outputs = torch.randn(6, 4).double(), []
    with wrap(net, 3) as model, wrap(copy.deepcopy(net), 3) as other:
        for one in (model, other):
            one(x).sum().backward()
        assert controller_group(model) is controller_group(other)
        run_first = OverlappedReduction.run_first

        def run_after_forward(reduction: OverlappedReduction, backward: Callable[[], None]) -> None:
            forward.start()
            time.sleep(0.1)
            run_first(reduction, backward)

        forward = threading.Thread(target=lambda: outputs.append(other(x)), daemon=True)
        loss, group = model(x).sum(), controller_group(model).process_group
        monkeypatch.setattr(OverlappedReduction, "run_first", run_after_forward)
        net.zero_grad()
        last_number = group.last_sequence_number
        loss.backward()
        forward.join(30)
        assert group.last_sequence_number == last_number + 1
        torch.testing.assert_close(outputs[0], net(x))
        torch.testing.assert_close(net.weight.grad, x.sum(0).expand(3, 4))


class TwoBuckets(nn.Module):
    """Its first layer runs again in the backward, when the gradients of the last one, the first bucket, have arrived.

    Then it notes how many reductions its process has started; a worker that finds the file `kill` there ends.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 20000).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.utils.checkpoint.checkpoint(self._run_first, x, use_reentrant=False))

    def _run_first(self, x: Tensor) -> Tensor:
        started = [one._num_started for one in gc.get_objects() if type(one) is BucketReducer]
        if started:
            (self.folder / f"started in {os.getpid()}").write_text(str(started))
        if started and inside_worker():
            with suppress(FileNotFoundError):
                (self.folder / "kill").unlink()  # by one of them
                os._exit(9)
        return self.first(x)


def step_twice(net: nn.Module, model: nn.Module, during: Callable[[int], object] = nothing) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for step in range(2):
        during(step)
        net.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


@pytest.mark.usefixtures("grouped")
def test_gradients_are_reduced_while_backward_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = TwoBuckets(tmp_path)
    plain = copy.deepcopy(net)
    assert [bucket.indices for bucket in gradient_buckets(list(net.parameters()))] == [(3, 2), (1, 0)]
    monkeypatch.setattr(GradientReduction, "_collect", refuse)
    with wrap(net, 3) as model:
        step_twice(net, model)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["[1]"] * 3
    step_twice(plain, plain)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def refuse(*_: Any) -> None:
    raise AssertionError("the gradients were reduced after the backward")


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_a_worker_dies_after_it_has_reduced_a_bucket(tmp_path: Path) -> None:
    """All gradients are reduced again, to the same bits."""
    torch.manual_seed(0)
    net, undisturbed = TwoBuckets(tmp_path), TwoBuckets(tmp_path)
    undisturbed.load_state_dict(net.state_dict())
    with wrap(undisturbed, 3) as model:
        step_twice(undisturbed, model)
    with wrap(net, 3) as model:
        step_twice(net, model, during=lambda _: (tmp_path / "kill").touch())
    assert not (tmp_path / "kill").exists()
    for mine, other in zip(net.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("position", [1, 2])
def test_a_worker_that_fails_before_its_backward(plain: Net, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have begun to reduce, and are released."""
    torch.manual_seed(0)
    net = Net()
    send = ReplicaBackward.send

    def send_unknown_call(backward: ReplicaBackward, client: WorkerClient) -> Any:
        if backward._task.index == position:
            monkeypatch.setattr(backward._call, "call_id", -1)
        return send(backward, client)

    with wrap(net, 3) as model:
        loss = model(batch(0)).square().mean()
        net.seen.zero_()
        with monkeypatch.context() as patch:
            patch.setattr(ReplicaBackward, "send", send_unknown_call)
            patch.setattr(ReplayableCall, "ensure_on", lambda *_: [])
            with pytest.raises(KeyError):
                loss.backward()
        assert all(parameter.grad is None for parameter in net.parameters())
        train(net, model)
    assert_alike(net, plain)


class GathersInOneBackward(torch.autograd.Function):
    """The backward of the first replica calls a collective that the others do not call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        context = current_context()
        if context is not None and context.info.index == 0:
            context.group.all_gather(0, "the backward", gradient.sum(0))
        return gradient


class Mismatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return GathersInOneBackward.apply(self.layer(x))


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_a_collective_that_only_one_backward_calls_is_an_error() -> None:
    """Workers reply before they wait for the reduction, in which replica 0 does not take part."""
    net = Mismatched()
    with wrap(net, 3) as model:
        with pytest.raises(instep.CollectiveError, match="the backward"):
            model(batch(0)).sum().backward()
        assert net.layer.weight.grad is None


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_a_worker_in_two_groups() -> None:
    """One wrapper has three replicas, the other one the first two of them."""
    torch.manual_seed(0)
    net, other = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    x = torch.randn(6, 4).double()
    with wrap(net, 3) as model, wrap(other, 2) as smaller:
        for _ in range(2):
            net.zero_grad()
            other.zero_grad()
            losses = [one(x).sum() for one in (model, smaller)]
            for loss in losses:
                loss.backward()
        assert not controller_group(model).process_group.abort_reason
        assert not controller_group(smaller).process_group.abort_reason
    for one in (net, other):
        torch.testing.assert_close(one.weight.grad, x.sum(0).expand(3, 4))


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_replicas_that_run_one_after_another_reduce_at_the_end(plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them could wait for the others while its backward runs."""
    monkeypatch.setattr(OverlappedReduction, "__init__", refuse)
    torch.manual_seed(0)
    net = Net()
    with wrap(net, 3) as model:
        runner: Any = model._instep_runner
        runner.serialization.serialize = True
        train(net, model)
        assert controller_group(model) is not None
    assert_alike(net, plain)


class Twice(nn.Module):
    """Reentrant checkpoints accumulate the gradient of a layer twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.usefixtures("grouped")
def test_a_gradient_that_grows_after_its_bucket_was_reduced() -> None:
    torch.manual_seed(0)
    net = Twice()
    plain = copy.deepcopy(net)
    x = torch.randn(7, 4).double().requires_grad_()
    with wrap(net, 3) as model:
        for _ in range(2):
            for one in (model, plain):
                one(x).square().mean().backward()
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)
    torch.testing.assert_close(net.layer.bias.grad, plain.layer.bias.grad)


class Ignores(Net):
    """Takes an argument that it does not use."""

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return super().forward(x)


@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(60)
def test_an_argument_that_cannot_be_sent_is_an_error_also_in_a_group(plain: Net) -> None:
    torch.manual_seed(0)
    net = Ignores()
    with wrap(net, 3) as model:
        with pytest.raises(instep.CannotCross, match="other"):
            model(batch(0), threading.Lock())
        train(net, model)
    assert_alike(net, plain)


def test_members_of_a_reduction_wait_until_rank_0_has_all_data() -> None:
    operations: list[str] = []

    class Group:
        device, rank = torch.device("cpu"), 1

        def raise_if_aborted(self) -> None:
            pass

        def start_reduce(self, _: Tensor) -> Callable[[], None]:
            operations.append("start")
            return lambda: operations.append("wait")

        def broadcast(self, _: Tensor) -> None:
            operations.append("broadcast")

    tensors = [torch.ones(3), torch.ones(2).double()]
    member: Any = Group()
    BucketReducer(member, gradient_buckets(tensors), [3, 2], tensors.__getitem__).finish()
    assert operations == ["start", "start", "wait", "wait", "broadcast"]


@pytest.mark.usefixtures("grouped")
def test_an_exception_in_a_worker_keeps_the_group(plain: Net) -> None:
    torch.manual_seed(0)
    net = Net()
    with wrap(net, 3) as model:
        model(batch(0))
        net.seen.zero_()
        group = controller_group(model).process_group
        bad = batch(0)
        bad[-1, 2] = 77
        with pytest.raises(KeyError, match="no luck"):
            model(bad)
        train(net, model)
        assert controller_group(model).process_group is group
    assert_alike(net, plain)


@pytest.mark.usefixtures("grouped")
def test_a_group_that_cannot_be_created_warns_once(plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_manager, "BACKEND", "none")
    torch.manual_seed(0)
    net = Net()
    with wrap(net, 3) as model:
        with pytest.warns(UserWarning, match="through host memory, because NCCL cannot be used"):
            train(net, model)
        assert controller_group(model) is None
    assert_alike(net, plain)


@pytest.mark.usefixtures("grouped")
def test_fewer_samples_than_replicas_and_no_sync() -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    with wrap(net, 3) as model:
        for one in (model, plain):
            with model.no_sync() if one is model else nullcontext():
                one(batch(0)).square().mean().backward()
                one(batch(1)[:2]).square().mean().backward()
            one(batch(2)).square().mean().backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())


@pytest.mark.usefixtures("grouped")
def test_two_wrappers_share_a_group_until_both_are_closed() -> None:
    one, two = wrap(Net(), 2), wrap(Net(), 2)
    before = threading.active_count()
    one(batch(0)).sum().backward()
    two(batch(0)).sum().backward()
    group = controller_group(one).process_group
    assert controller_group(two).process_group is group
    one.close()
    assert not group.abort_reason
    two(batch(1)).sum().backward()
    assert controller_group(two).process_group is group
    two.close()
    assert group.abort_reason
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("instep-abort", "instep-group")]


@pytest.mark.usefixtures("grouped")
def test_the_group_of_a_freed_wrapper_is_reused_and_aborted_at_the_next_close() -> None:
    dropped = wrap(Net(), 3)
    dropped(batch(0))
    left = controller_group(dropped)
    del dropped
    gc.collect()
    following = wrap(Net(), 3)
    following(batch(0))
    assert controller_group(following) is left
    del following
    gc.collect()
    assert not left.process_group.abort_reason
    with wrap(Net(), 2):
        pass
    assert left.process_group.abort_reason
    assert not nccl_manager._groups


@pytest.mark.usefixtures("grouped")
def test_an_interruption_in_a_collective(plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    torch.manual_seed(0)
    net = Net()
    with wrap(net, 3) as model:
        for place in (
            "instep.engines.processes.controller.nccl_manager.broadcast_coalesced",
            "instep.engines.processes.controller.overlapped_reduction.BucketReducer.finish",
        ):
            run_before_next_call(place, interrupt, monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                model(batch(0)).sum().backward()
            assert all(parameter.grad is None for parameter in net.parameters())
        net.seen.zero_()
        train(net, model)
        assert not controller_group(model).process_group.abort_reason
    assert_alike(net, plain)


@pytest.mark.usefixtures("grouped")
def test_retained_graphs_and_gradients_of_inputs_only() -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    found = []
    with wrap(net, 3) as model:
        for one in (model, plain):
            x = batch(1).requires_grad_()
            out = one(x)
            out.sum().backward(retain_graph=True)
            found.append([*torch.autograd.grad(out.square().sum(), [x], retain_graph=True)])
            out.square().sum().backward()
            found[-1].append(x.grad)
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())


def test_environment_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("NCCL_RAS_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_COMM_ID", "there")
    before = dict(os.environ)
    one, two = override_environment(NCCL_ENVIRONMENT), override_environment(NCCL_ENVIRONMENT)
    one.__enter__()
    two.__enter__()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_COMM_ID" not in os.environ
    one.__exit__(None, None, None)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    two.__exit__(None, None, None)
    assert dict(os.environ) == before


def test_a_collective_out_of_order_aborts_the_group() -> None:
    order = JoinGroupRequest("gloo", 0, 1, torch.device("cpu"), {}, sequence_base=10)
    group = NcclGroup(order, os.memfd_create("store"), os.eventfd(0))
    group.connect()
    with group.collective(11):
        x = torch.arange(3.0)
        group.broadcast(x)
        group.reduce(x)
        assert x.tolist() == [0, 1, 2]
    with pytest.raises(GroupAborted, match="collective 13 follows 11"), group.collective(13):
        pytest.fail("it was not its turn")
    assert "13" in group.abort_reason
    with pytest.raises(GroupAborted):
        group.broadcast(x)


@pytest.mark.usefixtures("grouped")
def test_a_frozen_module_that_is_sent_again_brings_its_values() -> None:
    net = Net()
    with wrap(net, 2) as model:
        model(batch(0))
        with model.frozen():
            net.seen = torch.zeros((), dtype=torch.float64)
            torch.testing.assert_close(model(batch(0)), net(batch(0)))


def test_an_existing_nccl_group_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_manager, "_warned", False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with pytest.warns(UserWarning, match="already has an NCCL group"):
        nccl_manager._warn_existing_groups()
    nccl_manager._warn_existing_groups()


PHASES = ("none", "between", "share", "sum", "join", "none")
BEGINNINGS = {
    "share": ("forward", "instep.engines.processes.controller.nccl_manager.broadcast_coalesced"),
    "sum": ("backward", "instep.engines.processes.controller.overlapped_reduction.BucketReducer.finish"),
    "join": ("forward", "instep.engines.processes.controller.nccl_manager._init_group"),
    "between": ("backward", ""),
}
"""When a worker is killed: at once, or where this process begins its part of something that all members do together."""


def kill(model: instep.DataParallel) -> None:
    engine: Any = model._instep_engine
    os.kill(engine._pool.get(2).pid, signal.SIGKILL)


def disturbed(phases: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Net:
    torch.manual_seed(0)
    net = Net()
    with wrap(net, 3, restarts=100) as model:

        def during(step: int, phase: str) -> None:
            when, place = BEGINNINGS.get(phases[step], ("", ""))
            if when == phase and place:
                if phases[step] == "join":
                    controller_group(model).process_group.abort("another one is to be made")
                run_before_next_call(place, lambda: kill(model), monkeypatch)
            elif when == phase:
                kill(model)

        train(net, model, len(phases), during)
        assert not controller_group(model).process_group.abort_reason
    return net


@pytest.mark.usefixtures("grouped")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_deaths_do_not_change_a_single_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside of a collective, where the others wait for the one that died."""
    monkeypatch.setattr(group, "_TIMEOUT", timedelta(seconds=8))  # what is left of a group ends after that time
    mine, theirs = disturbed(PHASES, monkeypatch), disturbed(["none"] * len(PHASES), monkeypatch)
    for (name, one), other in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    wait_for_threads("instep-group", 20)


@pytest.mark.slow
@pytest.mark.usefixtures("grouped")
@pytest.mark.timeout(120)
def test_too_many_deaths_while_a_group_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as any others do, and the next call is none of theirs."""
    monkeypatch.setattr(group, "_TIMEOUT", timedelta(seconds=2))
    net = Net()
    with wrap(net, 3, restarts=0) as model:
        run_before_next_call(
            "instep.engines.processes.controller.nccl_manager._init_group", lambda: kill(model), monkeypatch
        )
        with pytest.raises(WorkerFailure, match=r"(?s)SIGKILL.*restarts=0"):
            model(batch(0))
        assert net.seen == 0
        assert model(batch(0)).shape == (7, 3)
        assert not controller_group(model).process_group.abort_reason
    wait_for_threads("instep-group", 20)


class SlowGroup:
    """A process group that takes some seconds to queue a collective."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = threading.Event()
        self.events: list[str] = []

    def broadcast(self, *_: object) -> Any:
        self.began.set()
        time.sleep(self.seconds)
        self.events.append("queued")
        return nullcontext()


@pytest.mark.parametrize(("seconds", "events"), [(0.3, ["queued", "aborted"]), (1.0, ["aborted", "queued"])])
def test_an_abort_waits_while_another_thread_queues_a_collective(
    seconds: float, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for long: the thread may be stuck there."""
    monkeypatch.setattr(group, "_QUEUE_SECONDS", 0.6)
    monkeypatch.setattr(group, "abort_group", lambda slow: slow.events.append("aborted"))
    backend, slow = group._Backend(os.open(os.devnull, os.O_RDONLY)), SlowGroup(seconds)
    backend.group = slow

    def broadcast() -> None:
        with suppress(AttributeError):  # there is no work to wait for
            backend.broadcast(torch.zeros(1))

    thread = threading.Thread(target=broadcast)
    thread.start()
    slow.began.wait()
    backend.abort()
    thread.join()
    assert slow.events == events
    backend.abort()
    assert slow.events == [*events, "aborted"]
