"""engine='processes': what reaches the workers, and what happens if one fails."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Worker processes"


@scenario("An attribute that cannot be pickled")
def unpicklable_attribute():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = open("/dev/null", "w")

        def forward(self, x):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes")
    model(torch.ones(4))


@scenario("An argument that cannot be pickled")
def unpicklable_argument():
    import threading

    class Net(nn.Module):
        def forward(self, x, options):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes")
    model(torch.ones(4), {"lock": threading.Lock()})


@scenario("A global that cannot be pickled")
def unpicklable_global():
    import threading

    lock = threading.Lock()

    class Net(nn.Module):
        def forward(self, x):
            with lock:
                return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes")
    model(torch.ones(4))


@scenario("An output that cannot be pickled")
def unpicklable_output():
    class Net(nn.Module):
        def forward(self, x):
            import threading

            return x, threading.Lock()

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False, merge={"1": "first"})
    model(torch.ones(4))


@scenario("An argument that is nested too deeply")
def nested_too_deeply():
    class Node:
        def __init__(self, next):
            self.next = next

    class Net(nn.Module):
        def forward(self, x, chain):
            return x

    chain = None
    for _ in range(5_000):
        chain = Node(chain)
    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", in_dims={"chain": None})
    model(torch.ones(4), chain)


@scenario("An argument that cannot be rebuilt")
def not_rebuilt():
    class Config:
        def __setstate__(self, state):
            raise ValueError("no such file")

    class Net(nn.Module):
        def forward(self, x, config):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes")
    config = Config()
    config.path = "settings.toml"
    model(torch.ones(4), config)


@scenario("A global that forward changes")
def changed_global():
    calls = 0

    class Net(nn.Module):
        def forward(self, x):
            global calls
            calls += 1
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False)
    model(torch.ones(4))


@scenario("An object that every replica gets and forward changes")
def changed_object():
    class Meter:
        total = 0

    class Net(nn.Module):
        def forward(self, x, meter):
            meter.total += 1
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False)
    model(torch.ones(4), Meter())


@scenario("Two arguments with the same memory")
def aliased_arguments():
    class Net(nn.Module):
        def forward(self, x, y):
            y += 1
            return x + y

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False)
    x = torch.ones(4, 3)
    model(x[:, :2], x[:, 1:])


@scenario("A global tensor that needs a gradient")
def global_parameter():
    scale = torch.ones(1, requires_grad=True)

    class Net(nn.Module):
        def forward(self, x):
            return x * scale

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False)
    model(torch.ones(4))


@scenario("An object with a tensor that needs a gradient")
def parameter_in_object():
    class Scale:
        def __init__(self):
            self.value = torch.ones(1, requires_grad=True)

    class Net(nn.Module):
        def forward(self, x, scale):
            return x * scale.value

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False, in_dims={"scale": None})
    model(torch.ones(4), Scale())


@scenario("A sparse output that needs a gradient")
def sparse_output():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (x * self.scale).to_sparse()

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False)
    model(torch.eye(4))


@scenario("A worker that exits")
def worker_exits():
    class Net(nn.Module):
        def forward(self, x):
            if instep.replica().index == 1:
                import os

                os._exit(3)
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False, restarts=0)
    model(torch.ones(4))


@scenario("Weights that change between a forward and its backward, in which a worker ends")
def worker_lost():
    import os
    import signal

    class Net(nn.Linear):
        def forward(self, x):
            if instep.replica().index == 1:
                self.pid = os.getpid()
            return super().forward(x)

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"], engine="processes", probe=False, state={"pid": "max"})
    loss = model(torch.ones(4, 3)).sum()
    os.kill(model.pid, signal.SIGKILL)
    with torch.no_grad():
        model.weight.mul_(2)
    loss.backward()


@scenario("A worker that does not reply", messages=2)
def worker_hangs():
    import time

    class Net(nn.Module):
        def forward(self, x):
            if instep.replica().index == 1:
                time.sleep(30)
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], engine="processes", probe=False, timeout=1)
    model(torch.ones(4))
