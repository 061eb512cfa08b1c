"""Outputs with a rule of their own whose parts are not alike: an error by name, never some of what one device gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import MergeError

from .merging import refused

engines = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])


# Sparse tensors


class Bag(nn.Module):
    """A sparse matrix of words: as wide as its greatest word, or as it was told."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.width = width

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        rows = torch.arange(len(words)).repeat_interleave(words.shape[1])
        size = (len(words), self.width or int(words.max()) + 1)
        counts = torch.sparse_coo_tensor(
            torch.stack([rows, words.flatten()]), torch.ones(words.numel()), size, check_invariants=True
        )
        return {"words": counts}


WORDS = torch.tensor([[0, 1], [2, 1], [0, 2], [3, 9], [8, 7]])


@engines
def test_sparse_outputs_of_other_widths_say_to_give_a_size(engine: str) -> None:
    net = Bag()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=engine != "threads") as model:
        model(WORDS % 3)
        with pytest.raises(MergeError) as caught:
            model(WORDS)
        message = str(caught.value)
        assert "the output 'words': sparse tensors of shapes" in message
        assert ", 3]" in message
        assert ", 10]" in message
        assert "torch.sparse_coo_tensor(indices, values, size)" in message
        net.width = 10
        torch.testing.assert_close(model(WORDS)["words"], net(WORDS)["words"])


def test_sparse_parts_are_joined_only_if_their_other_dims_agree() -> None:
    parts = [{"a": torch.ones(3, 2).to_sparse()}, {"a": torch.ones(2, 4).to_sparse()}]
    assert "the output 'a': sparse tensors of shapes [[3, 2], [2, 4]]" in refused(parts)
    assert "shapes [[3, 2], [2, 2, 1]]" in refused([torch.ones(3, 2).to_sparse(), torch.ones(2, 2, 1).to_sparse()])
