"""Runs pytest on one rank: `torchrun ... pytest_on_rank.py ARGUMENTS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"  # lets ranks share a GPU
    plugins = ["-p", "tests.torchrun.in_ranks", "-p", "no:cacheprovider", "-p", "no:xdist"]
    sys.exit(pytest.main([*plugins, "-q", "--tb=short", "--timeout", "120", *sys.argv[1:]]))
