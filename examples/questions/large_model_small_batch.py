"""The time of a step of a large model with a small batch, with instep and with plain torch."""

import copy
import statistics
import time

import torch
from common import DEVICES, compare
from torch import nn

import instep


def large(inputs=1000, hidden=500):
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, inputs),
    )


def main():
    torch.manual_seed(0)
    plain = large()
    model = instep.DataParallel(copy.deepcopy(plain), DEVICES)
    runs = {
        "plain": (plain, torch.optim.SGD(plain.parameters(), lr=0.01)),
        "instep": (model, torch.optim.SGD(model.parameters(), lr=0.01)),
    }
    times, losses = {name: [] for name in runs}, {name: [] for name in runs}
    for _ in range(10):
        x, y = torch.randn(16, 1000), torch.randn(16, 1000)
        for name, (module, optimizer) in runs.items():
            start = time.perf_counter()
            out = module(x)
            loss = nn.functional.mse_loss(out, y.to(out.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
            times[name].append(time.perf_counter() - start)
    compare("losses", torch.tensor(losses["plain"]), torch.tensor(losses["instep"]))
    for name, seconds in times.items():
        print(f"{name:8} {statistics.median(seconds) * 1e3:6.1f} ms per step")


if __name__ == "__main__":
    main()
