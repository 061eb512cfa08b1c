"""Batches and graphs of torch_geometric: cut, joined, and differentiated through both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import InstepError, MergeError, StructureError
from instep.structure import types_hf, types_torch
from instep.structure.tree import map_tensors, tensors_in
from instep.structure.types import handler_for_type

from .type_helpers import assert_same, kind_for, sizes_of_seven


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    types_torch.register_torch_types()
    types_hf.register_optional_types()


# PyTorch Geometric


def graphs(count: int = 7, x: bool = True) -> list[Any]:
    data = pytest.importorskip("torch_geometric.data")
    found = []
    for i in range(count):
        nodes, edges = 1 + i % 4, 2 + i % 3
        graph = data.Data(edge_index=torch.randint(0, nodes, (2, edges)), edge_attr=torch.randn(edges, 2), y=float(i))
        if x:
            graph.x = torch.randn(nodes, 3, dtype=torch.float64)
        else:
            graph.num_nodes = nodes
        graph.name = f"graph {i}"
        graph.table = torch.randn(1, 4)
        graph.some_index = torch.randint(0, nodes, (3,))
        found.append(graph)
    return found


def homogeneous() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list(graphs(), follow_batch=["edge_attr", "some_index"])


def without_features() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list(graphs(x=False))


def by_pointers_only() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    found = graphs()
    for graph in found:
        graph.node_h = graph.x
        del graph.x, graph.some_index
        nodes = len(graph.node_h)
        graph.edge_index = torch.stack([torch.arange(nodes), torch.arange(nodes)])
        graph.edge_attr = torch.randn(nodes, 2)
    return data.Batch.from_data_list(found)


def heterogeneous() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    found = []
    for i in range(7):
        graph = data.HeteroData()
        graph["user"].x = torch.randn(i + 1, 3)
        graph["item"].x = torch.randn(2, 3)
        graph["user", "likes", "item"].edge_index = torch.stack(
            [torch.randint(0, i + 1, (i + 2,)), torch.randint(0, 2, (i + 2,))]
        )
        graph["user", "likes", "item"].edge_attr = torch.randn(i + 2, 1)
        graph.y = torch.tensor([i])
        found.append(graph)
    return data.Batch.from_data_list(found)


def pairs() -> Any:
    """A class with rules of its own for what is concatenated and raised."""
    data = pytest.importorskip("torch_geometric.data")

    class Pair(data.Data):  # type: ignore[misc, name-defined]
        def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            if key == "edge_index":
                return torch.tensor([[self.left.size(0)], [self.right.size(0)]])
            return super().__inc__(key, value, *args, **kwargs)

        def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return None if key == "image" else super().__cat_dim__(key, value, *args, **kwargs)

    found = []
    for i in range(7):
        edges = torch.stack([torch.randint(0, i + 1, (3,)), torch.randint(0, 2, (3,))])
        pair = Pair(left=torch.randn(i + 1, 2), right=torch.randn(2, 2), edge_index=edges, image=torch.randn(2, 2))
        pair.num_nodes = i + 3
        found.append(pair)
    return data.Batch.from_data_list(found)


def with_indices() -> Any:
    """Edges as `EdgeIndex`, and an `Index` that refers to nodes, one that does not, and one without a size."""
    pyg, data = pytest.importorskip("torch_geometric"), pytest.importorskip("torch_geometric.data")
    found = []
    for i in range(7):
        nodes = 2 + i % 4  # torch_geometric fails on a sorted `Index` of one entry
        edges = torch.randint(0, nodes, (2, 2 + i % 3)).sort(dim=1).values
        graph = data.Data(x=torch.randn(nodes, 3))
        graph.edge_index = pyg.EdgeIndex(edges, sparse_size=(nodes, nodes), sort_order="row")
        graph.some_index = pyg.Index(torch.randint(0, nodes, (3,)), dim_size=nodes)
        graph.kind = pyg.Index(torch.arange(nodes), dim_size=nodes + 1, is_sorted=True)
        graph.other_index = pyg.Index(torch.randint(0, nodes, (2,)))
        found.append(graph)
    return data.Batch.from_data_list(found)


def undirected() -> Any:
    pyg, data = pytest.importorskip("torch_geometric"), pytest.importorskip("torch_geometric.data")
    found = []
    for i in range(7):
        edges = pyg.EdgeIndex([[0, 1], [1, 0]], sparse_size=(2 + i, 2 + i), sort_order="col", is_undirected=i != 2)
        found.append(data.Data(num_nodes=2 + i, edge_index=edges.fill_cache_()))
    return data.Batch.from_data_list(found)


BATCHES: dict[str, Callable[[], Any]] = {
    "homogeneous": homogeneous,
    "indices": with_indices,
    "undirected": undirected,
    "without features": without_features,
    "by pointers only": by_pointers_only,
    "heterogeneous": heterogeneous,
    "pairs": pairs,
}


def assert_batches_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.num_graphs == other.num_graphs
    for left, right in zip(one.stores, other.stores, strict=True):
        assert left._key == right._key
        assert_same(dict(left.items()), dict(right.items()))
        assert vars(left).get("_num_nodes") == vars(right).get("_num_nodes")
        for key, value in left.items():
            for name in ("_sparse_size", "_sort_order", "_is_undirected", "_dim_size", "_is_sorted", "_cat_metadata"):
                assert getattr(value, name, None) == getattr(right[key], name, None), (key, name)
    assert_same(one._slice_dict, other._slice_dict)
    assert_same(one._inc_dict, other._inc_dict)


@sizes_of_seven
@pytest.mark.parametrize("name", BATCHES)
def test_parts_of_a_batch_of_graphs_are_what_batching_them_alone_gives(name: str, sizes: tuple[int, ...]) -> None:
    data = pytest.importorskip("torch_geometric.data")
    value = BATCHES[name]()
    kind = kind_for(value)
    assert kind.size(value) == 7
    follow = [key.removesuffix("_ptr") for key in value.keys() if key.endswith("_ptr")]  # noqa: SIM118
    examples = value.to_data_list()
    parts = kind.split(value, sizes)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        wanted = data.Batch.from_data_list(examples[start : start + size], follow_batch=follow)
        assert_batches_equal(part, wanted)
        start += size
    assert_batches_equal(kind.merge(parts), value)


@sizes_of_seven
def test_a_graph_network_over_parts_gives_outputs_and_gradients_of_the_whole(sizes: tuple[int, ...]) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    conv = geometric.GCNConv(3, 4).double()
    value = homogeneous()
    value.x.requires_grad_()
    kind = kind_for(value)

    def forward(batch: Any) -> Tensor:
        out: Tensor = geometric.global_mean_pool(conv(batch.x, batch.edge_index), batch.batch, batch.num_graphs)
        return out

    def grads(out: Tensor) -> tuple[Tensor, ...]:
        weights = torch.arange(1.0, out.numel() + 1).reshape(out.shape)
        return torch.autograd.grad((out * weights).sum(), [value.x, *conv.parameters()])

    whole = forward(value)
    found = torch.cat([forward(part) for part in kind.split(value, sizes)])
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(grads(found), grads(whole))


def test_attributes_added_after_batching_follow_nodes_edges_or_graphs() -> None:
    value = homogeneous()
    nodes, edges = value.num_nodes, value.num_edges
    value.h, value.w, value.g = torch.randn(nodes, 2), torch.randn(edges), torch.randn(7, 5)
    value.scale, value.note = torch.tensor(3.0), "a note"
    kind = kind_for(value)
    first, second = kind.split(value, (3, 4))
    assert (len(first.h), len(first.w), len(first.g)) == (first.num_nodes, first.num_edges, 3)
    assert second.scale is value.scale
    assert_batches_equal(kind.merge([first, second]), value)
    value.lost = torch.zeros(nodes + edges + 1)
    with pytest.raises(StructureError, match="lost"):
        kind.split(value, (3, 4))
    del value.lost
    value.edge_index = value.edge_index[:, :-1]
    with pytest.raises(StructureError, match="edge_index"):
        kind.split(value, (3, 4))


def test_graphs_and_batches_are_mapped_into_new_ones() -> None:
    graph, batch = graphs(1)[0], homogeneous()
    assert kind_for(graph).size(graph) is None
    for value in (graph, batch, heterogeneous()):
        before = list(tensors_in(value))
        new = map_tensors(lambda tensor: tensor + 1, value)
        assert type(new) is type(value)
        assert all(one is two for one, two in zip(tensors_in(value), before, strict=True))
        torch.testing.assert_close(list(tensors_in(new)), [tensor + 1 for tensor in before])
    assert kind_for(batch).size(map_tensors(lambda tensor: tensor, batch)) == 7


def test_one_graph_is_neither_split_nor_joined() -> None:
    graph = graphs(1)[0]
    with pytest.raises(StructureError, match="from_data_list"):
        kind_for(graph).split(graph, (1,))
    with pytest.raises(MergeError, match="Batch"):
        kind_for(graph).merge([graph])


def test_a_batch_of_unknown_origin_says_what_to_write() -> None:
    data = pytest.importorskip("torch_geometric.data")
    value = data.Batch(x=torch.zeros(3, 1), batch=torch.tensor([0, 0, 1]))
    with pytest.raises(StructureError, match="from_data_list"):
        kind_for(value).size(value)
    value.ptr = torch.tensor([0, 2, 3])
    assert kind_for(value).size(value) == 2
    with pytest.raises(StructureError, match="from_data_list"):
        kind_for(value).split(value, (1, 1))


def test_what_was_added_to_a_batch_is_joined_whatever_it_is_of() -> None:
    """A part with as many edges as nodes does not tell which of them an attribute belongs to, and need not."""
    data = pytest.importorskip("torch_geometric.data")

    def batch(*sizes: tuple[int, int]) -> Any:
        edges = [torch.zeros(2, e, dtype=torch.long) for _, e in sizes]
        pairs = zip(sizes, edges, strict=True)
        return data.Batch.from_data_list([data.Data(x=torch.zeros(n, 1), edge_index=e) for (n, _), e in pairs])

    one, two = batch((1, 2), (2, 1)), batch((2, 5))
    one.hidden, two.hidden = torch.arange(3.0), torch.arange(3.0, 5.0)
    assert kind_for(one).merge([one, two]).hidden.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(StructureError, match="its graphs are unknown"):
        kind_for(one).split(one, (1, 1))


def test_modules_are_left_alone() -> None:
    assert handler_for_type(nn.Linear) is None


def sparse_batch(layout: torch.layout, after: bool = False) -> Any:
    """A batch with `adj_t` instead of `edge_index`, from before or after batching."""
    data, transforms = pytest.importorskip("torch_geometric.data"), pytest.importorskip("torch_geometric.transforms")
    transform = transforms.ToSparseTensor(attr="weight", layout=layout)
    found = graphs()
    for graph in found:
        graph.weight = torch.rand(graph.num_edges)
        del graph.some_index
    if after:
        return transform(data.Batch.from_data_list(found))
    return data.Batch.from_data_list([transform(graph) for graph in found])


@sizes_of_seven
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before batching", "after batching"])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo], ids=["csr", "coo"])
def test_adjacency_matrices_are_split_into_the_blocks_of_their_graphs(
    layout: torch.layout, after: bool, sizes: tuple[int, ...]
) -> None:
    value = sparse_batch(layout, after)
    kind, dense, start = kind_for(value), value.adj_t.to_dense(), 0
    parts = kind.split(value, sizes)
    for part in parts:
        stop = start + part.num_nodes
        assert part.adj_t.layout is layout
        assert torch.equal(part.adj_t.to_dense(), dense[start:stop, start:stop])
        start = stop
    merged = kind.merge(parts)
    assert merged.adj_t.layout is layout
    assert torch.equal(merged.adj_t.to_dense(), dense)
    if not after:
        assert torch.equal(merged._slice_dict["adj_t"], value._slice_dict["adj_t"])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_attributes_that_are_not_blocks_of_graphs() -> None:
    value = sparse_batch(torch.sparse_csr)
    nodes = value.num_nodes
    kind, adjacency = kind_for(value), value.adj_t
    value.adj_t = torch.ones(nodes, nodes).to_sparse_csr()
    with pytest.raises(StructureError, match="`adj_t` cannot be split: it connects nodes of different graphs"):
        kind.split(value, (3, 4))
    value.adj_t = torch.eye(nodes + 1).to_sparse_csr()
    with pytest.raises(StructureError, match="`adj_t` was replaced after batching"):
        kind.split(value, (3, 4))
    value.adj_t = adjacency
    value.table_of_all = torch.eye(nodes).to_sparse()
    with pytest.raises(StructureError, match="`table_of_all` was added after batching, so its graphs are unknown"):
        kind.split(value, (3, 4))
    del value.table_of_all
    value.adj = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(StructureError, match=r"`adj` is a tensor of layout .*; store edges as `edge_index`"):
        kind.split(value, (3, 4))


def test_an_edge_index_that_was_set_after_batching_gets_the_sizes_of_its_part() -> None:
    pyg = pytest.importorskip("torch_geometric")
    value = with_indices()
    nodes = value.num_nodes
    value.edge_index = pyg.EdgeIndex(value.edge_index.as_tensor(), sparse_size=(nodes, nodes), sort_order="row")
    kind = kind_for(value)
    parts = kind.split(value, (2, 5))
    for part in parts:
        assert part.edge_index.validate().sparse_size() == (part.num_nodes, part.num_nodes)
        assert part.edge_index.sort_order == "row"
    merged = kind.merge(parts).edge_index
    assert torch.equal(merged.as_tensor(), value.edge_index.as_tensor())
    assert merged.sparse_size() == (nodes, nodes)


UNJOINABLE: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "left out of one": (
        lambda one, two: two.__delattr__("edge_attr"),
        "^the attribute 'edge_attr' is in part 0 and not in part 1; give",
    ),
    "only in the other": (
        lambda one, two: one.__delattr__("edge_attr"),
        "^the attribute 'edge_attr' is in part 1 and not in part 0; ",
    ),
    "replaced": (
        lambda one, two: setattr(two, "x", two.x[:-1]),
        "^`x` was replaced after batching, so its graphs are unknown; set it before$",
    ),
    "added, of no graph": (
        lambda one, two: (setattr(one, "scale", torch.tensor(1.0)), setattr(two, "scale", torch.tensor(2.0)))[0],
        r"^`scale` differs between the parts \(1.0 and 2.0\) and is not per graph$",
    ),
}


@pytest.mark.parametrize(("change", "message"), UNJOINABLE.values(), ids=UNJOINABLE.keys())
def test_parts_that_do_not_fit_each_other(change: Callable[[Any, Any], None], message: str) -> None:
    value = homogeneous()
    kind = kind_for(value)
    one, two = kind.split(value, (3, 4))
    change(one, two)
    with pytest.raises(InstepError, match=message):
        kind.merge([one, two])


@pytest.mark.parametrize("value", [[torch.randn(2)], {"some": torch.randn(3)}], ids=["list", "dict"])
def test_attributes_that_contain_several_tensors_are_an_error(value: Any) -> None:
    data = pytest.importorskip("torch_geometric.data")
    found = graphs()
    for graph in found:
        graph.extra = value
    batch = data.Batch.from_data_list(found)
    with pytest.raises(StructureError, match="`extra` is a list or dictionary of tensors; store each tensor as"):
        kind_for(batch).split(batch, (3, 4))


def two_kinds(count: int, *order: str) -> Any:
    """Graphs with kinds of nodes in some order, and an edge between each and itself."""
    data = pytest.importorskip("torch_geometric.data")
    found = []
    for _ in range(count):
        graph = data.HeteroData()
        for name in order:
            graph[name].x = torch.full((2, 3), float(len(name)))
            graph[name, "to", name].edge_index = torch.tensor([[0], [1]])
        found.append(graph)
    return data.Batch.from_data_list(found)


def test_kinds_of_nodes_and_edges_are_found_by_name() -> None:
    one, two = two_kinds(3, "user", "thing"), two_kinds(2, "thing", "user")
    found = kind_for(one).merge([one, two])
    assert_batches_equal(found, two_kinds(5, "user", "thing"))
    few, many = two_kinds(3, "user"), two_kinds(2, "user", "thing")
    for parts, where in (([few, many], "in part 1 and not in part 0"), ([many, few], "in part 0 and not in part 1")):
        with pytest.raises(MergeError, match=f"^the node or edge type 'thing' is {where}"):
            kind_for(one).merge(parts)
    many["user"].z, few["thing"].x = torch.zeros(4), torch.zeros(0, 3)
    few["thing", "to", "thing"].edge_index = torch.zeros(2, 0, dtype=torch.long)
    with pytest.raises(MergeError, match=r"^the attribute 'z' of 'user' is in part 1 and not in part 0"):
        kind_for(one).merge([few, many])


@pytest.mark.parametrize("inside", [False, True], ids=["bare", "in a dictionary"])
@pytest.mark.parametrize("count", [1, 4])
def test_graphs_that_are_not_as_many_as_the_samples(inside: bool, count: int) -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor, b: Any) -> Tensor:
            return x

    def given(number: int) -> Any:
        return {"in": graphs(number)} if inside else graphs(number)

    where, x = "b.in" if inside else "b", torch.randn(5, 3)
    with instep.DataParallel(Rows(), ["cpu"] * 2, engine="serial") as model:
        for call in (model, model.explain, model):
            with pytest.raises(instep.StructureError) as error:
                call(x, given(count))
            text = str(error.value)
            assert f"'{where}' (list of {count}) for a batch of 5: it has {count} entries, and each" in text
            if call == model.explain:  # tries nothing
                assert f"Say with in_dims what '{where}' is: None if" in text
            else:
                assert f"in_dims={{'{where}': None}}   # every replica gets all of it" in text
                assert "'samples'" not in text
        torch.testing.assert_close(model(x, given(5)), x)
        assert "one entry per sample" in str(model.explain(x, given(5)))
    with instep.DataParallel(Rows(), ["cpu"] * 2, engine="serial", in_dims={where: None}) as model:
        torch.testing.assert_close(model(x, given(count)), x)
    with (
        instep.DataParallel(Rows(), ["cpu"] * 2, engine="serial", in_dims={"b": 0}) as model,
        pytest.raises(instep.StructureError, match=rf"'{where}' \(list of {count}\) for a batch of 5"),
    ):
        model(x, given(count))
