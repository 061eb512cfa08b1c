"""Compares two replica threads with DistributedDataParallel on two Gloo processes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ddp_comparison import Attention, Case, conv_net, images, main, mlp, rows, tokens

CASES = {
    "transformer, 4 layers": Case(Attention, tokens),
    "conv net": Case(conv_net, images),
    "MLP, width 1024": Case(partial(mlp, 1024), partial(rows, 64, 1024)),
}

if __name__ == "__main__":
    main(CASES, "threads", rounds=30)
