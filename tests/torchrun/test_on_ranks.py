"""The tests of `ranks`, and those of parity and of the gallery, on 1, 2 and 3 ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .launch import ROOT, run_ranks

SCRIPT = str(ROOT / "tests/torchrun/pytest_on_rank.py")


def run_tests(
    tmp_path: Path, ranks: int, *arguments: str, minimum: int = 20, timeout: float = 600, **variables: str
) -> None:
    job = run_ranks(tmp_path, ranks, [SCRIPT, *arguments], timeout=timeout, **variables).check()
    counts = {re.search(r"(\d+) passed", text)[1] for text in job.ranks}
    assert len(counts) == 1, job.describe()
    assert int(counts.pop()) >= minimum


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_own_tests(tmp_path: Path, ranks: int) -> None:
    run_tests(tmp_path, ranks, "tests/torchrun/ranks")


@pytest.mark.slow
def test_messages_between_machines(tmp_path: Path) -> None:
    """As if the ranks were on different machines."""
    run_tests(tmp_path, 2, "tests/torchrun/ranks", INSTEP_TEST_MESSAGES="gloo")


@pytest.mark.slow
def test_training_of_many_models(tmp_path: Path) -> None:
    run_tests(tmp_path, 2, "tests/parity/test_parity.py", "-k", "test_batches_of_changing_size")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("folder", ["parity", "gallery"])
def test_folder(tmp_path: Path, folder: str, ranks: int) -> None:
    run_tests(tmp_path, ranks, f"tests/{folder}", timeout=800)
