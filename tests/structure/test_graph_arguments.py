"""Batches of graphs in separate arguments: which arguments are recognized, and how each is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.structure.graph_arguments import GraphArgument, mark_graphs
from instep.structure.plan import Planner
from instep.structure.split import apply_plan

IDS = torch.tensor([0, 0, 0, 1, 2, 2])
EDGES = torch.tensor([[0, 1, 2, 1, 3, 4, 5], [1, 0, 1, 2, 3, 5, 4]])
"""Graphs of 3, 1 and 2 nodes and of 4, 1 and 2 edges."""


def split(**arguments: Any) -> list[dict[str, Any]]:
    """The parts of these arguments for the first two graphs and the third."""
    names = tuple(arguments)
    values = mark_graphs(names, tuple(arguments.values()), "auto", 0)
    parts = apply_plan(Planner(2).plan(names, values), values)
    return [dict(zip(names, part, strict=True)) for part in parts]


def test_parts_have_the_nodes_and_edges_of_their_graphs() -> None:
    x, weight, y = torch.randn(6, 2, requires_grad=True), torch.randn(7), torch.randn(3)
    first, second = split(
        x=x, edge_index=EDGES, edge_weight=weight, batch=IDS, y=y, batch_size=3, num_nodes=6, names=["a", "b", "c"], k=3
    )
    assert torch.equal(first["x"], x[:4])
    assert torch.equal(second["x"], x[4:])
    assert torch.equal(first["edge_index"], EDGES[:, :5])
    assert second["edge_index"].tolist() == [[0, 1], [1, 0]]
    assert torch.equal(second["edge_weight"], weight[5:])
    assert first["batch"].tolist() == [0, 0, 0, 1]
    assert second["batch"].tolist() == [0, 0]
    assert torch.equal(second["y"], y[2:])
    assert [(part["batch_size"], part["num_nodes"], part["k"]) for part in (first, second)] == [(2, 4, 3), (1, 2, 3)]
    assert second["names"] == ["c"]
    second["x"].sum().backward()
    assert x.grad[:, 0].tolist() == [0, 0, 0, 0, 1, 1]


def test_an_edge_index_and_an_index_keep_their_type_and_sizes() -> None:
    pyg = pytest.importorskip("torch_geometric")
    edges = pyg.EdgeIndex(EDGES, sparse_size=(6, 6))
    first, second = split(x=torch.randn(6), edge_index=edges, batch=pyg.Index(IDS, dim_size=3, is_sorted=True))
    assert first["edge_index"].sparse_size() == (4, 4)
    assert second["edge_index"].sparse_size() == (2, 2)
    assert second["edge_index"].tolist() == [[0, 1], [1, 0]]
    assert (first["batch"].dim_size, second["batch"].dim_size) == (2, 1)
    assert second["batch"].is_sorted


def test_rows_are_distinguished_by_name_where_sizes_are_equal() -> None:
    edges = EDGES[:, :6]  # as many edges as nodes
    first, _ = split(x=torch.arange(6), edge_attr=torch.arange(6), edge_index=edges, batch=IDS)
    assert (len(first["x"]), len(first["edge_attr"])) == (4, 5)
    with pytest.raises(instep.StructureError, match=r"'feature' \(Tensor \[6\]\) may be edges or nodes, which are eq"):
        split(x=torch.arange(6), feature=torch.arange(6), edge_index=edges, batch=IDS)
    first, second = split(
        x=torch.arange(6), y=torch.arange(3), edge_attr=torch.arange(3), edge_index=EDGES[:, 3:6], batch=IDS
    )
    assert (first["y"].tolist(), second["y"].tolist()) == ([0, 1], [2])  # as many edges as graphs


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nodes not in order": ({"batch": IDS.flip(0)}, "'batch' does not have the graph of each node in ascending order"),
    "graph without nodes": ({"batch": IDS * 2}, "graph 1 of 'batch' has no nodes"),
    "edge between graphs": ({"edge_index": torch.tensor([[0], [5]])}, "an edge connects nodes of different graphs"),
    "edges not in order": ({"edge_index": EDGES.flip(1)}, "the edges are not in the order of the graphs"),
    "unknown node": ({"edge_index": EDGES + 1}, "'edge_index' refers to other nodes than the 6 of 'batch'"),
    "another number": ({"batch_size": 4}, "'batch_size' is 4, and 'batch' has 3 graphs with nodes"),
    "other indices": ({"edge_label_index": EDGES}, r"'edge_label_index' \(Tensor \[2, 7\]\) refers to nodes by number"),
    "pointers": ({"ptr": torch.tensor([0, 3, 4, 6])}, "'ptr' has one entry more than there are graphs"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_a_batch_of_graphs(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(instep.StructureError, match=f"^cannot split the graphs in 'edge_index' and 'batch': {reason}"):
        split(**{"x": torch.randn(6), "edge_index": EDGES, "batch": IDS, **change})


class Sums(nn.Module):
    """The sum over the neighbours of each node, for nodes in the last dim but one."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        rows = x.index_select(-2, edge_index[0])
        out = torch.zeros_like(x).index_add(-2, edge_index[1], rows)
        return out if batch is None else torch.zeros(int(batch.max()) + 1, x.shape[1]).index_add(0, batch, out)


