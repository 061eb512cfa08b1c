"""`split`, `merge`, `scatter`, `gather` and `parallel_apply`."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Functions"


@scenario("No parts")
def no_parts():
    instep.split(torch.ones(4), 0)


@scenario("A value that cannot be split")
def split_mismatch():
    instep.split({"x": torch.ones(5, 2), "y": torch.ones(3)}, 2)


@scenario("Nothing to merge")
def nothing_to_merge():
    instep.merge([])


@scenario("Another number of sizes than parts")
def wrong_sizes():
    instep.merge([torch.ones(2), torch.ones(3)], [5])


@scenario("Parts whose sizes are unknown")
def unknown_sizes():
    instep.merge([[torch.ones(3), torch.ones(3)], [torch.ones(4), torch.ones(4)]])


@scenario("Parts that changed since they were split")
def changed_parts():
    parts = instep.split({"x": torch.ones(4), "y": torch.ones(4)}, 2)
    del parts[1]["y"]
    instep.merge(parts)


@scenario("scatter of a value that cannot be split")
def scatter_mismatch():
    instep.scatter({"x": torch.ones(5, 2), "y": torch.ones(3)}, ["cpu", "cpu"])


@scenario("gather of outputs of different types")
def gather_types():
    instep.gather([torch.ones(2), [torch.ones(2)]], "cpu")


@scenario("gather of nothing")
def gather_nothing():
    instep.gather([], "cpu")


@scenario("scatter to no devices")
def scatter_nowhere():
    instep.scatter(torch.ones(4), [])


@scenario("parallel_apply with too few inputs")
def too_few_inputs():
    instep.parallel_apply([nn.Linear(3, 2), nn.Linear(3, 2)], [torch.ones(4, 3)])


@scenario("parallel_apply with too few devices")
def too_few_devices():
    instep.parallel_apply([nn.Linear(3, 2), nn.Linear(3, 2)], [torch.ones(4, 3)] * 2, devices=["cpu"])
