"""Replicas that share one GPU: the plain module, threads, and worker processes with CUDA IPC and with host memory."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import torch
from torch import Tensor, nn

import instep

ROUNDS, STEPS = 10, 3
SIDES = {"threads": {}, "processes": {}, "by host memory": {"private_copies": True}}


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(256, 10))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))


CASES = {
    "transformer, 6 layers of 256, 64 x 16": (transformer, (64, 16, 256)),
    "MLP, width 4096, batch 64": (wide, (64, 4096)),
}


class Side:
    """One way to run a step, and its times in milliseconds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        self.times: list[float] = []

    def run(self, x: Tensor, steps: int) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - start) / steps * 1000)


def main() -> None:
    print(f"{'':38}{'replicas':>9}{'plain':>9}" + "".join(f"{name:>16}" for name in SIDES))
    for name, (build, shape) in CASES.items():
        for count in (2, 4):
            x = torch.randn(*shape, device="cuda")
            with ExitStack() as stack:
                sides = [Side(build().cuda())]
                for side, options in SIDES.items():
                    engine = "threads" if side == "threads" else "processes"
                    wrapped = instep.DataParallel(build().cuda(), [0] * count, engine=engine, **options)
                    sides.append(Side(stack.enter_context(wrapped)))
                for side in sides:
                    side.run(x, 5)
                    side.times.clear()
                for _ in range(ROUNDS):
                    for side in sides:
                        side.run(x, STEPS)
                plain, *others = (statistics.median(side.times) for side in sides)
                print(f"{name:38}{count:9}{plain:6.2f} ms" + "".join(f"{ms:13.2f} ms" for ms in others), flush=True)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("this benchmark needs a CUDA device")
