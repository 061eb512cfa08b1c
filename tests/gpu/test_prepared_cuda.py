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


CASES = {
    "processes": {"engine": "processes"},
    "processes, host arguments": {"engine": "processes", "batch_device": "cpu"},
    "threads": {"engine": "threads", "drop": 0.0},  # replicas that draw on one device take turns: not prepared
    "threads, host arguments": {"engine": "threads", "drop": 0.0, "batch_device": "cpu"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_random_sequences(
    case: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    count_prepared: list[int],
) -> None:
    options = dict(CASES[case])
    engine = str(options.pop("engine"))
    prepared, general = run_both(engine, seed, 16, monkeypatch, device="cuda:0", **options)
    assert count_prepared[0] > 3
    assert_same(prepared, general)
