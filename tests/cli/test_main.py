"""The command line, run for real in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from instep.cli.demo.corpus import HELD_OUT_SAMPLES
from instep.cli.demo.model import Reader

ROOT = Path(__file__).parents[2]
PATIENCE = 100


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    # Wide and without colours, so that the output is the same in every terminal and in none.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.Popen(
        [sys.executable, "-m", "instep", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def run(*arguments: str, folder: Path) -> tuple[int, str, str]:
    with start(*arguments, folder=folder) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


def test_version_is_the_declared_one(tmp_path: Path) -> None:
    declared = re.search(r'^version = "(.+)"$', ROOT.joinpath("pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert run("--version", folder=tmp_path) == (0, f"instep {declared[1]}\n", "")


@pytest.mark.slow
def test_demo_proves_trains_counts_and_saves(tmp_path: Path) -> None:
    code, out, err = run("demo", "--steps", "3", "--replicas", "2", "--out", "weights/demo.pt", folder=tmp_path)
    assert (code, err) == (0, ""), out
    assert "model.explain(batch)" in out
    steps = re.findall(r"^│ +(\d) │ +(\d\.\d+) │ +(\d\.\d+) │", out, re.MULTILINE)
    assert [number for number, _, _ in steps] == ["1", "2", "3"]
    assert all(abs(float(plain) - float(instep)) < 1e-4 for _, plain, instep in steps)
    assert "losses, gradients and weights are the same up to float32 rounding" in out
    assert re.search(r"\d\.\d+ bits per character", out)
    assert f"{HELD_OUT_SAMPLES} of {HELD_OUT_SAMPLES} samples, each once, in order" in out
    assert re.search(r"^it writes +def ", out, re.MULTILINE)
    assert "a plain module loads it and predicts the same" in out
    Reader().load_state_dict(torch.load(tmp_path / "weights" / "demo.pt", weights_only=True, map_location="cpu"))


@pytest.mark.skipif(os.name != "posix", reason="sends a signal as a terminal does")
@pytest.mark.slow
def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    with start("demo", "--steps", "1000000", folder=tmp_path) as process:
        assert process.stdout is not None
        try:
            # Training begins after the proof; an empty line is the end of the output.
            while (line := process.stdout.readline()) and not line.startswith("proof"):
                pass
            assert line
        finally:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [(), ("dance",), ("demo", "--steps", "0"), ("demo", "--replicas", "many"), ("demo", "--engine", "steam")],
)
def test_wrong_usage_says_so(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from instep.cli.main import main

    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: instep" in capsys.readouterr().err
