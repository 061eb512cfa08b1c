"""Computes what a training step moves between k GPUs: with engine="processes", and with DistributedDataParallel.

Nothing is measured. The sizes of parameters, buffers, batches and outputs are those of the cases of `against_ddp.py`;
outputs are in bfloat16, as under autocast. A byte counts once for each GPU that receives it from another one:

- instep sends the workers their part of the batch, the weights and buffers, and the gradients of their outputs, and
  receives their outputs and the gradients of their weights. With `with_loss`, the output is one number.
- DDP's all-reduce moves the fewest bytes after which every GPU has the sum of all gradients: each bucket is reduced to
  the GPUs in parts, and the parts are gathered.
- Both exchange statistics of batch norm: a mean, a variance and a count per layer in forward, two sums in backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

import against_ddp
import torch
from against_ddp import CASES, Case
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

MB = 1e6


class Sizes(NamedTuple):
    """Bytes of one case."""

    batch: int
    output: int
    parameters: int
    buffers: int
    statistics: int
    """The rows of all batch norm layers that one replica sends in a forward and a backward."""


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(case: Case) -> Sizes:
    """The sizes of a case, from a forward without data."""
    with torch.device("meta"):
        module, batch = case.make(), case.sample()[0]
    output: Any = module(batch.inputs[0])
    logits = output.logits if hasattr(output, "logits") else output
    channels = [layer.num_features for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return Sizes(
        nbytes(batch.inputs),
        logits.numel() * torch.bfloat16.itemsize,
        nbytes(module.parameters()),
        nbytes(module.buffers()),
        sum(4 * (2 * count + 1) + 4 * 2 * count for count in channels),
    )


def report(name: str, sizes: Sizes, replicas: int) -> None:
    others, part = replicas - 1, (replicas - 1) / replicas
    batch, outputs = part * sizes.batch, 2 * part * sizes.output
    weights, gradients = others * (sizes.parameters + sizes.buffers), others * sizes.parameters
    statistics = replicas * others * sizes.statistics
    ddp = 2 * others * sizes.parameters + statistics
    totals = batch + outputs + weights + gradients + statistics, batch + weights + gradients + statistics, ddp
    row = [batch, outputs, weights, gradients, statistics, *totals]
    print(f"{name + f', {replicas} replicas':48}" + "".join(f"{value / MB:11.1f}" for value in row))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    against_ddp.DEVICE = "meta"  # tensors without data
    names = ["batch", "outputs", "weights", "gradients", "statistics", "instep", "with_loss", "DDP"]
    print(f"{'MB a step':48}" + "".join(f"{name:>11}" for name in names))
    for name, case in CASES.items():
        if "32 to 128" in name:
            continue
        sizes = measure(case)
        for replicas in arguments.replicas:
            report(name, sizes, replicas)


if __name__ == "__main__":
    main()
