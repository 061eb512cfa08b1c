"""Batches of graphs in separate arguments, as in `model(data.x, data.edge_index, data.batch)`.

The nodes of all graphs are the rows of `x`, `batch` has the graph of each node, and `edge_index` has the two nodes of
each edge. Such arguments are recognized by the names `edge_index` and `batch` and are split between graphs: each part
has its nodes and edges, with nodes and graphs numbered from 0. This needs the values of the indices, so it synchronizes
with their device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.infer import is_single_sample
from instep.structure.shapes import is_dense, is_integer
from instep.structure.spec import Mark, argument_specs
from instep.structure.split_messages import summarize
from instep.structure.types import TensorFn, TypeHandler, add_handler
from instep.structure.types_pyg_tensors import is_index, narrow_index

EDGES = "edge_index"
_GRAPH_IDS = ("batch", "batch_index")
_GRAPH_COUNTS = ("batch_size", "num_graphs")
_NODE_NAMES = ("x", "pos", "z", "h", "num_nodes")


@dataclass(frozen=True, eq=False)
class GraphArgument(Mark):
    """An argument with rows for the nodes or edges of several graphs, or a number of graphs or nodes."""

    bounds: Sequence[int] = ()
    """The first row of each graph, then the number of rows."""
    offsets: Sequence[int] | None = None
    """What is subtracted from the values of a part that begins with each graph."""
    dim: int = 0

    def part(self, start: int, stop: int) -> Any:
        """The argument for the graphs from `start` to `stop`."""
        first, last = self.bounds[start], self.bounds[stop]
        value = self.value
        if isinstance(value, int):
            return last - first
        if is_index(value):
            offsets = self.offsets or [0] * len(self.bounds)
            return narrow_index(value, (first, last), (start, stop), torch.tensor(offsets[: len(self.bounds) - 1]))
        rows = value.narrow(self.dim, first, last - first)
        return rows - self.offsets[start] if self.offsets is not None and self.offsets[start] else rows


def _num_graphs(value: GraphArgument) -> int:
    return len(value.bounds) - 1


def _split(value: GraphArgument, sizes: Sequence[int]) -> list[Any]:
    return [value.part(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _raise_merge(_parts: Sequence[Any]) -> Any:
    raise MergeError("the parts of a batch of graphs do not have their numbers of nodes")


def _map(fn: TensorFn, value: GraphArgument) -> GraphArgument:
    return replace(value, value=fn(value.value)) if isinstance(value.value, Tensor) else value


def _row_counts(value: GraphArgument) -> Tensor:
    return torch.tensor(value.bounds).diff()


def register_graph_arguments() -> None:
    """Register the handler of `GraphArgument`."""
    add_handler(GraphArgument, TypeHandler(_num_graphs, _split, _raise_merge, _map, sample_sizes=_row_counts))


def mark_graphs(names: Sequence[str], values: tuple[Any, ...], in_dims: Any, dim: int) -> tuple[Any, ...]:
    """The arguments of a call that has an argument `edge_index`, with those of a batch of graphs marked.

    `StructureError` if they are not a batch of graphs. Arguments that `in_dims` names are left as they are.
    """
    specs = argument_specs(in_dims, names, dim)
    arguments = {name: value for name, value, spec in zip(names, values, specs, strict=True) if spec.is_auto}
    edges = arguments.get(EDGES)
    if not _is_index_tensor(edges, 2) or edges is None or edges.shape[0] != 2:
        return values
    found = [name for name in _GRAPH_IDS if _is_index_tensor(arguments.get(name), 1)]
    if not found:
        raise _no_graph_ids(edges)
    graphs = _Graphs(names, arguments, found[0])
    marked = {name: graphs.mark(name, value) for name, value in arguments.items()}
    return tuple([marked.get(name, value) for name, value in zip(names, values, strict=True)])


def _is_index_tensor(value: Any, ndim: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == ndim and is_dense(value) and is_integer(value)


class _Graphs:
    """The nodes and edges of each graph, verified."""

    def __init__(self, names: Sequence[str], arguments: Mapping[str, Any], ids_name: str) -> None:
        self.names, self.ids_name = names, ids_name
        ids, edges = (_plain(arguments[name]) for name in (ids_name, EDGES))
        self.nodes = self._bounds(ids, ids_name)
        num_nodes, num_graphs = len(ids), len(self.nodes) - 1
        if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < num_nodes:
            raise self.error(f"{EDGES!r} refers to other nodes than the {num_nodes} of {ids_name!r}")
        sources, targets = ids[edges]
        if not bool((sources == targets).all()):
            raise self.error("an edge connects nodes of different graphs")
        if not bool((sources.diff() >= 0).all()):
            raise self.error("the edges are not in the order of the graphs")
        counts = torch.bincount(sources, minlength=num_graphs).tolist()
        self.edges: list[int] = list(accumulate(counts, initial=0))
        self.graphs = list(range(num_graphs + 1))

    def _bounds(self, ids: Tensor, name: str) -> list[int]:
        """The first node of each graph, then the number of nodes."""
        if len(ids) == 0 or int(ids[0]) < 0 or not bool((ids.diff() >= 0).all()):
            raise self.error(f"{name!r} does not have the graph of each node in ascending order")
        counts = torch.bincount(ids).tolist()
        if 0 in counts:
            raise self.error(f"graph {counts.index(0)} of {name!r} has no nodes")
        return list(accumulate(counts, initial=0))

    def mark(self, name: str, value: Any) -> Any:
        """The marked argument, or the argument itself if it has one row for each graph or does not depend on them."""
        if name == EDGES:
            return GraphArgument(value, self.edges, self.nodes, dim=1)
        if name == self.ids_name:
            return GraphArgument(value, self.nodes, self.graphs)
        if type(value) is int:
            return self._mark_count(name, value)
        if not isinstance(value, Tensor) or not is_dense(value) or value.ndim == 0:
            return value
        if is_integer(value) and ("index" in name or name == "face"):
            raise self.error(f"{name!r} ({summarize(value)}) refers to nodes by number")
        if name == "ptr" and value.shape[0] == len(self.nodes):
            raise self.error("'ptr' has one entry more than there are graphs")
        bounds = self._find_bounds(name, value)
        return value if bounds is self.graphs else GraphArgument(value, bounds) if bounds is not None else value

    def _mark_count(self, name: str, value: int) -> Any:
        if name == "num_nodes" and value == self.nodes[-1]:
            return GraphArgument(value, self.nodes)
        if name not in _GRAPH_COUNTS:
            return value
        if value != self.graphs[-1]:
            raise self.error(f"{name!r} is {value}, and {self.ids_name!r} has {self.graphs[-1]} graphs with nodes")
        return GraphArgument(value, self.graphs)

    def _find_bounds(self, name: str, value: Tensor) -> list[int] | None:
        """Whether the rows of an argument are nodes, edges or graphs, by their number; None for another number.

        Rows that may be edges or graphs are graphs, unless the name starts with `edge`.
        """
        levels = {"edges": self.edges, "nodes": self.nodes, "graphs": self.graphs}
        matches = {level: bounds for level, bounds in levels.items() if bounds[-1] == value.shape[0]}
        by_name = "edges" if name.startswith("edge") else "nodes" if name in _NODE_NAMES else ""
        if by_name in matches:
            return matches[by_name]
        if matches.keys() == {"edges", "graphs"}:
            return matches["graphs"]
        found = list(matches.values())
        if any(bounds != found[0] for bounds in found):
            raise self.error(
                f"the rows of {name!r} ({summarize(value)}) may be {' or '.join(matches)}, which are equally many"
            )
        return found[0] if found else None

    def error(self, reason: str) -> StructureError:
        return StructureError(
            f"cannot split the graphs in {EDGES!r} and {self.ids_name!r}: {reason}.\n"
            f"Write one of:\n"
            f"  model(data)   # a torch_geometric Batch of Batch.from_data_list, which forward takes as one argument\n"
            f"  in_dims=None   # no argument is split: calls run on the first device"
        )


def list_of_graphs_notes(names: Sequence[str], values: Sequence[Any]) -> Iterator[str]:
    """What to write if forward failed because it expects a Batch where it got a list of graphs."""
    for name, value in zip(names, values, strict=True):
        if isinstance(value, list) and value and is_single_sample(value[0]):
            yield (
                f"{name!r} is a list of {type(value[0]).__name__}, and forward gets a part of the list. "
                f"If it expects a Batch: model({name}=Batch.from_data_list({name}))."
            )


def rows_of_graphs_notes(names: Sequence[str], values: Sequence[Any]) -> Iterator[str]:
    """What to write if forward failed because an argument has as many rows as the graphs by chance."""
    known = (EDGES, *_GRAPH_IDS, *_GRAPH_COUNTS, *_NODE_NAMES)
    for name, value in zip(names, values, strict=True):
        if isinstance(value, GraphArgument) and name not in known and not name.startswith("edge"):
            yield (
                f"{name!r} ({summarize(value.value)}) was split between graphs, because it has as many rows as they "
                f"have nodes or edges. To pass all of it to every replica, give it None in in_dims."
            )


def _plain(index: Any) -> Tensor:
    tensor: Tensor = index.as_tensor() if is_index(index) else index
    return tensor.long()


def _no_graph_ids(edges: Tensor) -> StructureError:
    return StructureError(
        f"cannot split argument {EDGES!r} ({summarize(edges)}): it refers to nodes by number, and no argument 'batch' "
        f"has the graph of each node.\n"
        f"If x has a batch dim and every sample has the same edges, give {EDGES!r} None in in_dims. Otherwise write "
        f"one of:\n"
        f"  model(data)   # a torch_geometric Batch, which forward takes as one argument\n"
        f"  model(x, edge_index, batch)   # with batch=data.batch: split between graphs\n"
        f"  in_dims=None   # one graph: no argument is split, and calls run on the first device"
    )
