"""Pitfall 14: torch gathers strings to `<map object>` and fails on numbers; here each is merged by its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather

import instep


class Net(nn.Linear):
    def forward(self, x: Tensor, names: list[str]) -> dict[str, Any]:  # type: ignore[override]
        out = super().forward(x)
        return {
            "out": out,
            "names": [name.upper() for name in names],
            "version": "v1",
            "samples": len(x),
            "width": out.shape[1],
            "loss": out.pow(2).mean().item(),
        }


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("batch", [2, 5])
def test_strings_and_numbers_are_merged(engine: str, batch: int) -> None:
    net, x, names = Net(3, 2), torch.randn(batch, 3), [f"n{index}" for index in range(batch)]
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        ours, plain = model(x, names), net(x, names)
    torch.testing.assert_close(ours.pop("out"), plain.pop("out"))
    assert ours.pop("loss") == pytest.approx(plain.pop("loss"))
    assert ours == plain


def test_torch_does_not_gather_strings_and_numbers() -> None:
    assert "map object" in repr(gather([["a"], ["b"]], torch.device("cpu")))
    with pytest.raises(TypeError):
        gather([3, 2], torch.device("cpu"))
