"""Trains a small net. One rank can be told to do something else at a certain step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import torch
from torch import nn

import instep


def do_something_else(options: argparse.Namespace, rank: int) -> None:
    print(f"rank {rank} begins to {options.do} at {time.time()}", flush=True)
    if options.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options.do in ("sleep", "wait"):
        time.sleep(4 * options.timeout + 20)
    elif options.do == "return":
        sys.exit(0)
    else:
        raise KeyError("this rank has failed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, default=-1, help="the step")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--do", choices=["kill", "sleep", "return", "raise", "wait"], default="kill")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = instep.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), timeout=options.timeout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    for step in range(options.steps):
        x = torch.randn(6, 4, generator=generator)
        y = torch.randn(6, 2, generator=generator)
        if step == options.at and rank == options.rank and not attempt:
            do_something_else(options, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.6f}", flush=True)
        time.sleep(options.pause)
    print("done", flush=True)


if __name__ == "__main__":
    main()
