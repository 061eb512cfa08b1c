"""`Group.all_gather` on every transport: rows in order, and an error where replicas disagree."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.collectives.exchange import gather_rows
from instep.collectives.group import current_context, exempt_collective
from instep.engines.processes.controller.rendezvous import ControllerRendezvous

from ..replica_helpers import ENGINE_MODES, FunctionModule, assert_close, batch, check, replicated, weighted_loss

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)


def gather(row: Tensor, label: str = "a test") -> Tensor:
    """Every replica's row; on one device a single row."""
    context = current_context()
    if context is None:
        exempt_collective()  # the probe runs parts of the batch on one device
        return row.detach()[None]
    return gather_rows(context, label, row)


def centered(self: Any, x: Tensor) -> Tensor:
    """Subtracts the mean of the whole batch, without its gradient, several times."""
    for _ in range(5):
        z = self.layer(x)
        total = gather(torch.cat([z.sum(0), z.new_tensor([float(len(z))])])).sum(0)
        x = self.other(x) + (z - total[:-1] / total[-1])[:, :1]
        x = x[:, :3]
    return x


@each_way
@pytest.mark.parametrize("replicas", [2, 4])
def test_whole_batch_statistics(way: str, replicas: int) -> None:
    check(centered, way, replicas=replicas)


@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_rows_keep_their_order_shape_and_dtype(way: str, dtype: torch.dtype) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        info = instep.replica()
        for shape in [(), (1,), (2, 3), (0,), (3000, 9)]:
            expected = torch.stack([torch.full(shape, (i + 1) % 3).to(dtype) for i in range(info.count)])
            rows = gather(expected[info.index].clone())
            assert rows.dtype == dtype
            assert torch.equal(rows, expected), (rows, expected)
        return self.layer(x)

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        assert_close(model(x), plain(x))


