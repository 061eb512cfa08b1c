"""The caller's modes and settings in workers: inference mode, autocast, anomaly mode, warning filters."""

from __future__ import annotations

import copy
import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep

bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)


def wrap(net: nn.Module, count: int = 3, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * count, engine="processes", **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, bfloat16])
def test_grad_modes_and_autocast_start_no_threads(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    before = set(threading.enumerate())
    net, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(7, 4)
    expected = copy.deepcopy(net)
    with wrap(net) as model:
        for _ in range(2):
            with mode():
                torch.testing.assert_close(model(x), expected(x), rtol=2e-2, atol=2e-2)
        new = set(threading.enumerate()) - before
        assert not [thread.name for thread in new if thread.name.startswith("instep-cpu")]


def test_compiled_functions_start_no_threads() -> None:
    net, x = nn.Linear(4, 3), torch.randn(7, 4)
    with wrap(net) as model:
        torch.testing.assert_close(model(x), torch.compile(net, backend="eager")(x))
        before = set(threading.enumerate())
        for _ in range(2):
            torch.testing.assert_close(model(x), net(x))
        new = set(threading.enumerate()) - before
        assert not [thread.name for thread in new if thread.name.startswith("instep-cpu")]


class Counts(nn.Module):
    """Writes to a buffer in place, sets another, and updates batch norm statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("newest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.newest = self.newest + instep.all_reduce(x.sum())
        y: Tensor = self.norm(self.layer(x))
        return y


def test_state_written_in_inference_mode_can_be_trained_later() -> None:
    net = Counts()
    plain = copy.deepcopy(net)
    with wrap(net, state={"seen": "sum"}) as model:
        for training in (False, True):
            x = torch.randn(7, 4, dtype=torch.float64)
            with torch.set_grad_enabled(training) if training else torch.inference_mode():
                torch.testing.assert_close(model(x), plain(x))
        assert not any(buffer.is_inference() for name, buffer in net.named_buffers() if name != "newest")
        torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
        for one in (model, plain):
            one(x).pow(3).sum().backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


class Recomputed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("layer", [nn.Linear, pytest.param(Recomputed, marks=pytest.mark.slow)])
def test_weights_that_change_inside_an_autocast_block(layer: type[nn.Linear]) -> None:
    """No replica uses weights from the autocast cache, in forward or backward."""
    net, x = layer(4, 3), torch.randn(9, 4)
    with wrap(net, probe=False) as model, bfloat16():
        before = model(x)
        before.float().sum().backward()
        with torch.no_grad():
            net.weight.mul_(2)
            net.bias.mul_(2)
        torch.testing.assert_close(model(x), 2 * before)


class Slow(nn.Module):
    """Slow in workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        if instep.replica().index:
            time.sleep(self.seconds)
        y: Tensor = self.layer(x)
        return y


def test_an_interruption_in_inference_mode() -> None:
    net, x = Slow(), torch.randn(6, 4)
    with wrap(net, 2, probe=False) as model:
        model(x)
        net.seconds = 1.0
        with torch.inference_mode():
            threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
            with pytest.raises(KeyboardInterrupt):
                model(x)
            assert torch.is_inference_mode_enabled()
        gc.collect()
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        net.seconds = 0.0
        torch.testing.assert_close(model(x), net.layer(x))


class Meets(nn.Module):
    """Replica 1 waits at a collective for replica 0, which is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if instep.replica().index == 0:
            time.sleep(0.5)
        y: Tensor = self.layer(x) + instep.all_reduce(x.sum())
        return y


@pytest.mark.parametrize("known", [False, True])
def test_messages_received_while_a_worker_waits_in_inference_mode(known: bool) -> None:
    """Another thread trains meanwhile. Its arguments and module must not become inference tensors."""
    x, waits, learns = torch.randn(6, 4), Meets(), Counts().float()
    with wrap(waits, 2, probe=False) as one, wrap(learns, 2, probe=False, state={"seen": "sum"}) as other:
        if known:
            other(x).sum().backward()

        def infer() -> None:
            with torch.inference_mode():
                one(x)

        infer()
        thread = threading.Thread(target=infer)
        thread.start()
        time.sleep(0.2)
        for _ in range(2):
            other(x).pow(2).sum().backward()
        thread.join()
        assert not learns.layer.weight.grad.is_inference()


class Roots(nn.Module):
    """Has a NaN gradient at samples above 50, and returns the anomaly mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = self.layer(x).square() * (x[:, :1] < 50)
        modes = [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]
        return small.sqrt(), torch.tensor([modes]).expand(len(x), 2).clone()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_is_active_in_workers() -> None:
    x = torch.ones(5, 4)
    x[-1] = 60
    with wrap(Roots()) as model:
        for check_nan in (True, False):
            with torch.autograd.detect_anomaly(check_nan=check_nan):
                y, modes = model(x)
                assert modes.tolist() == [[True, check_nan]] * 5
                if check_nan:
                    with pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
                        y.sum().backward()
                else:
                    y.sum().backward()
        y, modes = model(x)
        assert modes.tolist() == [[False, True]] * 5
        y.sum().backward()
        y, _ = model(x)
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
            y.sum().backward()


class Warns(nn.Module):
    """Warns in a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if instep.replica().index:
            warnings.warn("look out", UserWarning, stacklevel=1)
        y: Tensor = self.layer(x)
        return y


def test_warnings_of_workers_follow_the_callers_filters(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(5, 4)
    with wrap(Warns(), 2) as model, warnings.catch_warnings():
        for action, message, shown in [("always", "look", True), ("ignore", "LOOK", False), ("always", "", True)]:
            warnings.filterwarnings(action, message)  # type: ignore[arg-type]
            model(x)
            assert ("look out" in capfd.readouterr().err) == shown
        warnings.filterwarnings("error", "look", UserWarning)
        with pytest.raises(UserWarning, match="look out"):
            model(x)
        warnings.filterwarnings("error", module="^elsewhere$")
        warnings.filterwarnings("ignore", "look", FutureWarning)
        warnings.filterwarnings("ignore", "look", UserWarning, r".*test_environment$")
        torch.testing.assert_close(model(x), model.module(x))
        assert "look out" not in capfd.readouterr().err


def test_default_warning_filters_are_restored() -> None:
    code = (
        "import warnings; from instep.runtime.warning_filters import *; before = get_warning_filters();"
        "warnings.simplefilter('error'); set_warning_filters(before); assert get_warning_filters()[0] == before[0];"
        "exec('import warnings; warnings.warn(\"seen\", DeprecationWarning)', {'__name__': '__main__'});"
        "exec('import warnings; warnings.warn(\"not seen\", DeprecationWarning)', {'__name__': 'main'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "DeprecationWarning: seen" in done.stderr
    assert "not seen" not in done.stderr
    assert done.returncode == 0, done.stderr
