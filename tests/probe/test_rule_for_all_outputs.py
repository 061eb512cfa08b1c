"""A reduction that is given for all outputs is for the loss, not for the logits of another call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    """Returns the loss with a target, and logits without one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.layer(x)
        if y is None:
            return logits
        return nn.functional.cross_entropy(logits, y, ignore_index=2)


@pytest.mark.parametrize("first", ["loss", "logits"])
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_logits_are_concatenated(engine: str, first: str, wrap: Any) -> None:
    net = Net()
    model = wrap(net, engine=engine, merge=instep.weighted_by(lambda y: (y != 2).sum()))
    for size in (8, 7):
        x, y = torch.randn(size, 4), torch.randint(0, 3, (size,))
        for arguments in sorted([(x,), (x, y)], key=len, reverse=first == "loss"):
            torch.testing.assert_close(model(*arguments), net(*arguments))


@pytest.mark.parametrize("rule", ["mean", "sum", "max", "min"])
def test_every_reduction(rule: str, wrap: Any) -> None:
    net = Net()
    model = wrap(net, merge=rule)
    x = torch.randn(8, 4)
    torch.testing.assert_close(model(x), net(x))


def test_a_rule_by_path_is_applied_as_it_is(wrap: Any) -> None:
    class Peak(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            return {"rows": super().forward(x)}

    x = torch.randn(8, 4)
    assert wrap(Peak(), merge={"rows": "max"})(x)["rows"].shape == (4, 3)


def test_a_statistic_of_the_batch_is_reduced(wrap: Any) -> None:
    """Its shape does not follow the batch, even where it has as many entries as a shard has samples."""

    class Total(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return self.layer(x).sum(0)

    net, x = Total(), torch.randn(6, 4)
    torch.testing.assert_close(wrap(net, merge="sum")(x), net(x))
