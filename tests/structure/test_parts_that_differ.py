"""Outputs with a rule of their own whose parts are not alike: an error by name, never some of what one device gives."""

from __future__ import annotations

from typing import Any

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


# Graphs


class Graphs(nn.Module):
    """Graphs that have something more where a sample is large: a fact of the whole batch on one device."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.more = more

    def forward(self, x: Tensor) -> dict[str, Any]:
        data = pytest.importorskip("torch_geometric.data")
        found = []
        for row in self.layer(x):
            graph = data.HeteroData()
            graph["user"].x = row[None]
            if bool((x > 100).any()):
                graph["user" if self.more == "key" else "item"].z = row[None]
            found.append(graph)
        return {"graphs": data.Batch.from_data_list(found)}


@engines
@pytest.mark.parametrize("more", ["key", "kind"])
def test_graphs_with_something_more_are_refused_whichever_part_has_it(engine: str, more: str) -> None:
    pytest.importorskip("torch_geometric")
    net = Graphs(more)
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False) as model:
        torch.testing.assert_close(model(x)["graphs"]["user"].x, net(x)["graphs"]["user"].x)
        for sample, where in ((0, "part 0 and not in part 1"), (4, "part 1 and not in part 0")):
            large = x.clone()
            large[sample] = 200
            with pytest.raises(MergeError) as caught:
                model(large)
            what = "the attribute 'z' of 'user'" if more == "key" else "the kind of nodes or edges 'item'"
            assert f"cannot merge the output 'graphs': {what} is in {where}; give it to every graph" in str(
                caught.value
            )
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
        model(x)
        with pytest.raises(MergeError, match=r"the output 'graphs': .* is in part 1 and not in part 0"):
            model(large)
