"""State that forward changes."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "State"


@scenario("A total over samples")
def running_total():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total += x.sum()
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.arange(6.0))


@scenario("A list that every replica extends")
def extended_list():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.history = []

        def forward(self, x):
            self.history.append(float(x.max()))
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.arange(6.0))


@scenario("A value that may be the size of a shard")
def shard_size():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = 0

        def forward(self, x):
            self.seen += len(x)
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(6))


@scenario("on_unmerged_state='warn'")
def unmerged_warning():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total += x.sum()
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], on_unmerged_state="warn")
    model(torch.arange(6.0))


@scenario("Tensors that are kept on the module")
def stored_tensors():
    class Net(nn.Module):
        def forward(self, x):
            self.largest = x.topk(2).values
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.arange(6.0, requires_grad=True))


@scenario("A rule that does not fit the value")
def rule_does_not_fit():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.note = ""

        def forward(self, x):
            self.note = f"saw {float(x.sum())}"
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], state={"note": "mean"})
    model(torch.arange(6.0))


@scenario("A sum without a value from before")
def sum_without_start():
    class Net(nn.Module):
        def forward(self, x):
            self.total = float(x.sum())
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], state={"total": "sum"})
    model(torch.arange(6.0))


@scenario("A function that returns another type")
def rule_returns_other_type():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.history = []

        def forward(self, x):
            self.history.append(float(x.max()))
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], state={"history": lambda old, new, sizes: len(new)})
    model(torch.arange(6.0))


@scenario("A trainable parameter that forward writes to")
def written_parameter():
    class Net(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"])
    model(torch.ones(4, 3))


@scenario("A trainable parameter that forward writes to, with private copies")
def written_copy():
    class Net(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"], private_copies=True)
    model(torch.ones(4, 3))


@scenario("An object that cannot be copied")
def uncopyable():
    class Log(bytearray):
        calls = 0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = Log(b"calls")
            self.log.calls = 0

        def forward(self, x):
            self.log.calls += 1
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4))


@scenario("An iterator as an attribute")
def caller_only():
    import itertools

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = itertools.count()

        def forward(self, x):
            return x * next(self.steps)

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4))


@scenario("A forward that adds modules at every call")
def changed_structure():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList()

        def forward(self, x):
            self.layers.append(nn.Identity())
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    for _ in range(2):
        model(torch.ones(4))


@scenario("State of the previous batch")
def carried_state():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = None

        def forward(self, x):
            hidden = x if self.hidden is None else self.hidden + x
            self.hidden = hidden.detach()
            return hidden

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    for _ in range(2):
        model(torch.randn(4, 3))


@scenario("An embedding with max_norm whose weight is used elsewhere")
def max_norm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4, max_norm=1.0)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.arange(6))


@scenario("Batch normalization with its own arithmetic")
def own_batchnorm():
    class Norm(nn.BatchNorm1d):
        def forward(self, x):
            self.running_mean.lerp_(x.mean(0), self.momentum)
            return x - x.mean(0)

    model = instep.DataParallel(Norm(3), ["cpu", "cpu"], probe=False)
    model(torch.arange(18.0).view(6, 3))


@scenario("Batch normalization of one value")
def one_value():
    model = instep.DataParallel(nn.BatchNorm1d(3), ["cpu", "cpu"], probe=False)
    model(instep.Shards([torch.ones(1, 3), torch.ones(0, 3)]))


@scenario("Batch normalization without synchronization")
def unsynchronized_batchnorm():
    model = instep.DataParallel(nn.BatchNorm1d(3), ["cpu", "cpu"], sync_batchnorm=False, probe=False)
    model(torch.randn(6, 3))
