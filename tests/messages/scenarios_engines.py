"""Engines and devices."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Engines and devices"


@scenario("An exception of the module itself", show_notes=True)
def module_error():
    class Net(nn.Module):
        def forward(self, x):
            if x.max() > 3:
                raise ValueError("x is too large")
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="serial", probe=False)
    model(torch.arange(6.0))


@scenario("A device that engine='processes' does not support")
def unsupported_device():
    model = instep.DataParallel(nn.Linear(3, 2, device="meta"), ["meta", "meta"], engine="processes")


@scenario("An engine from the environment that does not exist")
def engine_from_environment():
    import os

    os.environ["INSTEP_ENGINE"] = "process"
    try:
        model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    finally:
        del os.environ["INSTEP_ENGINE"]
