"""Every fault except kills, in each replica, in forward and backward: the error is clear, and training can continue.

One training run has all faults, each in a different step. A step that failed is repeated. At the end every weight is
bitwise equal to that of a run without faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import WorkerFailure

REPLICAS = 3
ERRORS: dict[str, tuple[type[BaseException], str] | None] = {
    "garbage": None,  # the step is replayed, as after a kill
    "raise": (ZeroDivisionError, "no luck"),
    "hang": (WorkerFailure, "has not replied"),
    "interrupt": (KeyboardInterrupt, ".*"),
    "unpicklable": (instep.EngineError, "extra"),
    "write": (instep.StateError, r"last\.weight"),
}
ENDS_WORKER = {"garbage", "hang"}
IN_WORKERS = {*ENDS_WORKER, "unpicklable"}
IN_FORWARD = {"unpicklable", "write"}


class Fault(NamedTuple):
    """A kind of fault, the replica that has it, and the phase."""

    kind: str
    replica: int
    phase: str

    def file(self, folder: Path) -> Path:
        """The file that triggers the fault once."""
        return folder / f"{self.kind}-{self.replica}-{self.phase}"


def faults() -> list[Fault]:
    """Each kind in each possible replica and phase, in random order.

    Faults that end a worker happen in one replica per phase only, because starting a worker is slow.
    """
    every = [
        Fault(kind, replica, phase)
        for kind in ERRORS
        for replica in range(1 if kind in IN_WORKERS else 0, REPLICAS)
        for phase in (["forward"] if kind in IN_FORWARD else ["forward", "backward"])
        if kind not in ENDS_WORKER or replica == (1 if phase == "forward" else 2)
    ]
    random.Random(0).shuffle(every)
    return every


def send_garbage() -> None:
    """Write garbage into every socket of this process, including a worker's connection."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listed directory, or a read-only socket
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                os.write(int(name), b"not a frame")


class Faulty(nn.Module):
    """A module with dropout. A replica that finds the file of its fault has that fault."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        replica = instep.replica().index
        h = self.drop(torch.tanh(self.first(x)))
        self.trigger(replica, "forward")
        if h.requires_grad:
            h.register_hook(lambda _: self.trigger(replica, "backward"))
        out = self.last(h)
        return {"out": out, "extra": threading.Lock() if self.has("unpicklable", replica, "forward") else None}

    def has(self, kind: str, replica: int, phase: str) -> bool:
        try:
            Fault(kind, replica, phase).file(self.folder).unlink()
        except FileNotFoundError:
            return False
        return True

    def trigger(self, replica: int, phase: str) -> None:
        if self.has("garbage", replica, phase):
            send_garbage()
            time.sleep(0.3)  # until it is read: the reply goes another way, and may be first
        if self.has("raise", replica, phase):
            raise ZeroDivisionError("no luck")
        if self.has("hang", replica, phase):
            time.sleep(1000)
        if self.has("interrupt", replica, phase):
            time.sleep(0.1 if replica else 0)  # until the caller waits: Python ignores interruptions in finalizers
            os.kill(os.getppid() if replica else os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # until it arrives
        if self.has("write", replica, phase):
            with torch.no_grad():
                self.last.weight.mul_(0.5)


def take_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.default_generator.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(7, 4).double())["out"].square().mean().backward()
    optimizer.step()


def train(folder: Path, plan: list[Fault | None]) -> Faulty:
    torch.default_generator.manual_seed(0)
    net = Faulty(folder).double()
    options: dict[str, Any] = {"hooks": "per_replica", "restarts": 10**6, "timeout": 4, "merge": {"extra": "first"}}
    with instep.DataParallel(net, ["cpu"] * REPLICAS, engine="processes", **options) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step, fault in enumerate(plan):
            if fault is not None:
                fail(model, optimizer, step, fault)
            if fault is None or ERRORS[fault.kind] is not None:
                take_step(model, optimizer, step)
    return net


def fail(model: Any, optimizer: torch.optim.Optimizer, step: int, fault: Fault) -> None:
    """Run a step with a fault. If it is an error, no weight may change."""
    fault.file(model.folder).touch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    error = ERRORS[fault.kind]
    if error is None:
        take_step(model, optimizer, step)
    else:
        with pytest.raises(error[0], match=error[1]) as caught:
            take_step(model, optimizer, step)
        if fault.kind not in ("interrupt", "unpicklable", "write"):
            message = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", ()))
            assert f"replica {fault.replica}" in message, fault
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), (fault, name)
    assert not fault.file(model.folder).exists(), f"{fault} did not happen"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*has not replied:UserWarning")
@pytest.mark.usefixtures("workers", "one_core")
def test_training_with_faults_gives_the_same_weights(tmp_path: Path) -> None:
    plan = [None, *faults(), None]
    disturbed, undisturbed = train(tmp_path, plan), train(tmp_path, [None] * len(plan))
    for (name, mine), theirs in zip(disturbed.state_dict().items(), undisturbed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_garbage_without_restarts_raises_worker_failure(tmp_path: Path) -> None:
    net = Faulty(tmp_path).double()
    options: dict[str, Any] = {"hooks": "per_replica", "restarts": 0, "merge": {"extra": "first"}}
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", **options) as model:
        x = torch.randn(7, 4).double()
        model(x)
        Fault("garbage", 1, "forward").file(tmp_path).touch()
        with pytest.raises(WorkerFailure, match=r"replica 1 on cpu[\s\S]*malformed message"):
            model(x)
        torch.testing.assert_close(model.eval()(x)["out"], net(x)["out"])
