"""Two real ranks of DistributedDataParallel on Gloo, started once, that run their part of every file which has one.

A file of the gallery that shows what ranks do has a function `on_a_rank(rank)`; what it gives on each rank comes back
to the fixture `two_ranks`, by the name of the file.
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
    """What each file's `on_a_rank` gave on the two ranks."""
    around = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gallery.ranks", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=_ROOT, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    return {name: [each[name] for each in found] for name in FILES}


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found = {name: importlib.import_module(f"tests.gallery.{name}").on_a_rank(rank) for name in FILES}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
