"""Programs as users write them, each beside the plain module: what they change between calls reaches the workers."""

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


def test_two_models_in_one_step(wrap: Any) -> None:
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


def test_a_teacher_that_follows(wrap: Any) -> None:
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

    taught: Any = train(wrap(net, 2, engine="processes"))
    assert_same_weights(taught, train(plain))
    assert_same_weights(net, plain)
    taught.close()


def test_weights_that_are_loaded_cast_and_replaced(wrap: Any) -> None:
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


class Busy(nn.Module):
    """Reads what modules read: a configuration, an enumeration, a partial, a weak reference, a property, a table."""

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


def test_attributes_of_every_kind(wrap: Any) -> None:
    net, x = Busy(), batch()
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


def test_variables_of_closures_are_followed(wrap: Any) -> None:
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


def test_a_class_that_is_defined_anew(wrap: Any) -> None:
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


class Asks(nn.Module):
    """Reads the environment and a file of the working folder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        factor = float(os.environ.get("A_FACTOR_OF_OURS", "1"))
        file = Path("a_factor_of_ours.txt")
        y: Tensor = self.layer(x) * factor * (float(file.read_text()) if file.exists() else 1)
        return y


def test_the_folder_and_the_environment_are_the_scripts(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net, x = Asks(), batch()
    model = wrap(net, 2, engine="processes")
    torch.testing.assert_close(model(x), net(x))
    before = net(x)
    with monkeypatch.context() as patch:
        patch.setenv("A_FACTOR_OF_OURS", "3")
        torch.testing.assert_close(model(x), before * 3)
        (tmp_path / "a_factor_of_ours.txt").write_text("5")
        patch.chdir(tmp_path)
        torch.testing.assert_close(model(x), before * 15)
    torch.testing.assert_close(model(x), before)


class Profiles(nn.Module):
    """Is large enough for compiled code of oneDNN's, and says what it finds in its environment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(400, 400)

    def forward(self, x: Tensor) -> tuple[Tensor, list[str | None]]:
        return self.layer(x), [os.environ.get("ONEDNN_JIT_PROFILE")] * len(x)


def test_a_worker_leaves_no_file_for_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Profiles(), torch.randn(60, 400)
    net(x)
    if not Path(f"/tmp/perf-{os.getpid()}.map").exists():
        pytest.skip("torch writes no such files on this machine")
    monkeypatch.setattr(pool, "_workers", {})  # a new one
    monkeypatch.delenv("ONEDNN_JIT_PROFILE", raising=False)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False) as model:
        engine: Any = model._instep_engine
        output, seen = model(x)
        output.sum().backward()
        worker = engine._pool.get(1)
    assert seen == [None] * 60
    assert not worker.is_alive()
    assert not Path(f"/tmp/perf-{worker.pid}.map").exists()
