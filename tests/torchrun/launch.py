"""Starts ranks with torchrun and collects what each prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """What torchrun and its ranks printed."""

    returncode: int
    output: str
    """Of torchrun itself."""
    ranks: list[str]
    """Standard output and error of each rank, of all its starts."""
    seconds: float

    def check(self) -> Job:
        """Fail with the output of all ranks unless all have succeeded."""
        assert self.returncode == 0, self.describe()
        return self

    def describe(self) -> str:
        parts = [f"--- rank {rank}\n{text[-6000:]}" for rank, text in enumerate(self.ranks)]
        return "\n".join([*parts, f"--- torchrun: exit code {self.returncode}\n{self.output[-2000:]}"])


def start_ranks(
    log_dir: Path,
    nproc: int,
    command: list[str],
    options: tuple[str, ...] = ("--standalone",),
    prefix: tuple[str, ...] = (),
    **variables: str,
) -> subprocess.Popen[str]:
    """Start torchrun. `command` is a script with its arguments, and `prefix` a command that runs torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1", "PYTHONPATH": str(ROOT), **variables}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.Popen(
        [*prefix, *torchrun, "--nproc-per-node", str(nproc), "--log-dir", str(log_dir), "--redirects", "3", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def finish_ranks(process: subprocess.Popen[str], log_dir: Path, nproc: int, timeout: float) -> Job:
    """Wait for torchrun, and read what the ranks printed."""
    start = time.monotonic()
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=30)
    seconds = time.monotonic() - start
    return Job(process.returncode, output, [read_rank(log_dir, rank) for rank in range(nproc)], seconds)


def read_rank(log_dir: Path, rank: int) -> str:
    """What a rank has printed so far."""
    files = sorted(log_dir.glob(f"*/attempt_*/{rank}/std*.log"))
    return "".join(file.read_text() for file in files)


def run_ranks(
    log_dir: Path,
    nproc: int,
    command: list[str],
    options: tuple[str, ...] = ("--standalone",),
    timeout: float = 300.0,
    **variables: str,
) -> Job:
    """Run a script on ranks of this machine."""
    process = start_ranks(log_dir, nproc, command, options, **variables)
    return finish_ranks(process, log_dir, nproc, timeout)
