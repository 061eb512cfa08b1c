"""Gradients and hooks."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Gradients and hooks"


@scenario("A second derivative")
def second_derivative():
    model = instep.DataParallel(nn.Linear(3, 1), ["cpu", "cpu"], engine="threads")
    x = torch.ones(4, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


@scenario("A batched backward")
def batched_backward():
    model = instep.DataParallel(nn.Linear(3, 1), ["cpu", "cpu"], engine="threads")
    x = torch.ones(4, 3, requires_grad=True)
    torch.autograd.grad(model(x), x, torch.ones(2, 4, 1), is_grads_batched=True)


@scenario("Backward twice through one graph")
def backward_twice():
    model = instep.DataParallel(nn.Linear(3, 1), ["cpu", "cpu"], engine="threads")
    loss = model(torch.ones(4, 3)).sum()
    loss.backward()
    loss.backward()


@scenario("backward() inside forward")
def inner_backward():
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.sum().backward()
            return y.detach()

    model = instep.DataParallel(Net(3, 1), ["cpu", "cpu"])
    model(torch.ones(4, 3))


@scenario("zero_grad() inside forward")
def inner_zero_grad():
    class Net(nn.Linear):
        def forward(self, x):
            self.zero_grad()
            return super().forward(x)

    model = instep.DataParallel(Net(3, 1), ["cpu", "cpu"])
    model(torch.ones(4, 3))


@scenario("A tensor that left forward through a list")
def stray_gradient():
    kept = []
    keep = kept.append

    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            keep(y)
            return y

    model = instep.DataParallel(Net(3, 1), ["cpu", "cpu"], engine="threads")
    model(torch.ones(4, 3))
    kept[-1].sum().backward()


@scenario("A forward hook")
def forward_hook():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].register_forward_hook(lambda module, args, output: output * 2)
    model = instep.DataParallel(net, ["cpu", "cpu"])
    model(torch.ones(4, 3))


@scenario("A hook that forward registers on a tensor")
def tensor_hook():
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return y

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"])
    for _ in range(3):
        model(torch.ones(4, 3))


@scenario("retain_grad() in forward")
def retain_grad():
    class Net(nn.Linear):
        def forward(self, x):
            self.features = super().forward(x)
            self.features.retain_grad()
            return self.features

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"])
    model(torch.ones(4, 3))


@scenario("A custom backward that uses the whole batch")
def custom_backward():
    class Centered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient - gradient.mean(0)

    class Net(nn.Linear):
        def forward(self, x):
            return Centered.apply(super().forward(x))

    model = instep.DataParallel(Net(3, 2), ["cpu", "cpu"])
    model(torch.randn(6, 3))
