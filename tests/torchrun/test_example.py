"""The same script prints the same losses in one process and on ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .launch import ROOT

SCRIPT = str(ROOT / "examples/ranks/train.py")


def lines_of(folder: Path, *command: str) -> list[str]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "net.pt").exists()
    return done.stdout.splitlines()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_losses_are_the_same_line_by_line(tmp_path: Path, ranks: int) -> None:
    plain = lines_of(tmp_path / "plain", SCRIPT)
    assert len(plain) == 3
    assert lines_of(tmp_path / "ranks", "-m", "instep", "run", "--nproc", str(ranks), SCRIPT) == plain


@pytest.mark.slow
def test_nproc_may_follow_the_script(tmp_path: Path) -> None:
    assert len(lines_of(tmp_path / "ranks", "-m", "instep", "run", SCRIPT, "--nproc", "2")) == 3
