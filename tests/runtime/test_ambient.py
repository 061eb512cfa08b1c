"""What surrounds a call surrounds its replicas: settings of torch that a module may read or depend on."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.thread_pool import is_replica_thread, set_replica_thread
from instep.runtime import ambient
from instep.runtime.ambient import AmbientGuard, AmbientState


def settings() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "made": torch.ones(2).dtype,
        "device": torch.get_default_device(),
        "placed": torch.empty(2).device,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "grad": torch.is_grad_enabled(),
    }


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2, [repr(settings())] * len(x)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Everything another than it is by default."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.usefixtures("changed")
def test_replicas_see_the_callers_settings(wrap: Any, engine: str) -> None:
    model, x = wrap(Reads(), 3, engine=engine, probe=False), torch.ones(6, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        expected = settings()
        _, seen = model(x)
    assert expected["placed"].type == "meta"
    assert seen == [repr(expected)] * 6


TONE: ContextVar[str] = ContextVar("TONE", default="plain")
UNSET: ContextVar[int] = ContextVar("UNSET")
LOCKED: ContextVar[Any] = ContextVar("LOCKED", default=None)


class Tones(nn.Module):
    """Reads context variables: of the script, of an imported module, of a closure, and one that may not be set."""

    def __init__(self, imported: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        inner: ContextVar[int] = ContextVar("inner", default=1)
        self.inner, self.read = inner, lambda: inner.get()
        self.imported = imported

    def forward(self, x: Tensor) -> Any:
        said = f"{TONE.get()} {UNSET.get(0)} {self.read()} {self.imported.LEVEL.get()}"
        return x * self.scale, [said] * len(x)


@pytest.fixture
def levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's on the path, with a variable."""
    (tmp_path / "levels_of_ours.py").write_text(
        "from contextvars import ContextVar\nLEVEL = ContextVar('x', default=3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("levels_of_ours")
    del sys.modules["levels_of_ours"]


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_context_variables_are_the_callers(wrap: Any, engine: str, levels: Any) -> None:
    net = Tones(levels)
    model, x = wrap(net, 3, engine=engine, probe=False), torch.ones(6, 2)

    def say() -> Any:
        assert model(x)[1] == net(x)[1]
        return model(x)[1][-1]

    def change() -> None:
        tokens = TONE.set("warm"), net.inner.set(7), levels.LEVEL.set(9), UNSET.set(4)
        assert say() == "warm 4 7 9"
        TONE.set("cold")
        assert say() == "cold 4 7 9"
        UNSET.reset(tokens[3])
        assert say() == "cold 0 7 9"

    assert say() == "plain 0 1 3"
    copy_context().run(change)
    assert say() == "plain 0 1 3"


class NeedsLock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        held = LOCKED.get()
        if held is None or x.min() > 0:
            return x
        with held:
            return x


@pytest.mark.usefixtures("workers")
def test_a_context_variable_that_cannot_cross_says_so_where_it_is_used(wrap: Any) -> None:
    model = wrap(NeedsLock(), 2, engine="processes", probe=False)

    def use(x: Tensor) -> None:
        LOCKED.set(threading.Lock())
        model(x)

    copy_context().run(use, torch.ones(4, 2))
    with pytest.raises(instep.EngineError, match=r"the context variable 'LOCKED' .*lock"):
        copy_context().run(use, torch.zeros(4, 2))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_hooks_on_saved_tensors_are_the_callers(wrap: Any, engine: str) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 4).double()
    model = wrap(net, 3, engine=engine, probe=False)
    grads = []
    for run in (model, net):
        net.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.double() * 2):
            out = run(x)
        out.sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*grads)
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()


