"""A large model with a small batch: what it costs, beside plain torch."""

import copy
import statistics
import time

import torch
from beside import DEVICES, compare
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
    sides = {
        "plain": (plain, torch.optim.SGD(plain.parameters(), lr=0.01)),
        "instep": (model, torch.optim.SGD(model.parameters(), lr=0.01)),
    }
    times, losses = {name: [] for name in sides}, {name: [] for name in sides}
    for _ in range(10):
        x, y = torch.randn(16, 1000), torch.randn(16, 1000)
        for name, (module, optimizer) in sides.items():
            start = time.perf_counter()
            out = module(x)
            loss = nn.functional.mse_loss(out, y.to(out.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
            times[name].append(time.perf_counter() - start)
    compare("losses", torch.tensor(losses["plain"]), torch.tensor(losses["instep"]))
    for name, spent in times.items():
        print(f"{name:8} {statistics.median(spent) * 1e3:6.1f} ms a step")


if __name__ == "__main__":
    main()
