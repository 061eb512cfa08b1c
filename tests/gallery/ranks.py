"""Runs two ranks of DistributedDataParallel with Gloo, started once for all files of the gallery.

A test file that compares with ranks has a function `run_rank(rank)`. The fixture `two_ranks` returns its results on
both ranks, by the name of the file.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FILES = (
    "test_04_mean_of_means",
    "test_24_batchnorm_statistics",
    "test_47_uncommon_parameters",
    "test_27_the_module_itself",
    "test_45_same_dropout_mask",
    "test_46_contrastive_loss",
    "test_02_nothing_to_learn_from",
)
_ROOT = Path(__file__).parents[2]
_SECONDS = 90


def run_two_ranks(folder: Path) -> dict[str, list[Any]]:
    """The results of each file's `run_rank` on the two ranks."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gallery.ranks", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    results = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    return {name: [result[name] for result in results] for name in FILES}


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    results = {name: importlib.import_module(f"tests.gallery.{name}").run_rank(rank) for name in FILES}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