class CastInBackward(torch.autograd.Function):
    """Its gradient says what kind of autocast it came under."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        cast = torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
        return gradient * {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}[cast]


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = CastInBackward.apply(self.layer(x).float())
        return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_backward_inside_of_an_autocast_block_is_under_autocast(wrap: Any, engine: str, dtype: torch.dtype) -> None:
    net, x = Casts(), torch.ones(6, 4)
    model = wrap(net, 3, engine=engine, probe=False)
    for inside in (True, False, True):
        net.zero_grad()
        with torch.autocast("cpu", dtype):
            output = model(x)
            if inside:
                output.sum().backward()
        if not inside:
            output.sum().backward()
        factor = (2 if dtype is torch.bfloat16 else 3) if inside else 1
        assert torch.equal(net.layer.bias.grad, torch.full((3,), 6.0 * factor))
    assert not torch.is_autocast_enabled("cpu")


def test_an_interruption_does_not_change_the_nesting_of_autocast() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while True:
                    ambient._autocast_nesting()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ambient._autocast_nesting() == 0


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
def test_restore_resets_autocast_of_every_device_type(device_type: str) -> None:
    state = AmbientState.capture()
    dtype = torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)  # as an interruption leaves it
    torch.set_autocast_dtype(device_type, torch.float64)
    torch.autocast_increment_nesting()
    state.restore()
    state.restore()
    assert not torch.is_autocast_enabled(device_type)
    assert torch.get_autocast_dtype(device_type) == dtype
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


def test_restore_resets_registered_thread_locals() -> None:
    state = AmbientState.capture()
    set_replica_thread(True)
    state.restore()
    assert not is_replica_thread()


class LeavesAutocast(nn.Module):
    """Turns autocast off for the rest of the thread, as it is on one device."""

    def forward(self, x: Tensor) -> Any:
        was_enabled = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", False)
        return x * 2, [was_enabled] * len(x)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_every_replica_is_in_the_callers_autocast_whatever_another_replica_leaves(wrap: Any, engine: str) -> None:
    model, x = wrap(LeavesAutocast(), 3, engine=engine, probe=False), torch.ones(6, 2)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            _, enabled = model(x)
        assert enabled == [True] * 6


def test_the_thread_that_captured_a_state_enters_it_again_only_if_it_differs() -> None:
    cpu = torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        state = AmbientState.capture([cpu])
        with state.enter(cpu):
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        with torch.autocast("cpu", torch.float16), state.enter(cpu):
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        with torch.autocast("cpu", enabled=False), state.enter(cpu):
            assert torch.is_autocast_enabled("cpu")
        with torch.inference_mode(), state.enter(cpu):
            assert not torch.is_inference_mode_enabled()
        with torch.no_grad(), state.enter(cpu):
            assert torch.is_grad_enabled()


class LeavesAutocastAndRegistersHook(nn.Module):
    """Registers a hook, so that the call runs again on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        torch.set_autocast_enabled("cpu", False)
        y.register_hook(lambda _: None)
        return y


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_call_that_runs_again_is_in_the_callers_autocast(wrap: Any, engine: str) -> None:
    model, x = wrap(LeavesAutocastAndRegistersHook(), 2, engine=engine, probe=False), torch.ones(4, 2)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype is torch.bfloat16


def _set_and_reset(set_value: Any, value: Any, before: Any) -> Any:
    @contextmanager
    def changed() -> Iterator[None]:
        set_value(value)
        try:
            yield
        finally:
            set_value(before)

    return changed


CPU_STATES: dict[str, Any] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
    "autocast of another device": _set_and_reset(partial(torch.set_autocast_enabled, "cuda"), True, False),
    "autocast dtype of another device": _set_and_reset(
        partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16, torch.float16
    ),
    "autocast cache": _set_and_reset(torch.set_autocast_cache_enabled, False, True),
    "autocast dtype": _set_and_reset(partial(torch.set_autocast_dtype, "cpu"), torch.float16, torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "default dtype": _set_and_reset(torch.set_default_dtype, torch.float64, torch.float32),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "deterministic": _set_and_reset(torch.use_deterministic_algorithms, True, False),
    "deterministic, warn": _set_and_reset(torch.set_deterministic_debug_mode, 1, 0),
    "precision": _set_and_reset(torch.set_float32_matmul_precision, "medium", "highest"),
    "threads": _set_and_reset(torch.set_num_threads, 3, torch.get_num_threads()),
    "anomaly": torch.autograd.detect_anomaly,
    "warnings": warnings.catch_warnings,
    "replica": _set_and_reset(set_replica_thread, True, False),
}


@pytest.mark.filterwarnings("ignore:.*Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", CPU_STATES)
def test_another_state_of_the_thread_is_noticed(name: str) -> None:
    threads, state = torch.get_num_threads(), AmbientGuard(torch.device("cpu"))
    assert state.is_current()
    with CPU_STATES[name]():
        if name == "warnings":
            warnings.filterwarnings("ignore", "something")
        assert not state.is_current()
        assert AmbientGuard(torch.device("cpu")).is_current()
    torch.set_num_threads(threads)
    assert state.is_current()


def test_the_state_of_another_thread_is_not_current() -> None:
    state = AmbientGuard(torch.device("cpu"))
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(state.is_current).result()