@each_way
def test_transposed_rows_without_gradients(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        rows = gather(self.layer(x).sum(0).view(2, 2).t())
        assert not rows.requires_grad
        assert rows.shape == (instep.replica().count, 2, 2)
        return self.layer(x) * rows.sum(0).reshape(-1)

    check(body, way)


@each_way
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes(way: str, mode: Any) -> None:
    x = batch()
    with replicated(FunctionModule(centered), way) as (plain, model):
        for _ in range(3):
            with mode():
                assert_close(model(x), plain(x))
        assert_close(model(x), plain(x))


@each_way
@pytest.mark.parametrize("one_wrapper", [True, False])
def test_calls_from_many_threads(way: str, one_wrapper: bool) -> None:
    """Each thread gets the rows of its own call, with its gradients, from one wrapper or from one of its own."""
    if way == "joint" and one_wrapper:
        pytest.skip("docs/limits.md: on CUDA one thread at a time may call a wrapper on threads")
    xs = [batch(size) for size in (7, 8, 9, 7)]
    with ExitStack() as stack:
        pairs = [
            stack.enter_context(replicated(FunctionModule(centered), way)) for _ in xs[: 1 if one_wrapper else None]
        ]
        pairs *= len(xs) if one_wrapper else 1
        for (_, model), x in zip(pairs, xs, strict=True):
            model(x)  # the probe of a structure runs once

        def run(number: int) -> list[tuple[Tensor, Tensor]]:
            (_, model), x = pairs[number], xs[number].clone().requires_grad_()
            found = []
            for _ in range(5):
                out = model(x)
                (gradient,) = torch.autograd.grad(weighted_loss(out), x)
                found.append((out.detach(), gradient))
            return found

        with ThreadPoolExecutor(len(xs)) as pool:
            results = list(pool.map(run, range(len(xs))))
        for (plain, _), x, found in zip(pairs, xs, results, strict=True):
            x = x.clone().requires_grad_()
            out = plain(x)
            (gradient,) = torch.autograd.grad(weighted_loss(out), x)
            for mine, my_gradient in found:
                assert_close(mine, out)
                assert_close(my_gradient, gradient)


ROWS = torch.arange(3.0)


def disagree_on_label(self: Any, x: Tensor) -> Tensor:
    gather(ROWS, f"gather {instep.replica().index}")
    return self.layer(x)


def disagree_on_shape(self: Any, x: Tensor) -> Tensor:
    gather(ROWS[: 1 + instep.replica().index])
    return self.layer(x)


def disagree_on_size(self: Any, x: Tensor) -> Tensor:
    gather(torch.zeros(30000 if instep.replica().index else 3))
    return self.layer(x)


def disagree_on_kind(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) + (instep.all_reduce(ROWS.sum()) if instep.replica().index == 1 else gather(ROWS).sum())


def return_early(self: Any, x: Tensor) -> Tensor:
    for _ in range(1 if instep.replica().index == 1 else 2):
        gather(ROWS)
    return self.layer(x)


def raise_early(self: Any, x: Tensor) -> Tensor:
    gather(ROWS)
    if instep.replica().index == 1:
        raise KeyError("no luck")
    gather(ROWS)
    return self.layer(x)


@each_way
@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (disagree_on_label, instep.CollectiveError, "called different collectives"),
        (disagree_on_shape, instep.CollectiveError, r"(?s)called different.*rows of float32\[.\]"),
        (disagree_on_size, instep.CollectiveError, "called different collectives"),
        (disagree_on_kind, instep.CollectiveError, "(?s)called different.*all_reduce"),
        (return_early, instep.CollectiveError, "replica 1 on cpu returned from forward without it"),
        (raise_early, KeyError, "no luck"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_replicas_that_disagree(way: str, body: Any, error: type[Exception], match: str) -> None:
    """They fail at once, and the next call works. The second failure is on the transport of warm calls."""
    x = batch()
    with replicated(FunctionModule(centered), way, probe=False) as (plain, model):
        for _ in range(2):
            assert_close(model(x), plain(x))
            model.body = body
            start = time.monotonic()
            with pytest.raises(error, match=match):
                model(x)
            assert time.monotonic() - start < 5
            model.body = centered
        assert_close(model(x), plain(x))


class Faulty(nn.Module):
    """Gathers rows ten times; acts on `fault` in replica 1 before the sixth."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.mark, self.fault = mark, ""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(10):
            if number == 5 and self.fault and instep.replica().index == 1:
                if self.fault == "sleep":
                    time.sleep(30)
                elif not self.mark.exists():
                    self.mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            x = self.layer(x) + number * gather(x.sum(0)).sum(0) / 50
            x = AllGatherInBackward.apply(x)
        return x


class AllGatherInBackward(torch.autograd.Function):
    """The identity; adds a small multiple of the sum over the batch to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        context = current_context()
        row = gradient.sum(0)
        rows = row[None] if context is None else context.group.all_gather(context.info.index, "the backward", row)
        return gradient + 0.01 * rows.sum(0)


def faulty_pair(tmp_path: Path, **options: Any) -> tuple[Faulty, Any]:
    net = Faulty(tmp_path / "killed")
    model = instep.DataParallel(net, ["cpu"] * 3, engine="processes", probe=False, **options)
    for _ in range(2):
        model(torch.ones(6, 3)).sum().backward()
    return net, model


def step(net: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    out = model(x)
    out.sin().sum().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.slow
def test_a_worker_that_dies_between_rows_is_replaced(tmp_path: Path) -> None:
    net, model = faulty_pair(tmp_path)
    x = torch.randn(6, 3)
    with model:
        plain = step(net, net, x)
        expected = step(net, model, x)
        torch.testing.assert_close(expected, plain, rtol=1e-4, atol=1e-4)
        net.fault = "kill"
        actual = step(net, model, x)
        assert net.mark.exists()
        assert all(map(torch.equal, actual, expected))
        net.fault = ""
        net.zero_grad()
        out = model(x)
        os.kill(model._instep_engine._pool.get(2).pid, signal.SIGKILL)  # its forward is replayed
        out.sin().sum().backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected[1:], strict=True))


@pytest.mark.slow
def test_a_worker_that_sleeps_fails_with_a_timeout(tmp_path: Path) -> None:
    net, model = faulty_pair(tmp_path, timeout=6.0)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fault = "sleep"
        with pytest.raises(instep.WorkerFailure, match="has not replied for 6 s"):
            model(torch.ones(6, 3))


@pytest.mark.slow
def test_an_interruption_while_rows_are_awaited(tmp_path: Path) -> None:
    net, model = faulty_pair(tmp_path)
    x = torch.randn(6, 3)
    with model:
        expected = step(net, model, x)
        net.fault = "sleep"
        timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert time.monotonic() - start < 5
        timer.join()
        model._instep_engine._pool.kill(1)  # still asleep
        net.fault = ""
        assert all(map(torch.equal, step(net, model, x), expected))


def test_warm_calls_use_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, model = faulty_pair(tmp_path)
    with model:
        monkeypatch.setattr(ControllerRendezvous, "_exchange_messages", None)
        step(net, model, torch.randn(6, 3))
        assert model._instep_engine._row_memory is not None
