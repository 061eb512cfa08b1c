"""Collectives inside forward."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Collectives"


@scenario("An unknown reduction")
def unknown_op():
    class Net(nn.Module):
        def forward(self, x):
            return instep.all_reduce(x.sum(), op="average")

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4))


@scenario("A sum of bools")
def sum_of_bools():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_reduce((x > 0).any())

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(4))


@scenario("A mean of integers")
def mean_of_integers():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_reduce((x > 0).sum(), op="mean")

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(4))


@scenario("Values that differ, in all_gather")
def gathered_values():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_gather({"x": x, "note": f"{len(x)} samples"})

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5))


@scenario("Values that differ, in all_reduce")
def reduced_values():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_reduce({"x": x.sum(), "note": f"{len(x)} samples"})

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5))


@scenario("Types that differ")
def gathered_types():
    from collections import namedtuple

    class Net(nn.Module):
        def forward(self, x):
            Pair = namedtuple("Pair", ["x"])
            return x, instep.all_gather({"pair": Pair(x)})

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5))


@scenario("Keys that differ")
def gathered_keys():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_gather({1 if len(x) > 2 else "1": x})

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5))


@scenario("A sparse tensor")
def gathered_sparse():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_gather(x.to_sparse())

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5, 2))


@scenario("Different collectives")
def different_collectives():
    class Net(nn.Module):
        def forward(self, x):
            return x, instep.all_reduce(x.sum()) if len(x) > 2 else instep.all_gather(x)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="serial", probe=False)
    model(torch.ones(5))


@scenario("A collective that one replica does not call")
def missing_collective():
    class Net(nn.Module):
        def forward(self, x):
            return x - instep.all_reduce(x.mean(), "mean") if len(x) > 2 else x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="serial", probe=False)
    model(torch.ones(5))


@scenario("A gradient outside the backward of the call")
def gathered_gradient():
    kept = []
    keep = kept.append

    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            keep(instep.all_gather(y))
            return y

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"], engine="threads")
    model(torch.ones(5, 3))
    kept[-1].sum().backward()


@scenario("A gradient inside forward, through a collective")
def inner_gradient():
    class Net(nn.Linear):
        def forward(self, x):
            x = x.requires_grad_()
            total = instep.all_reduce(super().forward(x).sum())
            return torch.autograd.grad(total, x)[0]

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"], engine="serial", probe=False)
    model(torch.ones(5, 3))


@scenario("A collective inside an activation checkpoint")
def checkpointed_collective():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Linear):
        def forward(self, x):
            return checkpoint(self.centered, x, use_reentrant=False)

        def centered(self, x):
            y = super().forward(x)
            return y - instep.all_reduce(y.mean(0), "mean")

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"], engine="serial", probe=False)
    model(torch.ones(5, 3, requires_grad=True))


@scenario("Batch normalization inside an activation checkpoint")
def checkpointed_batchnorm():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return checkpoint(self.norm, x, use_reentrant=False)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="serial", probe=False)
    model(torch.randn(5, 3, requires_grad=True))


@scenario("Backward twice through a collective")
def gathered_twice():
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y - instep.all_reduce(y.mean(0), "mean")

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"], engine="serial", probe=False)
    loss = model(torch.ones(5, 3)).sum()
    loss.backward()
    loss.backward()


@scenario("A replica that does not reach a collective", messages=2)
def late_replica():
    import threading

    event = threading.Event()

    class Net(nn.Module):
        def forward(self, x):
            if instep.replica().index == 1:
                event.wait(2)
            return x / instep.all_reduce(x.sum())

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="threads", probe=False, timeout=1)
    model(torch.ones(4))