def test_edges_without_graphs_are_an_error_whose_lines_work() -> None:
    x, net = torch.randn(6, 2), Sums()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        with pytest.raises(instep.StructureError) as caught:
            model(x[:2], torch.tensor([[0, 1], [1, 0]]))  # two nodes: not two samples
        for line in ("model(x, edge_index, batch)", "give 'edge_index' None in in_dims", "in_dims=None"):
            assert line in str(caught.value)
        torch.testing.assert_close(model(x, EDGES, IDS), net(x, EDGES, IDS))
        assert "split between graphs" in str(model.explain(x, EDGES, IDS))
    samples = torch.randn(2, 6, 2)
    with instep.DataParallel(net, ["cpu"] * 2, in_dims={"edge_index": None}) as model:
        torch.testing.assert_close(model(samples, EDGES), net(samples, EDGES))
        torch.testing.assert_close(model(samples, instep.whole(EDGES)), net(samples, EDGES))
    with instep.DataParallel(net, ["cpu"] * 2, in_dims=None) as model:
        torch.testing.assert_close(model(x, EDGES), net(x, EDGES))


def test_costs_are_computed_from_the_arguments_themselves() -> None:
    net = Sums()
    x, edges, ids = torch.randn(9, 2), torch.empty(2, 0, dtype=torch.long), torch.tensor([0] * 6 + [1, 2, 3])
    with instep.DataParallel(net, ["cpu"] * 2, cost=lambda batch: batch.bincount()) as model:
        torch.testing.assert_close(model(x, edges, ids), net(x, edges, ids))
        assert "1 on cpu, 3 on cpu" in str(model.explain(x, edges, ids))


def test_other_calls_are_not_touched() -> None:
    values = (torch.randn(4, 3), torch.randint(3, (4, 2, 5)), torch.randint(3, (4,)))
    assert mark_graphs(("x", "edge_index", "batch"), values, "auto", 0) is values
    values = (torch.randn(6), EDGES, IDS)
    marked = mark_graphs(("x", "edge_index", "batch"), values, {"x": None}, 0)
    assert [type(value) is GraphArgument for value in marked] == [False, True, True]


class NodeMean(nn.Module):
    """A mean over all nodes, which is not the mean over graphs."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return x.pow(2).mean()


def test_a_mean_over_nodes_is_noticed_where_the_first_graphs_have_equal_sizes() -> None:
    """The probe looks for samples of unequal size."""
    ids = torch.tensor([graph for graph, nodes in enumerate([2] * 8 + [1, 5, 3]) for _ in range(nodes)])
    x, edges = torch.randn(len(ids), 2), torch.empty(2, 0, dtype=torch.long)
    with instep.DataParallel(NodeMean(), ["cpu"] * 2) as model, pytest.raises(instep.MergeError, match="no sum, mean"):
        model(x, edges, ids)
