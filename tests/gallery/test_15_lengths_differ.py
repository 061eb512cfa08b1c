"""Pitfall 15: outputs whose length depends on the data ("Gather got an input of invalid size")."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Selects(nn.Linear):
    """Returns the selected rows and the boxes of each sample."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"kept": out[x[:, 0] > 0], "boxes": [row[: 1 + index % 2] for index, row in enumerate(out)]}


class Encodes(nn.Linear):
    """Returns outputs padded to the longest sequence of its shard."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[:, : int(lengths.max())]


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_selected_rows_are_concatenated(engine: str) -> None:
    net, x = Selects(3, 2), torch.randn(7, 3)
    x[:, 0] = torch.tensor([1.0, -1, 1, 1, -1, 1, 1])
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge={"boxes": "list"}) as model:
        ours, plain = model(x), net(x)
    torch.testing.assert_close(ours["kept"], plain["kept"])
    for mine, other in zip(ours["boxes"], plain["boxes"], strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_shapes_that_cannot_be_concatenated_raise_and_merge_rules_help(engine: str) -> None:
    net, x, lengths = Encodes(3, 2), torch.randn(4, 6, 3), torch.tensor([2, 3, 6, 4])
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.MergeError, match=r"(?s)shapes \[\[2, 3, 2\], \[2, 6, 2\]\].*'pad', 'nested', 'list'"),
    ):
        model(x, lengths)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge="pad") as model:
        padded = model(x, lengths)
    expected = net(x, lengths)
    torch.testing.assert_close(padded[:2], nn.functional.pad(expected[:2, :3], (0, 0, 0, 3)))
    torch.testing.assert_close(padded[2:], expected[2:])
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge="nested") as model:
        nested = model(x, lengths).unbind()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge="list") as model:
        parts = model(x, lengths)
    for sample, row in enumerate(nested):
        torch.testing.assert_close(row, expected[sample, : 3 if sample < 2 else 6])
    assert [tuple(part.shape) for part in parts] == [(2, 3, 2), (2, 6, 2)]
    torch.testing.assert_close(parts[1], expected[2:])


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_unique_values_raise_without_a_merge_rule(engine: str) -> None:
    class Distinct(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.unique((2 * super().forward(x)).round())

    net, x = Distinct(3, 2), torch.randn(9, 3)
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.MergeError, match=r"in the parts and .* in the whole"),
    ):
        model(x)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge="unique") as model:
        torch.testing.assert_close(model(x), net(x))
