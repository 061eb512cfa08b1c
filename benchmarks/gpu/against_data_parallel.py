"""Compares a training step of instep with nn.DataParallel on one GPU that all replicas share, without MPS.

Sides take turns in one process: the module on the whole batch, `nn.DataParallel`, and instep with `threads` and with
`processes`. Batch norm is that of each shard for nn.DataParallel, which knows no other, and that of the whole batch for
instep. The table shows medians.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack

import torch
from against_ddp import CASES, DEVICE, WARM_UP_STEPS, Case, Side, make_parser, training_side
from torch import nn

import instep


def make_sides(case: Case, replicas: int, stack: ExitStack) -> dict[str, Side]:
    batches = case.sample()
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    models = {"plain": case.module(), "nn.DataParallel": nn.DataParallel(case.module(), [0] * replicas)}
    for engine in ("threads", "processes"):
        model = instep.DataParallel(case.module(), [device] * replicas, engine=engine)
        models[engine] = stack.enter_context(model)
    return {name: training_side(model, batches) for name, model in models.items()}


def compare(name: str, replicas: int, rounds: int, steps: int) -> None:
    torch.manual_seed(0)
    with ExitStack() as stack:
        sides = make_sides(CASES[name], replicas, stack)
        for count in (1, WARM_UP_STEPS, *[steps] * rounds):
            for side in sides.values():
                side.run(count)
        print(f"{name}, {replicas} replicas")
        medians = {label: statistics.median(side.times[2:]) for label, side in sides.items()}
        for label, median in medians.items():
            print(f"  {label:20}{median:9.1f} ms    nn.DataParallel / this {medians['nn.DataParallel'] / median:6.2f}")
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    arguments = make_parser().parse_args()
    if DEVICE == "cuda":
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    for replicas in arguments.replicas:
        for name in [name for name in CASES if arguments.only in name]:
            compare(name, replicas, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
