"""Each example beside its plain form prints the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SOURCE = EXAMPLES.parent / "src"


def output_of(script: Path) -> list[str]:
    command = [sys.executable, script.name]
    done = subprocess.run(
        command,
        cwd=script.parent,
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("folder", sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()))
def test_plain_and_parallel_print_the_same(folder: str) -> None:
    lines = output_of(EXAMPLES / folder / "plain.py")
    assert len(lines) == 5
    assert lines == output_of(EXAMPLES / folder / "parallel.py")
