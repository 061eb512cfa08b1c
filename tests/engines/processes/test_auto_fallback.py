"""When engine="auto" chooses worker processes, and its fallback to threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.select import EngineChoice, choose_engine

GPU, OTHER, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "engine"),
    [
        ([GPU, OTHER], "processes"),
        ([GPU, GPU, OTHER], "processes"),
        ([GPU, GPU], "threads"),
        ([GPU, CPU], "threads"),
        ([CPU, CPU, CPU], "threads"),
        ([torch.device("xpu", 0), torch.device("xpu", 1)], "threads"),
        ([OTHER], "serial"),
    ],
    ids=str,
)
def test_engine_choice_by_devices(devices: list[torch.device], engine: str) -> None:
    assert choose_engine("auto", devices).name == engine


class Locked(nn.Module):
    """Holds a lock, which cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.guard = nn.Linear(4, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.guard:
            y: Tensor = self.layer(x)
        return y


@pytest.mark.usefixtures("workers")
def test_auto_falls_back_to_threads_if_the_module_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "instep.parallel.choose_engine", lambda *_: EngineChoice("processes", "chosen by the test", automatic=True)
    )
    net, x = Locked(), torch.randn(5, 4)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        assert "engine=processes" in repr(model)
        with pytest.warns(UserWarning, match=r"falling back to engine='threads': .*'guard' \(a _thread\.lock\)"):
            out = model(x)
        torch.testing.assert_close(out, net(x))
        out.sum().backward()
        torch.testing.assert_close(net.layer.bias.grad, torch.full((3,), 5.0))
        torch.testing.assert_close(model(x), net(x))
        assert "engine=threads (engine='processes' cannot be used" in repr(model)


@pytest.mark.usefixtures("workers")
def test_an_explicit_engine_raises_instead_of_falling_back() -> None:
    with (
        instep.DataParallel(Locked(), ["cpu"] * 2, engine="processes") as model,
        pytest.raises(instep.EngineError, match="guard"),
    ):
        model(torch.randn(5, 4))
