"""Compares two replicas of engine="processes" with DistributedDataParallel on two Gloo processes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ddp_comparison import Attention, Case, conv_net, deeper_conv_net, images, lenet, main, mlp, rows, tokens

CASES = {
    "MLP, width 4096, batch 32": Case(partial(mlp, 4096), partial(rows, 32, 4096)),
    "MLP, width 1024, batch 64": Case(partial(mlp, 1024), partial(rows, 64, 1024)),
    "transformer, with_loss": Case(Attention, tokens, with_loss=True),
    "conv net, batch 128": Case(conv_net, partial(images, 128)),
    "conv net, batch 32": Case(conv_net, images),
    "conv net, 5 layers, batch 32": Case(deeper_conv_net, images),
    "LeNet-5, batch 32": Case(lenet, images),
}

if __name__ == "__main__":
    main(CASES, "processes", rounds=24)
