"""Typical user programs compared with the plain module: changes between calls reach the workers."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from instep.engines.processes.lifecycle import pool

pytestmark = pytest.mark.usefixtures("workers", "one_core")


def mlp(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs)).double()


def batch(size: int = 7) -> Tensor:
    return torch.randn(size, 4, dtype=torch.float64)


def assert_same_weights(mine: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


def test_adversarial_training_of_two_models(wrap: Any) -> None:
    nets = mlp(4, 4), mlp(4, 1)
    plain = copy.deepcopy(nets)

    def train(make: Any, judge: Any, parameters: Any) -> None:
        torch.manual_seed(1)
        optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in parameters]
        for _ in range(3):
            noise, real = batch(), batch()
            optimizers[1].zero_grad()
            (F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-judge(make(noise))).mean().backward()
            optimizers[0].step()

    train(wrap(nets[0], 2, engine="processes"), wrap(nets[1], 3, engine="processes"), nets)
    train(*plain, plain)
    for mine, theirs in zip(nets, plain, strict=True):
        assert_same_weights(mine, theirs)


def test_a_teacher_with_averaged_weights(wrap: Any) -> None:
    net = mlp()
    plain = copy.deepcopy(net)

    def train(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            x = batch()
            optimizer.zero_grad()
            F.mse_loss(model(x), teacher(x) + 1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.1)
        return teacher

    teacher: Any = train(wrap(net, 2, engine="processes"))
    assert_same_weights(teacher, train(plain))
    assert_same_weights(net, plain)
    teacher.close()


def test_loading_casting_and_replacing_weights(wrap: Any) -> None:
    net, x = mlp(), batch()
    model = wrap(net, 2, engine="processes")

    def check(given: Tensor = x) -> None:
        torch.testing.assert_close(model(given), net(given))

    check()
    model.load_state_dict(mlp().state_dict())
    check()
    net.load_state_dict(mlp().state_dict(), assign=True)
    check()
    net[0].weight.data = torch.randn(8, 4).double()
    check()
    net[2] = nn.Linear(8, 5).double()
    check()
    net.append(nn.Linear(5, 2).double())
    check()
    model.float()
    check(x.float())
    model.to(torch.bfloat16)
    check(x.bfloat16())


class Mode(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    names: list[str] = dataclasses.field(default_factory=list)


class ManyAttributes(nn.Module):
    """Reads a configuration, an enum, a partial, a weak reference, a property and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.mode = Config(), Mode.LOW
        self.layer = nn.Linear(4, 3).double()
        self.activation: Any = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.seen = weakref.ref(self.layer)
        self.table = collections.OrderedDict(a=1.0)

    @property
    def twice(self) -> float:
        return 2 * self.config.scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.seen()(x)) * self.twice + self.table["a"] + len(self.config.names)
        return y if self.mode is Mode.LOW else -y


def test_changes_of_attributes_reach_workers(wrap: Any) -> None:
    net, x = ManyAttributes(), batch()
    model = wrap(net, 3, engine="processes")

    def check() -> None:
        torch.testing.assert_close(model(x), net(x))

    check()
    net.config.scale = 2.0
    check()
    net.config.names.append("b")
    check()
    net.mode = Mode.HIGH
    check()
    net.table["a"] = 7.0
    check()
    net.activation = torch.tanh
    check()
    net.layer = nn.Linear(4, 3).double()
    net.seen = weakref.ref(net.layer)
    check()
    model.config = Config(3.0)
    check()
    net.forward = lambda given: net.layer(given) * 100  # type: ignore[method-assign]
    check()


def test_changes_of_closure_variables_reach_workers(wrap: Any) -> None:
    scale, table, shift = 1.0, {"q": 1.0}, [0.0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()
            self.hidden = lambda x: x * scale + table["q"]

        @property
        def factor(self) -> float:
            return scale

        @staticmethod
        def shifted(x: Tensor) -> Tensor:
            return x + shift[0]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.shifted(self.hidden(self.layer(x))) * self.factor
            return y

    net, x = Net(), batch()
    model = wrap(net, 3, engine="processes")
    for _ in range(2):
        torch.testing.assert_close(model(x), net(x))
        scale += 2.0
        torch.testing.assert_close(model(x), net(x))
        table["q"] += 3.0
        torch.testing.assert_close(model(x), net(x))
        shift[0] += 4.0
        torch.testing.assert_close(model(x), net(x))


def test_a_redefined_class(wrap: Any) -> None:
    names: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
    cell = "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * {}\n"
    x, nets, models = batch(), [], []
    for factor in (1, 5):
        exec(cell.format(factor), names)
        nets.append(names["Net"](4, 3).double())
        models.append(wrap(nets[-1], 2, engine="processes"))
        for model, net in zip(models, nets, strict=True):
            torch.testing.assert_close(model(x), net(x))
    nets[0].__class__ = names["Net"]
    torch.testing.assert_close(models[0](x), nets[0](x))


def test_threads_that_call_two_wrappers_at_once(wrap: Any) -> None:
    nets = mlp(), mlp()
    models = [wrap(nets[0], 2, engine="processes"), wrap(nets[1], 3, engine="processes")]
    failed: list[BaseException] = []

    def work(model: Any, net: nn.Module) -> None:
        try:
            for _ in range(8):
                x = batch()
                torch.testing.assert_close(model(x), net(x))
        except BaseException as error:
            failed.append(error)

    pairs = [*zip(models, nets, strict=True), (models[0], nets[0])]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class ReadsEnvironment(nn.Module):
    """Reads an environment variable and a file in the working directory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        factor = float(os.environ.get("TEST_FACTOR", "1"))
        file = Path("factor.txt")
        y: Tensor = self.layer(x) * factor * (float(file.read_text()) if file.exists() else 1)
        return y


def test_workers_use_the_scripts_environment_and_working_directory(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net, x = ReadsEnvironment(), batch()
    model = wrap(net, 2, engine="processes")
    torch.testing.assert_close(model(x), net(x))
    before = net(x)
    with monkeypatch.context() as patch:
        patch.setenv("TEST_FACTOR", "3")
        torch.testing.assert_close(model(x), before * 3)
        (tmp_path / "factor.txt").write_text("5")
        patch.chdir(tmp_path)
        torch.testing.assert_close(model(x), before * 15)
    torch.testing.assert_close(model(x), before)


class UsesOneDnn(nn.Module):
    """Large enough for oneDNN to compile code; also returns an environment variable."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(400, 400)

    def forward(self, x: Tensor) -> tuple[Tensor, list[str | None]]:
        return self.layer(x), [os.environ.get("ONEDNN_JIT_PROFILE")] * len(x)


def test_a_worker_leaves_no_profiler_file(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = UsesOneDnn(), torch.randn(60, 400)
    net(x)
    if not Path(f"/tmp/perf-{os.getpid()}.map").exists():
        pytest.skip("oneDNN writes no profiler file on this machine")
    monkeypatch.setattr(pool, "_workers", {})  # start a new worker
    monkeypatch.delenv("ONEDNN_JIT_PROFILE", raising=False)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False) as model:
        engine: Any = model._instep_engine
        output, seen = model(x)
        output.sum().backward()
        worker = engine._pool.get(1)
    assert seen == [None] * 60
    assert not worker.is_alive()
    assert not Path(f"/tmp/perf-{worker.pid}.map").exists()
