"""One output from the outputs of the replicas: joined along the batch where it can be seen, by rule elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure.dims import AUTO, Declared
from instep.structure.messages import summary
from instep.structure.rules import Rule, Scene, apply_rule, check_rule, is_leaf_rule, rule_for
from instep.structure.split import Parts, join, undo_plan
from instep.structure.torch_kinds import tensor_kind
from instep.structure.tree import SCALARS, Node, Path, open_node, show_path
from instep.structure.types import Kind, kind_of


@dataclass
class Merger:
    """Merges outputs of one function; remembers which dim and which reading of a list it saw at each path."""

    dim: int = 0
    out_dims: Any = AUTO
    rules: Mapping[str, Rule] = field(default_factory=dict)
    seen: dict[Path, str] = field(default_factory=dict)
    """What was done at each path at the last merge, in words."""
    readings: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def of(cls, merge: Any = AUTO, out_dims: Any = AUTO, dim: int = 0) -> Merger:
        """A merger from what a user writes: `"auto"`, one rule for every leaf, or rules by path or pattern."""
        rules: dict[str, Rule] = {}
        if isinstance(merge, Mapping):
            rules = {str(pattern): rule for pattern, rule in merge.items() if rule != AUTO}
        elif not (isinstance(merge, str) and merge == AUTO):
            rules = {"*": merge}
        for rule in rules.values():
            check_rule(rule)
        return cls(dim=dim, out_dims=out_dims, rules=rules)

    def merge(self, parts: Sequence[Any], sizes: Sequence[int], inputs: Sequence[Mapping[str, Any]] = ()) -> Any:
        """The whole output; `MergeError` where that would be a guess."""
        patterns = tuple(self.out_dims.items()) if isinstance(self.out_dims, Mapping) else ()
        spec = Declared(self.out_dims if not patterns or not _is_flat(self.out_dims) else AUTO, self.dim, patterns)
        scene = Scene(tuple(sizes), tuple(parts), tuple(inputs))
        return _Merging(self, scene).node(list(parts), list(sizes), (), spec, None)


def _is_flat(spec: Mapping[Any, Any]) -> bool:
    return all(value is None or isinstance(value, (int, str)) for value in spec.values())


def merge(
    parts: Sequence[Any], sizes: Sequence[int] | None = None, *, merge: Any = AUTO, out_dims: Any = AUTO, dim: int = 0
) -> Any:
    """One structure from several: the inverse of `split`, and the merge that `DataParallel` does on outputs.

    `sizes` are the samples in each part; what `split` returned knows them. `merge` and `out_dims` are those of
    `DataParallel`.

    >>> merge([{"x": torch.tensor([0, 1]), "id": ["a", "b"]}, {"x": torch.tensor([2]), "id": ["c"]}], [2, 1])
    {'x': tensor([0, 1, 2]), 'id': ['a', 'b', 'c']}
    """
    automatic = isinstance(merge, str) and merge == AUTO and isinstance(out_dims, str)
    if isinstance(parts, Parts):
        if automatic:
            return undo_plan(parts.plan, [[part] for part in parts])[0]
        sizes = parts.sizes
    if not parts:
        raise MergeError("there are no parts to merge.")
    if sizes is None:
        sizes = [_samples(part, dim) for part in parts]
    return Merger.of(merge, out_dims, dim).merge(parts, sizes)


def _samples(part: Any, dim: int) -> int:
    """The number of samples of a part, by its first tensor or list."""
    if isinstance(part, (Tensor, np.ndarray)):
        return int(part.shape[dim]) if part.ndim > dim else 0
    if isinstance(part, list):
        return len(part)
    kind = kind_of(type(part))
    if kind is not None:
        return kind.size(part) or 0
    node = open_node(part)
    for child in node.children if node is not None else ():
        found = _samples(child, dim)
        if found:
            return found
    return 0


@dataclass
class _Merging:
    merger: Merger
    scene: Scene

    def node(self, parts: list[Any], sizes: list[int], path: Path, spec: Declared, inherited: Rule | None) -> Any:
        rule = rule_for(self.merger.rules, path) or inherited
        if rule is not None and (not is_leaf_rule(rule) or not _is_container(parts)) and (
            not (path == () and rule is self.merger.rules.get("*") and _is_container(parts))
        ):
            self._note(path, f"rule {rule if isinstance(rule, str) else getattr(rule, '__name__', rule)}")
            scene = Scene(tuple(sizes), self.scene.outputs, self.scene.inputs)
            return apply_rule(rule, parts, scene, path)
        present = [index for index, part in enumerate(parts) if part is not None]
        if not present:
            return None
        if len(present) < len(parts):
            parts, sizes = [parts[index] for index in present], [sizes[index] for index in present]
        if len(parts) == 1:
            return parts[0]
        if spec.spec is None:
            self._note(path, "the first replica's (out_dims is None)")
            return parts[0]
        return self._together(parts, sizes, path, spec, rule)

    def _together(self, parts: list[Any], sizes: list[int], path: Path, spec: Declared, rule: Rule | None) -> Any:
        first = parts[0]
        if all(part is first for part in parts) and not isinstance(first, (list, tuple)):
            self._note(path, "the same on every replica")
            return first
        if all(isinstance(part, Tensor) for part in parts):
            return self._tensors(parts, sizes, path, spec)
        if all(isinstance(part, np.ndarray) for part in parts):
            return self._arrays(parts, sizes, path, spec)
        if any(type(part) is not type(first) for part in parts) and not _are_numbers(parts):
            names = [type(part).__name__ for part in parts]
            raise self._error(path, parts, f"the replicas gave different types: {names}", sizes)
        kind = kind_of(type(first))
        if kind is not None:
            return self._custom(parts, sizes, path, kind)
        nodes = [open_node(part) for part in parts]
        if all(node is not None for node in nodes):
            return self._container(parts, [n for n in nodes if n is not None], sizes, path, spec, rule)
        return self._values(parts, sizes, path)

    def _container(
        self, parts: list[Any], nodes: list[Node], sizes: list[int], path: Path, spec: Declared, rule: Rule | None
    ) -> Any:
        if isinstance(parts[0], (list, tuple)) and not hasattr(parts[0], "_fields"):
            return self._sequence(parts, nodes, sizes, path, spec, rule)
        return self._inside(nodes, sizes, path, spec, rule)

    def _inside(self, nodes: list[Node], sizes: list[int], path: Path, spec: Declared, rule: Rule | None) -> Any:
        keys = tuple(nodes[0].keys)
        for index, node in enumerate(nodes):
            if set(node.keys) != set(keys):
                raise self._error(path, [n.keys for n in nodes], f"replica {index} has other entries", sizes)
        tables = [dict(zip(node.keys, node.children, strict=True)) for node in nodes]
        merged = [
            self.node([t[key] for t in tables], sizes, (*path, key), spec.below(key, (*path, key)), rule) for key in keys
        ]
        return nodes[0].close(merged)

    def _sequence(
        self, parts: list[Any], nodes: list[Node], sizes: list[int], path: Path, spec: Declared, rule: Rule | None
    ) -> Any:
        """The two readings of a list, as on the way in: one entry a sample, or a structure."""
        column = all(len(part) == size for part, size in zip(parts, sizes, strict=True)) and (
            isinstance(parts[0], list) or not any(_is_number(item) or _holds(item) for part in parts for item in part)
        )
        inside = len({len(part) for part in parts}) == 1 and not spec.samples
        below = tuple(pattern for pattern in self.merger.rules if pattern.startswith(show_path((*path, ""))))
        if below or spec.is_dim:
            column = False
        reading = self.merger.readings.get(path)
        if column and inside and reading is None and isinstance(parts[0], list):
            column, inside = self._settle_list(parts, sizes, path)
        if column and (reading != "inside" or not inside):
            if len(set(sizes)) > 1 or not inside:
                self.merger.readings[path] = "column"
            self._note(path, "joined, one entry a sample")
            return join(parts)
        if inside:
            if parts[0] and len(parts[0]) not in sizes:
                self.merger.readings[path] = "inside"
            return self._inside(nodes, sizes, path, spec, rule)
        lengths = [len(part) for part in parts]
        raise self._error(path, parts, f"lists of {lengths} entries from shards of {sizes} samples", sizes)

    def _settle_list(self, parts: list[Any], sizes: list[int], path: Path) -> tuple[bool, bool]:
        """A list that could be read both ways: only a list of batched tensors is truly in doubt."""
        batched = all(
            isinstance(item, Tensor) and item.ndim > self.merger.dim and item.shape[self.merger.dim] == size
            for part, size in zip(parts, sizes, strict=True)
            for item in part
        )
        if not batched or not parts[0]:
            return True, False
        where = show_path(path)
        raise MergeError(
            f"cannot tell how to read the output {where or 'list'!r}: each replica gave a list as long as its shard, of tensors "
            f"whose dim {self.merger.dim} is the shard's size too.\nWrite the line that is meant:\n"
            f"  merge={{{where!r}: 'list'}}   # one entry a sample\n"
            f"  merge={{{show_path((*path, '*'))!r}: 'cat'}}   # a structure of batched tensors"
        )

    def _tensors(self, parts: list[Tensor], sizes: list[int], path: Path, spec: Declared) -> Any:
        kinds = [tensor_kind(part) for part in parts]
        if kinds[0] is not None:
            return self._custom(parts, sizes, path, kinds[0])
        if len({part.ndim for part in parts}) > 1:
            raise self._error(path, parts, f"tensors of shapes {[list(part.shape) for part in parts]}", sizes)
        if parts[0].ndim == 0:
            return self._scalars(parts, sizes, path)
        dim = self._batch_dim([tuple(part.shape) for part in parts], sizes, path, spec)
        self._note(path, f"joined along dim {dim}")
        return torch.cat(parts, dim)

    def _arrays(self, parts: list[Any], sizes: list[int], path: Path, spec: Declared) -> Any:
        if parts[0].ndim == 0:
            return self._values(parts, sizes, path)
        dim = self._batch_dim([part.shape for part in parts], sizes, path, spec)
        self._note(path, f"joined along dim {dim}")
        return np.concatenate(parts, dim)

    def _batch_dim(
        self, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], path: Path, spec: Declared
    ) -> int:
        """The declared dim, or the one whose size is the shard's on every replica, the usual batch dim first."""
        rank = len(shapes[0])
        if spec.is_dim:
            return spec.batch_dim % rank if rank else 0
        usual = self.merger.dim
        order = [usual, *(dim for dim in range(rank) if dim != usual)]
        matches = [
            dim for dim in order if dim < rank and all(s[dim] == n for s, n in zip(shapes, sizes, strict=True))
        ]
        fitting = [dim for dim in matches if len({s[:dim] + s[dim + 1 :] for s in shapes}) == 1]
        if fitting and (fitting[0] == usual or len(fitting) == 1):
            return fitting[0]
        why = f"tensors of shapes {[list(shape) for shape in shapes]} from shards of {list(sizes)} samples"
        raise self._error(path, shapes, why, sizes, two_dims=len(matches) > 1)

    def _scalars(self, parts: list[Tensor], sizes: list[int], path: Path) -> Any:
        if _equal_scalars(parts):
            self._note(path, "equal on every replica")
            return parts[0]
        raise self._error(path, parts, f"a 0-d tensor that differs between replicas ({_few(parts)})", sizes)

    def _custom(self, parts: list[Any], sizes: list[int], path: Path, kind: Kind) -> Any:
        counts = [kind.size(part) for part in parts]
        if counts == list(sizes):
            self._note(path, "joined by its type's rule")
            return kind.merge(parts)
        raise self._error(path, parts, f"{type(parts[0]).__name__} of {counts} from shards of {sizes} samples", sizes)

    def _values(self, parts: list[Any], sizes: list[int], path: Path) -> Any:
        first = parts[0]
        if isinstance(first, (*SCALARS, np.generic, np.ndarray, type)):
            if all(bool(np.all(part == first)) for part in parts):
                self._note(path, "equal on every replica")
                return first
            raise self._error(path, parts, f"a value that differs between replicas ({_few(parts)})", sizes)
        name = type(first).__name__
        raise MergeError(
            f"cannot merge the output {show_path(path) or name!r}: instep has not been told how to merge a {name}.\n"
            f"Write, once:\n"
            f"  instep.register({name}, size=lambda v: ..., split=lambda v, sizes: [...], merge=lambda parts: ...)\n"
            f"or choose: merge={{{show_path(path) or '*'!r}: 'first'}}  or 'list', 'drop', a function (parts, sizes)."
        )

    def _error(
        self, path: Path, parts: Sequence[Any], why: str, sizes: Sequence[int], two_dims: bool = False
    ) -> MergeError:
        where = show_path(path)
        scalar = not _is_container(parts) and not getattr(parts[0], "shape", ())
        choices = "'mean', 'sum', 'max', 'min', 'stack'" if scalar else "'pad', 'nested', 'list', 'unique', 'sum', 'mean'"
        lines = [
            f"cannot merge the output {where or summary(parts[0])!r}: {why} (shards of {list(sizes)} samples).",
            f"Write what it means:  merge={{{where or '*'!r}: ...}}  with {choices}, 'first', 'drop',",
            "  instep.weighted_by(...) for a mean over something else than samples, or a function (parts, sizes) -> value.",
        ]
        if two_dims:
            lines.append("Where an entry depends on the whole batch, call instep.all_gather(...) inside forward.")
        return MergeError("\n".join(lines))

    def _note(self, path: Path, what: str) -> None:
        self.merger.seen[path] = what


def _is_container(parts: Sequence[Any]) -> bool:
    return any(open_node(part) is not None for part in parts)


def _holds(item: Any) -> bool:
    return isinstance(item, (Tensor, np.ndarray))


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, float, complex, type(None)))


def _are_numbers(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, (int, float)) for part in parts)


def _equal_scalars(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    return all(part is first or (part.dtype == first.dtype and torch.equal(part, first)) for part in parts)


def _few(parts: Sequence[Any]) -> str:
    shown = [repr(part.item()) if isinstance(part, Tensor) else repr(part) for part in parts[:4]]
    return ", ".join(shown) + (", ..." if len(parts) > 4 else "")
