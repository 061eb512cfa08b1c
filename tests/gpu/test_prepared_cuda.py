"""Prepared calls on CUDA give the same bits as the general path."""

from __future__ import annotations

import pytest
import torch
from tests.call.test_prepared import assert_same, count_prepared, run_both

__all__ = ["count_prepared"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("engine", "drop"), [("processes", 0.3), ("threads", 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences(
    engine: str,
    drop: float,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    count_prepared: list[int],
) -> None:
    """Replicas that draw from the generator of one device run one after another on threads, and are not prepared."""
    prepared, general = run_both(engine, seed, 16, monkeypatch, device="cuda:0", drop=drop)
    assert count_prepared[0] > 3
    assert_same(prepared, general)
