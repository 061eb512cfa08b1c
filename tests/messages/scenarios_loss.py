"""`with_loss`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import instep

from .harness import scenario

TOPIC = "Losses on the replicas (with_loss)"


@scenario("No criterion")
def no_criterion():
    model = instep.with_loss(nn.Linear(3, 2), None)


@scenario("A criterion with parameters")
def trainable_criterion():
    model = instep.with_loss(nn.Linear(3, 2), nn.Bilinear(2, 2, 1))


@scenario("A call without the target")
def no_target():
    model = instep.DataParallel(instep.with_loss(nn.Linear(3, 2), nn.CrossEntropyLoss(), target=1), ["cpu", "cpu"])
    model(torch.ones(4, 3))


@scenario("A call without the keyword of the target")
def no_target_keyword():
    loss = instep.with_loss(nn.Linear(3, 2), nn.CrossEntropyLoss(), target="labels")
    model = instep.DataParallel(loss, ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))


@scenario("A criterion with another divisor")
def wrong_divisor():
    class Doubled(nn.MSELoss):
        def __call__(self, output, target):
            loss = super().__call__(output, target)
            return 2 * loss if self.reduction == "mean" else loss

    model = instep.DataParallel(instep.with_loss(nn.Identity(), Doubled()), ["cpu", "cpu"])
    model(torch.arange(6.0), torch.zeros(6))


@scenario("A weight that is not the divisor of the mean")
def wrong_weight():
    def criterion(output, target):
        return F.mse_loss(output, target)

    loss = instep.with_loss(nn.Identity(), criterion, weight=lambda output, target: 1)
    model = instep.DataParallel(loss, ["cpu", "cpu"])
    model(torch.arange(6.0), torch.zeros(6))
