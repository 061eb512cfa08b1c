"""One output from the outputs of the replicas: joined along the batch where it can be seen, by rule elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import InstepError, MergeError
from instep.structure.dims import AUTO, Declared, check_dims, declared_root
from instep.structure.fit import (
    NUMBERS,
    holds_samples,
    holds_tensors,
    is_record_of_samples,
    own_kind,
)
from instep.structure.joining import join_by_kind
from instep.structure.merge_messages import cannot_merge, no_rule_for_type, no_samples, other_entries, two_readings
from instep.structure.recipe import COLUMN, Miss, Recipe, recipe_for
from instep.structure.rules import (
    Rule,
    Scene,
    apply_rule,
    check_rule,
    is_leaf_rule,
    mean_of_equals,
    rule_for,
    speaks_of,
)
from instep.structure.shapes import (
    equal_scalars,
    equal_values,
    few,
    follow,
    is_integer,
    join_along,
    join_as_before,
    layout_of,
)
from instep.structure.sizes_seen import sizes_seen
from instep.structure.split import Parts, join, undo_plan
from instep.structure.tree import SCALARS, Node, Path, is_sequence, open_node, specific_first
from instep.structure.types import Kind, kind_of
from instep.structure.verdicts import Joined, Reading, Verdicts, check_absent, check_beside, merge_shapes


@dataclass
class Merger:
    """Merges outputs of one function; remembers which dim and which reading of a list it saw at each path."""

    dim: int = 0
    out_dims: Any = AUTO
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """By path or pattern; `"*"` is the rule of every leaf that no other rule names and to which it applies."""
    seen: dict[Path, str] = field(default_factory=dict)
    """What was done at each path at the last merge, in words."""
    readings: dict[Path, str] = field(default_factory=dict)
    dims: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """The rank of a leaf and the dim of it that followed the batch, which decides when two dims do."""
    found: Verdicts = field(default_factory=dict)
    """What a trial said of leaves that no rule names."""

    def __post_init__(self) -> None:
        check_dims(self.out_dims, "out_dims")
        self.declared = declared_root(self.out_dims, self.dim)
        self.named = {pattern: rule for pattern, rule in self.rules.items() if pattern != "*"}
        self.general = self.rules.get("*")
        self._recipes: dict[tuple[int, ...], tuple[Recipe, dict[Path, str]]] = {}

    @classmethod
    def of(cls, merge: Any = AUTO, out_dims: Any = AUTO, dim: int = 0) -> Merger:
        """A merger from what a user writes: `"auto"`, one rule for every leaf, or rules by path or pattern."""
        rules: dict[str, Rule] = {}
        if isinstance(merge, Mapping):
            rules = {pattern: rule for pattern, rule in specific_first(merge.items()).items() if not _is_auto(rule)}
        elif not _is_auto(merge):
            rules = {"*": merge}
        for rule in rules.values():
            check_rule(rule)
        return cls(dim=dim, out_dims=out_dims, rules=rules)

    def once(self) -> Merger:
        """A merger with the same rules, from which nothing is learned."""
        return replace(self, seen={}, readings={}, dims={})

    def merge(self, parts: Sequence[Any], sizes: Sequence[int], inputs: Sequence[Mapping[str, Any]] = ()) -> Any:
        """The whole output; `MergeError` where that would be a guess."""
        if len(parts) != len(sizes):
            raise MergeError(f"there are {len(parts)} parts and {len(sizes)} sizes: give one size for each part.")
        sizes = tuple(sizes)
        if sizes in self._recipes:
            recipe, self.seen = self._recipes[sizes]
            try:
                return recipe(parts)
            except (Miss, RuntimeError):  # torch's own refusals too: what does not fit is named below
                pass
        self.seen = {}
        merged = _Merging(self).node(parts, Scene(sizes, tuple(parts), tuple(inputs)), (), self.declared, None)
        if not self.rules and self.declared.auto and not self.declared.patterns and len(parts) > 1:
            self._learn(parts, sizes)
        return merged

    def use(self, found: Verdicts) -> None:
        """Merge by other verdicts from now on."""
        if found is self.found:
            return
        self.found = found
        self._recipes.clear()
        for path, verdict in found.items():
            self.dims.pop(path, None)
            if isinstance(verdict, Joined):
                self.dims[path] = verdict.rank, verdict.dim
            elif isinstance(verdict, Reading):
                self.readings[path] = COLUMN if verdict.samples else "inside"

    def _learn(self, parts: Sequence[Any], sizes: tuple[int, ...]) -> None:
        recipe = recipe_for(
            parts, sizes, {path: self.dims[path] for path in self.seen if path in self.dims}, self.readings
        )
        if len(self._recipes) >= 64:  # batches of many sizes: begin again rather than grow
            self._recipes.clear()
        self._recipes.pop(sizes, None)
        if recipe is not None:
            self._recipes[sizes] = recipe, self.seen


def _is_auto(rule: Any) -> bool:
    return isinstance(rule, str) and rule == AUTO


def merge(
    parts: Sequence[Any], sizes: Sequence[int] | None = None, *, merge: Any = AUTO, out_dims: Any = AUTO, dim: int = 0
) -> Any:
    """One structure from several: the inverse of `split`, and the merge that `DataParallel` does on outputs.

    `sizes` are the samples in each part; what `split` returned knows them. `merge` and `out_dims` are those of
    `DataParallel`.

    >>> merge([{"x": torch.tensor([0, 1]), "id": ["a", "b"]}, {"x": torch.tensor([2]), "id": ["c"]}], [2, 1])
    {'x': tensor([0, 1, 2]), 'id': ['a', 'b', 'c']}
    """
    if not parts:
        raise MergeError("there are no parts to merge.")
    if isinstance(parts, Parts) and sizes is None:
        if _is_auto(merge) and _is_auto(out_dims):
            return undo_plan(parts.plan, [[part] for part in parts])[0]
        sizes = parts.sizes
    if sizes is None:
        sizes = sizes_seen(parts, dim)
    return Merger.of(merge, out_dims, dim).merge(parts, sizes)


_PLAIN_TYPES = frozenset(SCALARS)


@functools.cache
def _joined(dim: int) -> str:
    return f"joined along dim {dim}"


class _Merging:
    def __init__(self, merger: Merger) -> None:
        self.merger = merger
        self.dims, self.seen, self.readings = merger.dims, merger.seen, merger.readings
        self.named, self.general, self.found = merger.named, merger.general, merger.found
        self.undeclared = merger.declared.auto and not merger.declared.patterns

    def node(self, parts: Sequence[Any], scene: Scene, path: Path, spec: Declared, inherited: Rule | None) -> Any:
        known = self.dims.get(path)
        if known is not None and join_as_before(parts, scene.sizes, *known):
            self.seen[path] = _joined(known[1])
            return torch.cat(tuple(parts), known[1])
        rule = (rule_for(self.named, path) if self.named else None) or inherited
        if rule is not None and not is_leaf_rule(rule):
            return self._by_rule(rule, parts, scene, path, spec)
        types = set(map(type, parts))
        if type(None) in types:
            present = [index for index, part in enumerate(parts) if part is not None]
            if not present:
                return None
            check_absent(rule or self.general or not spec.auto, self.found.get(path), parts, scene, path)
            parts, scene = [parts[index] for index in present], scene.only(present)
            types.discard(type(None))
        if rule is not None and not any(open_node(part) is not None for part in parts):
            return self._by_rule(rule, parts, scene, path, spec)
        if self.general is not None and rule is None and speaks_of(self.general, parts):
            return self._by_rule(self.general, parts, scene, path, spec)
        first = parts[0]
        if len(parts) == 1:
            return first
        if spec.spec is None:
            self._note(path, "the first replica's (out_dims is None)")
            return first
        if type(first) is not Tensor:
            check_beside(parts, scene, path)
        verdict = self.found.get(path) if rule is None else None
        own = isinstance(first, Tensor) and first is parts[-1]  # the module's, and whole already
        if verdict is not None and not own and not any(map(own_kind, parts)) and verdict.fits(parts, scene):
            self._note(path, verdict.words)
            return verdict.merge(parts, scene, path)
        if first is parts[-1] and all(part is first for part in parts):
            self._note(path, "the same on every replica")
            return first
        if isinstance(first, Tensor) and (len(types) == 1 or all(isinstance(part, Tensor) for part in parts)):
            return self._tensors(parts, scene, path, spec)
        if len(types) > 1 and not all(isinstance(part, NUMBERS) for part in parts):
            names = [type(part).__name__ for part in parts]
            raise cannot_merge(path, parts, f"the replicas gave different types, {names}", scene.sizes)
        return self._together(parts, scene, path, spec, rule)

    def _by_rule(self, rule: Rule, parts: Sequence[Any], scene: Scene, path: Path, spec: Declared) -> Any:
        self._note(path, f"rule {rule if isinstance(rule, (str, tuple)) else getattr(rule, '__name__', rule)}")
        return apply_rule(rule, parts, scene, path, spec.batch_dim)

    def _together(self, parts: Sequence[Any], scene: Scene, path: Path, spec: Declared, rule: Rule | None) -> Any:
        first = parts[0]
        cls = type(first)
        if cls is list or cls is tuple:
            return self._sequence(parts, scene, path, spec, rule)
        if cls is dict and self.undeclared and all(part.keys() == first.keys() for part in parts):
            return {key: self.node([p[key] for p in parts], scene, (*path, key), spec, rule) for key in first}
        kind = kind_of(cls)
        if kind is not None:
            return self._custom(parts, scene, path, kind)
        if isinstance(first, np.ndarray) and first.ndim:
            return self._arrays(parts, scene, path, spec)
        if cls is torch.Size:
            return self._values(parts, scene, path)
        if is_sequence(first):
            return self._sequence(parts, scene, path, spec, rule)
        nodes = [node for node in map(open_node, parts) if node is not None]
        if not nodes:
            return self._values(parts, scene, path)
        return self._inside(nodes, scene, path, spec, rule)

    def _inside(self, nodes: list[Node], scene: Scene, path: Path, spec: Declared, rule: Rule | None) -> Any:
        keys = tuple(nodes[0].keys)
        columns = [node.children for node in nodes]
        for index, node in enumerate(nodes[1:], start=1):
            if tuple(node.keys) != keys:
                if set(node.keys) != set(keys):
                    raise other_entries(path, keys, index, node.keys, scene.sizes)
                table = dict(zip(node.keys, node.children, strict=True))
                columns[index] = [table[key] for key in keys]
        declared = [spec] * len(keys) if self.undeclared else spec.children(keys, path)
        return nodes[0].close(
            [
                self.node(column, scene, (*path, key), below, rule)
                for key, column, below in zip(keys, zip(*columns, strict=True), declared, strict=True)
            ]
        )

    def _sequence(self, parts: Sequence[Any], scene: Scene, path: Path, spec: Declared, rule: Rule | None) -> Any:
        """The two readings of a list, as on the way in: one entry a sample, or a structure."""
        lengths, sizes = [len(part) for part in parts], list(scene.sizes)
        reading = self.readings.get(path)
        column = lengths == sizes and (reading == COLUMN or all(map(_is_sliceable, parts)))
        inside = len(set(lengths)) == 1
        if spec.samples or reading == COLUMN:
            inside = False
        elif column and ((reading == "inside" and inside) or self._is_spoken_of_inside(parts, path, spec, rule)):
            column = False
        doubt = column and inside
        if doubt:
            inside = self._could_be_inside(parts, sizes, path)
        if column:
            if not inside and (doubt or len(set(sizes)) > 1):
                self.readings[path] = COLUMN
            self._note(path, "joined, one entry a sample")
            return join(parts)
        if inside:
            if lengths != sizes:
                self.readings[path] = "inside"
            nodes = [node for node in map(open_node, parts) if node is not None]
            return self._inside(nodes, scene, path, spec, rule)
        kept = ", read before as one entry a sample" if reading == COLUMN else ""
        raise cannot_merge(path, parts, f"lists of {lengths} entries{kept}", sizes)

    def _is_spoken_of_inside(self, parts: Sequence[Any], path: Path, spec: Declared, rule: Rule | None) -> bool:
        """Whether a rule or a dim is meant for the entries of a list, which is therefore a structure."""
        keys = range(len(parts[0]))
        if rule is not None or (self.named and any(rule_for(self.named, (*path, key)) for key in keys)):
            return True
        if spec.is_dim:
            return any(holds_tensors(part) for part in parts)
        if self.general is not None and is_leaf_rule(self.general):
            alike = len({len(part) for part in parts}) == 1
            return alike and all(speaks_of(self.general, [item]) for part in parts for item in part)
        return not spec.is_plain or (bool(spec.patterns) and any(not s.auto for s in spec.children(keys, path)))

    def _could_be_inside(self, parts: Sequence[Any], sizes: Sequence[int], path: Path) -> bool:
        """Whether a list as long as its shard could be a structure too; `MergeError` if its entries speak for that."""
        if all(_PLAIN_TYPES.issuperset(map(type, part)) for part in parts):
            return True
        found = {holds_samples(item, size) for part, size in zip(parts, sizes, strict=True) for item in part}
        if True in found and False not in found:
            raise two_readings(path, self.merger.dim)
        return False not in found

    def _tensors(self, parts: Sequence[Tensor], scene: Scene, path: Path, spec: Declared) -> Any:
        kinds = [own_kind(part) for part in parts]
        if any(kinds):
            return self._of_kinds(parts, kinds, scene, path)
        shapes = [part.shape for part in parts]
        if not any(shapes):
            return self._scalars(parts, scene, path)
        dim = self._batch_dim(shapes, scene.sizes, path, spec, parts)
        self._note(path, _joined(dim))
        return torch.cat(list(parts), dim)

    def _of_kinds(self, parts: Sequence[Any], kinds: Sequence[Kind | None], scene: Scene, path: Path) -> Any:
        kind = kinds[0]
        if kind is None or any(other is not kind for other in kinds):
            shown = [layout_of(part) for part in parts]
            raise cannot_merge(path, parts, f"the replicas gave tensors of different layouts, {shown}", scene.sizes)
        return self._custom(parts, scene, path, kind)

    def _arrays(self, parts: Sequence[Any], scene: Scene, path: Path, spec: Declared) -> Any:
        known, shapes = self.dims.get(path), [part.shape for part in parts]
        if known is not None and join_along(shapes, scene.sizes, *known):
            dim = known[1]
        else:
            dim = self._batch_dim(shapes, scene.sizes, path, spec, parts)
        self._note(path, _joined(dim))
        return np.concatenate(parts, dim)

    def _batch_dim(
        self, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], path: Path, spec: Declared, parts: Sequence[Any]
    ) -> int:
        """The declared dim, or the one whose size is the shard's on every replica, the usual batch dim first."""
        rank = len(shapes[0])
        shown = [list(shape) for shape in shapes]
        if spec.is_dim:
            same_rank = all(len(shape) == rank for shape in shapes) and -rank <= spec.batch_dim < rank
            dim = spec.batch_dim % rank if rank else 0
            if same_rank and join_along(shapes, [shape[dim] for shape in shapes], rank, dim):
                return dim
            raise cannot_merge(path, parts, f"tensors of shapes {shown} cannot be joined along dim {dim}", sizes)
        usual = self.merger.dim % rank if -rank <= self.merger.dim < rank else -1
        matches = [dim for dim in range(rank) if follow(shapes, sizes, rank, dim)]
        known = self.dims.get(path)
        if known is not None and known[0] == rank and known[1] in matches:
            usual = known[1]
        fitting = [dim for dim in matches if join_along(shapes, sizes, rank, dim)]
        if usual in fitting or len(fitting) == 1:
            dim = usual if usual in fitting else fitting[0]
            self.dims[path] = rank, dim
            return dim
        raise cannot_merge(path, parts, f"tensors of shapes {shown}", sizes, two_dims=len(matches) > 1)

    def _scalars(self, parts: Sequence[Tensor], scene: Scene, path: Path) -> Any:
        if not equal_scalars(parts):
            raise cannot_merge(path, parts, f"a 0-d tensor that differs between replicas ({few(parts)})", scene.sizes)
        if is_integer(parts[0]):
            raise cannot_merge(path, parts, f"a constant or a count, which is equal here ({few(parts)})", scene.sizes)
        self._note(path, "equal on every replica")
        if any(part.requires_grad for part in parts):
            return mean_of_equals(parts, scene.sizes)
        return parts[0]

    def _custom(self, parts: Sequence[Any], scene: Scene, path: Path, kind: Kind) -> Any:
        try:
            counts = [kind.size(part) for part in parts]
            if counts == list(scene.sizes):
                self._note(path, "joined by its type's rule")
                return join_by_kind(kind, parts)
        except InstepError as error:  # it does not know where its value stood
            raise cannot_merge(path, parts, str(error), scene.sizes) from error
        if all(count is None for count in counts):
            raise no_samples(path, parts[0])
        raise cannot_merge(path, parts, f"{type(parts[0]).__name__} of {counts} samples", scene.sizes)

    def _values(self, parts: Sequence[Any], scene: Scene, path: Path) -> Any:
        first = parts[0]
        if isinstance(first, torch.Size):
            self._note(path, "a shape, number by number")
            return merge_shapes(self.found, parts, scene, path)
        if not isinstance(first, (*SCALARS, np.generic, np.ndarray)):
            raise no_rule_for_type(path, first)
        if type(first) is int and parts == list(scene.sizes):
            raise cannot_merge(path, parts, f"a constant or the number of samples ({few(parts)})", scene.sizes)
        if all(equal_values(part, first) for part in parts):
            self._note(path, "equal on every replica")
            return first
        raise cannot_merge(path, parts, f"a value that differs between replicas ({few(parts)})", scene.sizes)

    def _note(self, path: Path, what: str) -> None:
        self.seen[path] = what


def _is_sliceable(part: Any) -> bool:
    return isinstance(part, list) or is_record_of_samples(part)
