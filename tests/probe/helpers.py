"""What the tests of the probe share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.probe.probe import Probe
from instep.runtime.probe_flag import is_probing as is_probing
from instep.structure.tree import tensors_in

ENGINES = ["serial", "threads", "processes"]
both_engines = pytest.mark.parametrize("engine", ENGINES)


class Net(nn.Module):
    """A layer, and then what the test asks for."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.then = then

    def forward(self, x: Tensor, **others: Any) -> Any:
        return self.then(self, self.layer(x), **others)


def probe_of(model: instep.DataParallel, method: str = "forward") -> Probe:
    probe = model._instep_runner.binding(method).probe
    assert probe is not None
    return probe


def said(model: instep.DataParallel, *args: Any, **kwargs: Any) -> dict[str, str]:
    return dict(model.explain(*args, **kwargs).outputs)


def assert_same(ours: Any, plain: Any) -> None:
    left, right = list(tensors_in(ours)), list(tensors_in(plain))
    assert len(left) == len(right)
    for one, two in zip(left, right, strict=True):
        torch.testing.assert_close(one, two)


def assert_parity(wrap: Any, net: nn.Module, *args: Any, loss: Callable[[Any], Tensor], **kwargs: Any) -> Any:
    """Outputs and gradients through the wrapper are the plain module's; the options are those of the wrapper."""
    options = kwargs.pop("options", {})
    plain = copy.deepcopy(net)
    model = wrap(net, **options)
    ours, theirs = model(*args, **kwargs), plain(*args, **kwargs)
    assert_same(ours, theirs)
    loss(ours).backward()
    loss(theirs).backward()
    for one, two in zip(net.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)
    return model


def some(output: Any) -> Tensor:
    return sum((t.double() * (1 + i)).sum() for i, t in enumerate(tensors_in(output)) if t.requires_grad)  # type: ignore
