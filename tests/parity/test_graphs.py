"""torch_geometric networks on a Batch, a list of Data and separate arguments, with graphs of different sizes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

pytest.importorskip("torch_geometric")
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, GINConv, global_mean_pool
from torch_geometric.transforms import ToSparseTensor


def graphs() -> list[Any]:
    data = []
    for nodes in (4, 2, 6, 3, 5):
        edges = torch.randint(nodes, (2, 2 * nodes))
        data.append(Data(x=torch.randn(nodes, 3, dtype=torch.float64), edge_index=edges, y=torch.randn(1).double()))
    return data


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GCNConv(3, 8), GCNConv(8, 8), nn.Linear(8, 1)

    def forward(self, data: Any) -> Tensor:
        batch = Batch.from_data_list(data) if isinstance(data, list) else data
        x = torch.relu(self.first(batch.x, batch.edge_index))
        x = torch.relu(self.second(x, batch.edge_index))
        out: Tensor = self.head(global_mean_pool(x, batch.batch)).squeeze(1)
        return out


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("as_list", [True, False], ids=["list", "batch"])
def test_training_equals_the_plain_networks(as_list: bool, replicas: int, engine: str) -> None:
    data = graphs()

    def arguments(count: int) -> tuple[Any, ...]:
        return (data[:count] if as_list else Batch.from_data_list(data[:count]),)

    assert_training_equal(Net(), data, arguments, replicas, engine)


def assert_training_equal(
    plain: nn.Module, data: list[Any], arguments: Callable[[int], tuple[Any, ...]], replicas: int, engine: str
) -> None:
    """Train a network plainly and wrapped on batches of several sizes, and compare losses and parameters."""
    net = copy.deepcopy(plain.double())
    theirs, ours = (torch.optim.AdamW(module.parameters(), lr=0.01) for module in (plain, net))
    with instep.DataParallel(net, ["cpu"] * replicas, engine=engine) as model:
        for count in (5, 5, 3, 2):
            target = torch.cat([graph.y for graph in data[:count]])
            losses = []
            for module, optimizer in ((plain, theirs), (model, ours)):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(module(*arguments(count)), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


class Layers(nn.Module):
    """GCN and GIN layers, for any type of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GCNConv(3, 8), GINConv(nn.Linear(8, 8)), nn.Linear(8, 1)

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = torch.relu(self.first(x, edge_index, edge_weight))
        x = torch.relu(self.second(x, edge_index))
        out: Tensor = self.head(global_mean_pool(x, batch)).squeeze(1)
        return out


class OnBatch(Layers):
    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.adj_t if "adj_t" in data else data.edge_index, data.batch)


def with_edge_index(graph: Any) -> Any:
    graph.edge_index = EdgeIndex(graph.edge_index.sort(dim=1).values, sparse_size=graph.size(), sort_order="row")
    return graph


KINDS = {
    "EdgeIndex": with_edge_index,
    "adj_t": ToSparseTensor("weight", layout=torch.sparse_csr),
    "separate": copy.copy,
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("kind", KINDS)
def test_types_of_edges_and_separate_arguments(kind: str, engine: str) -> None:
    data = graphs()
    for graph in data:
        graph.weight = torch.rand(graph.num_edges).double()
    data = [KINDS[kind](graph) for graph in data]

    def arguments(count: int) -> tuple[Any, ...]:
        batch = Batch.from_data_list(data[:count])
        return (batch.x, batch.edge_index, batch.batch, batch.weight) if kind == "separate" else (batch,)

    assert_training_equal(Layers() if kind == "separate" else OnBatch(), data, arguments, 2, engine)


class PerNode(nn.Module):
    """An output for each node, of a Batch or of separate arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(3, 2)

    def forward(self, x: Any, edge_index: Any = None, batch: Any = None) -> Tensor:
        out: Tensor = self.conv(x, edge_index) if isinstance(x, Tensor) else self.conv(x.x, x.edge_index)
        return out


@pytest.mark.parametrize("separate", [False, True])
def test_outputs_with_a_row_for_each_node(separate: bool) -> None:
    net, batch = PerNode().double(), Batch.from_data_list(graphs())
    args = (batch.x, batch.edge_index, batch.batch) if separate else (batch,)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        torch.testing.assert_close(model(*args), net(*args))


def test_a_list_of_graphs_where_forward_expects_a_batch_says_what_to_write() -> None:
    net, data = OnBatch().double(), graphs()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        with pytest.raises(AttributeError) as caught:
            model(data)
        if hasattr(caught.value, "__notes__"):  # Python 3.11
            assert any("data=Batch.from_data_list(data)" in note for note in caught.value.__notes__)
        torch.testing.assert_close(model(data=Batch.from_data_list(data)), net(Batch.from_data_list(data)))


class NodeMean(nn.Module):
    """A mean over the nodes of all graphs, and weights of the features that are no rows of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5).double()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, scale: Tensor) -> Tensor:
        return (self.layer(x) * scale).mean()


def test_a_mean_over_nodes_is_offered_a_line() -> None:
    data, scale, net = Batch.from_data_list(graphs()), torch.rand(5, dtype=torch.float64), NodeMean()
    arguments = (data.x, data.edge_index, data.batch)
    with instep.DataParallel(net, ["cpu"] * 2, in_dims={"scale": None}) as model:
        with pytest.raises(instep.MergeError) as caught:
            model(*arguments, scale)
        assert "merge=instep.weighted_by(lambda x: len(x))" in str(caught.value)
    rule = instep.weighted_by(lambda x: len(x))
    with instep.DataParallel(net, ["cpu"] * 2, merge=rule, in_dims={"scale": None}) as model:
        torch.testing.assert_close(model(*arguments, scale), net(*arguments, scale))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_argument_with_as_many_rows_as_nodes_by_chance() -> None:
    data, scale = Batch.from_data_list([graphs()[1], graphs()[3]]), torch.rand(5, dtype=torch.float64)
    with instep.DataParallel(NodeMean(), ["cpu"] * 2) as model, pytest.raises(RuntimeError) as caught:
        model(data.x, data.edge_index, data.batch, scale)
    assert any("give it None in in_dims" in note for note in caught.value.__notes__)
