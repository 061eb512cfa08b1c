"""The examples run, and give the same numbers as plain torch."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import instep

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = EXAMPLES / "questions"
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


@pytest.mark.slow
def test_quickstart_prints_the_same_numbers_with_and_without_instep() -> None:
    lines = output_of(EXAMPLES / "quickstart" / "plain.py")
    assert len(lines) == 5
    assert lines == output_of(EXAMPLES / "quickstart" / "parallel.py")


@pytest.mark.parametrize("script", sorted(path.name for path in QUESTIONS.glob("*.py") if path.name != "common.py"))
def test_each_question_gives_the_numbers_of_plain_torch(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each script compares both results itself and fails where they differ."""
    monkeypatch.syspath_prepend(str(QUESTIONS))
    monkeypatch.setitem(sys.modules, "common", None)  # another module of that name may be imported
    del sys.modules["common"]
    runpy.run_path(str(QUESTIONS / script), run_name="__main__")
    instep.shutdown()
    assert ": the same, (" in capsys.readouterr().out


def test_there_are_twelve_questions() -> None:
    assert len(list(QUESTIONS.glob("*.py"))) == 12 + 1
