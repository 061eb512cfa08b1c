"""What surrounds a call surrounds its replicas: settings of torch that a module may read or depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

SEEN: list[dict[str, Any]] = []


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
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(settings())
        return x * 2


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Everything another than it is by default."""
    SEEN.clear()
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    SEEN.clear()


@pytest.mark.parametrize("engine", ["serial", "threads"])  # they note what they see in a list of this process
@pytest.mark.usefixtures("changed")
def test_replicas_see_the_callers_settings(wrap: Any, engine: str) -> None:
    model, x = wrap(Reads(), 3, engine=engine, probe=False), torch.ones(6, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        expected = settings()
        model(x)
    assert expected["placed"].type == "meta"
    assert len(SEEN) == 3
    assert all(seen == expected for seen in SEEN)
