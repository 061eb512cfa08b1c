"""Merges the replicas' outputs into one output: by rule, by probe verdict, or by concatenation along the batch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import InstepError, MergeError
from instep.structure.compare import differing_attributes
from instep.structure.infer import contains_tensors, is_sample_tuple, may_hold_batch
from instep.structure.merge_cache import CachedMerge, CacheMiss, build_cached_merge, build_cached_sum
from instep.structure.merge_messages import (
    ambiguous_list,
    attributes_differ,
    cannot_merge,
    keys_differ,
    no_batch_size,
    unregistered_type,
)
from instep.structure.merge_rules import (
    MergeContext,
    MergeRule,
    applies_to,
    apply_rule,
    check_rule,
    find_rule,
    is_leaf_rule,
    mean_of_equal_tensors,
)
from instep.structure.placements import Nested, PerSample, Reading, Shard
from instep.structure.problems import Problem, set_problems
from instep.structure.shapes import (
    can_cat,
    can_cat_plain_tensors,
    equal_values,
    format_values,
    has_batch_dim,
    is_integer,
    layout_of,
)
from instep.structure.spec import AUTO, DimSpec, root_spec, validate_dims
from instep.structure.split import Parts, concat_sequences, infer_part_sizes, merge_by_handler, undo_plan
from instep.structure.tree import NUMBER_TYPES, SCALARS, Node, Path, flatten_one_level, is_sequence, order_patterns
from instep.structure.types import TypeHandler, handler_for_type
from instep.structure.types_torch import handler_for
from instep.structure.verdicts import Verdicts, check_missing_parts, merge_torch_sizes
from instep.structure.weights import Weight


@dataclass
class Merger:
    """Merges the outputs of one function. Remembers the batch dim and the reading of each list by path."""

    dim: int = 0
    out_dims: Any = AUTO
    rules: Mapping[str, MergeRule] = field(default_factory=dict)
    """Rules by path or pattern. `"*"` is the default: it applies to leaves it supports without a rule of their own."""
    actions: dict[Path, str] = field(default_factory=dict)
    """How the last merge treated each path, for messages."""
    readings: dict[Path, Reading] = field(default_factory=dict)
    """How the list at each path was interpreted."""
    batch_dims: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """The rank and the batch dim of each leaf. Decides between dims when more than one has the shard's size."""
    verdicts: Verdicts = field(default_factory=dict)
    """Probe verdicts for leaves without a rule."""

    def __post_init__(self) -> None:
        validate_dims(self.out_dims, "out_dims")
        self.dim_spec = root_spec(self.out_dims, self.dim)
        self.path_rules = {pattern: rule for pattern, rule in self.rules.items() if pattern != "*"}
        self.default_rule = self.rules.get("*")
        self._cache: dict[tuple[int, ...], tuple[CachedMerge, dict[Path, str]]] = {}
        self.weights = _distinct_weights(self.verdicts)
        """The weights that the verdicts use."""
        self.known_weights: Mapping[Weight, list[Any]] = {}
        """Weights of the next call's shards that were read already, so that its merge need not wait for a device."""

    @classmethod
    def from_options(cls, merge: Any = AUTO, out_dims: Any = AUTO, dim: int = 0) -> Merger:
        """Create a merger from user options: `"auto"`, one rule for all leaves, or rules by path or pattern."""
        rules: dict[str, MergeRule] = {}
        if isinstance(merge, Mapping):
            rules = {pattern: rule for pattern, rule in order_patterns(merge.items()).items() if not _is_auto(rule)}
        elif not _is_auto(merge):
            rules = {"*": merge}
        for rule in rules.values():
            check_rule(rule)
        return cls(dim=dim, out_dims=out_dims, rules=rules)

    def merge(self, parts: Sequence[Any], sizes: Sequence[int], inputs: Sequence[Mapping[str, Any]] = ()) -> Any:
        """Merge the outputs of all replicas. Raises `MergeError` if the merge is ambiguous."""
        if len(parts) != len(sizes):
            raise MergeError(f"there are {len(parts)} parts and {len(sizes)} sizes: give one size for each part.")
        sizes = tuple(sizes)
        if sizes in self._cache:
            cached_merge, self.actions = self._cache[sizes]
            try:
                return cached_merge(parts)
            except (CacheMiss, RuntimeError):  # RuntimeError: `torch.cat` failed. The uncached path below reports why
                pass
        self.actions = {}
        context = MergeContext.create(sizes, parts, inputs, self.weights, self.known_weights)
        try:
            merged = _MergePass(self).merge_node(parts, context, (), self.dim_spec, None)
        except MergeError as error:
            if not error.problems:
                raise
            collected = _CollectingPass(self)
            collected.merge_node(parts, context, (), self.dim_spec, None)
            set_problems(error, collected.problems)
            raise
        if self.dim_spec.is_auto and not self.dim_spec.patterns and len(parts) > 1:
            self._cache_merge(parts, sizes)
        return merged

    def without_dropped(self, output: Any, path: Path = ()) -> Any:
        """An output with None in place of what a rule drops, so that it need not be sent."""
        if "drop" not in self.path_rules.values():
            return output
        if find_rule(self.path_rules, path) == "drop":
            return None
        node = flatten_one_level(output)
        if node is None:
            return output
        children = [
            self.without_dropped(child, (*path, key)) for key, child in zip(node.keys, node.children, strict=True)
        ]
        return node.unflatten(children) if any(map(operator.is_not, children, node.children)) else output

    def set_verdicts(self, verdicts: Verdicts) -> None:
        """Use these verdicts for later merges."""
        if verdicts is self.verdicts:
            return
        self.verdicts = verdicts
        self.weights = _distinct_weights(verdicts)
        self._cache.clear()
        for path, verdict in verdicts.items():
            self.batch_dims.pop(path, None)
            placement = verdict.placement
            if isinstance(placement, Shard):
                self.batch_dims[path] = verdict.rank, placement.dim
            elif isinstance(placement, (PerSample, Nested)):
                self.readings[path] = type(placement)

    def _cache_merge(self, parts: Sequence[Any], sizes: tuple[int, ...]) -> None:
        cached_merge = None
        if not self.rules:
            cached_merge = build_cached_merge(
                parts,
                sizes,
                {path: self.batch_dims[path] for path in self.actions if path in self.batch_dims},
                self.readings,
            )
        elif self.rules == {"*": "sum"} and not self.verdicts:
            cached_merge = build_cached_sum(parts)
        if len(self._cache) >= 64:  # many batch sizes: bound the memory
            self._cache.clear()
        self._cache.pop(sizes, None)
        if cached_merge is not None:
            self._cache[sizes] = cached_merge, self.actions


def _distinct_weights(verdicts: Verdicts) -> tuple[Weight, ...]:
    """The distinct weights that verdicts use."""
    return tuple(dict.fromkeys(weight for verdict in verdicts.values() for weight in verdict.weights))


def _is_auto(rule: Any) -> bool:
    return isinstance(rule, str) and rule == AUTO


def merge(
    parts: Sequence[Any], sizes: Sequence[int] | None = None, *, merge: Any = AUTO, out_dims: Any = AUTO, dim: int = 0
) -> Any:
    """Merge parts into one structure, as `DataParallel` merges outputs. The inverse of `split`.

    `sizes` are the numbers of samples in the parts, by default those of `split` or inferred. `merge` and `out_dims`
    are the same as for `DataParallel`.

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
        sizes = infer_part_sizes(parts, dim)
    return Merger.from_options(merge, out_dims, dim).merge(parts, sizes)


_PLAIN_TYPES = frozenset(SCALARS)


@functools.cache
def _cat_description(dim: int) -> str:
    return f"concatenated along dim {dim}"


class _MergePass:
    """One recursive merge. Shares the merger's records and updates them."""

    def __init__(self, merger: Merger) -> None:
        self.merger = merger
        self.batch_dims, self.actions, self.readings = merger.batch_dims, merger.actions, merger.readings
        self.path_rules, self.default_rule, self.verdicts = merger.path_rules, merger.default_rule, merger.verdicts
        self.is_auto = merger.dim_spec.is_auto and not merger.dim_spec.patterns

    def merge_node(
        self, parts: Sequence[Any], context: MergeContext, path: Path, spec: DimSpec, inherited: MergeRule | None
    ) -> Any:
        known_dim = self.batch_dims.get(path)
        if known_dim is not None and can_cat_plain_tensors(parts, context.sizes, *known_dim):
            self.actions[path] = _cat_description(known_dim[1])
            return torch.cat(tuple(parts), known_dim[1])
        rule = (find_rule(self.path_rules, path) if self.path_rules else None) or inherited
        if rule is not None and not is_leaf_rule(rule):
            return self._apply_rule(rule, parts, context, path, spec)
        types = set(map(type, parts))
        if type(None) in types:
            present = [index for index, part in enumerate(parts) if part is not None]
            if not present:
                return None
            if rule is None and self.default_rule is None and spec.is_auto:
                check_missing_parts(self.verdicts.get(path), parts, context, path)
            parts, context = [parts[index] for index in present], context.select(present)
            types.discard(type(None))
        if rule is not None and not any(flatten_one_level(part) is not None for part in parts):
            return self._apply_rule(rule, parts, context, path, spec)
        # An output that the default rule is not meant for has a verdict of the probe.
        default = self.default_rule
        if default is not None and rule is None and path not in self.verdicts and applies_to(default, parts):
            return self._apply_rule(default, parts, context, path, spec)
        first = parts[0]
        if len(parts) == 1:
            return first
        if spec.value is None:
            self._record(path, "the first replica's (out_dims is None)")
            return first
        if type(first) is not Tensor:
            names = differing_attributes(parts)
            if names:
                raise attributes_differ(path, parts, names, context.sizes)
        verdict = self.verdicts.get(path) if rule is None else None
        # A tensor of the module itself, returned by every replica, is already whole.
        is_shared = isinstance(first, Tensor) and first is parts[-1]
        if (
            verdict is not None
            and not is_shared
            and not any(map(handler_for, parts))
            and verdict.accepts(parts, context)
        ):
            self._record(path, verdict.description)
            return verdict.merge(parts, context, path)
        # Small integers are the same object wherever they are equal, such as the size of a shard.
        if first is parts[-1] and type(first) is not int and all(part is first for part in parts):
            self._record(path, "the same on every replica")
            return first
        if isinstance(first, Tensor) and (len(types) == 1 or all(isinstance(part, Tensor) for part in parts)):
            return self._merge_tensors(parts, context, path, spec)
        if len(types) > 1 and not all(isinstance(part, NUMBER_TYPES) for part in parts):
            names = [type(part).__name__ for part in parts]
            raise cannot_merge(path, parts, f"the replicas returned different types, {names}", context.sizes)
        return self._merge_by_type(parts, context, path, spec, rule)

    def _apply_rule(
        self, rule: MergeRule, parts: Sequence[Any], context: MergeContext, path: Path, spec: DimSpec
    ) -> Any:
        self._record(path, f"rule {rule if isinstance(rule, (str, tuple)) else getattr(rule, '__name__', rule)}")
        return apply_rule(rule, parts, context, path, spec.batch_dim)

    def _merge_by_type(
        self, parts: Sequence[Any], context: MergeContext, path: Path, spec: DimSpec, rule: MergeRule | None
    ) -> Any:
        first = parts[0]
        cls = type(first)
        if cls is list or cls is tuple:
            return self._merge_sequence(parts, context, path, spec, rule)
        if cls is dict and self.is_auto and all(part.keys() == first.keys() for part in parts):
            return {key: self.merge_node([p[key] for p in parts], context, (*path, key), spec, rule) for key in first}
        handler = handler_for_type(cls)
        if handler is not None:
            return self._merge_custom(parts, context, path, handler)
        if isinstance(first, np.ndarray) and first.ndim:
            return self._merge_arrays(parts, context, path, spec)
        if cls is torch.Size:
            return self._merge_plain(parts, context, path)
        if is_sequence(first):
            return self._merge_sequence(parts, context, path, spec, rule)
        nodes = [node for node in map(flatten_one_level, parts) if node is not None]
        if not nodes:
            return self._merge_plain(parts, context, path)
        return self._merge_children(nodes, context, path, spec, rule)

    def _merge_children(
        self, nodes: list[Node], context: MergeContext, path: Path, spec: DimSpec, rule: MergeRule | None
    ) -> Any:
        keys = tuple(nodes[0].keys)
        columns = [node.children for node in nodes]
        for index, node in enumerate(nodes[1:], start=1):
            if tuple(node.keys) != keys:
                if set(node.keys) != set(keys):
                    raise keys_differ(path, keys, index, node.keys, context.sizes)
                by_key = dict(zip(node.keys, node.children, strict=True))
                columns[index] = [by_key[key] for key in keys]
        child_specs = [spec] * len(keys) if self.is_auto else spec.children(keys, path)
        return nodes[0].unflatten(
            [
                self.merge_node(column, context, (*path, key), child_spec, rule)
                for key, column, child_spec in zip(keys, zip(*columns, strict=True), child_specs, strict=True)
            ]
        )

    def _merge_sequence(
        self, parts: Sequence[Any], context: MergeContext, path: Path, spec: DimSpec, rule: MergeRule | None
    ) -> Any:
        """Merge lists: concatenate if they hold one entry per sample, merge entry by entry if they are structures."""
        lengths, sizes = [len(part) for part in parts], list(context.sizes)
        reading = self.readings.get(path)
        is_per_sample = lengths == sizes and (reading is PerSample or all(map(_is_sliceable, parts)))
        is_structure = len(set(lengths)) == 1
        if spec.is_samples or reading is PerSample:
            is_structure = False
        elif is_per_sample and ((reading is Nested and is_structure) or self._has_entry_rules(parts, path, spec, rule)):
            is_per_sample = False
        fits_both = is_per_sample and is_structure
        if fits_both:
            is_structure = self._could_be_structure(parts, sizes, path)
        if is_per_sample:
            if not is_structure and (fits_both or len(set(sizes)) > 1):
                self.readings[path] = PerSample
            self._record(path, "concatenated, one entry per sample")
            return concat_sequences(parts)
        if is_structure:
            if lengths != sizes:
                self.readings[path] = Nested
            nodes = [node for node in map(flatten_one_level, parts) if node is not None]
            return self._merge_children(nodes, context, path, spec, rule)
        note = ", read before as one entry per sample" if reading is PerSample else ""
        raise cannot_merge(path, parts, f"lists of {lengths} entries{note}", sizes)

    def _has_entry_rules(self, parts: Sequence[Any], path: Path, spec: DimSpec, rule: MergeRule | None) -> bool:
        """Whether a rule or a dim is given for the entries of a list, so that it must be a structure."""
        keys = range(len(parts[0]))
        if rule is not None or (self.path_rules and any(find_rule(self.path_rules, (*path, key)) for key in keys)):
            return True
        if spec.is_dim:
            return any(contains_tensors(part) for part in parts)
        if self.default_rule is not None and is_leaf_rule(self.default_rule):
            same_length = len({len(part) for part in parts}) == 1
            return same_length and all(applies_to(self.default_rule, [item]) for part in parts for item in part)
        return not spec.is_uniform or (bool(spec.patterns) and any(not s.is_auto for s in spec.children(keys, path)))

    def _could_be_structure(self, parts: Sequence[Any], sizes: Sequence[int], path: Path) -> bool:
        """Whether a list with one entry per sample could also be a structure.

        Raises `MergeError` if its entries have the shard's batch size too.
        """
        if all(_PLAIN_TYPES.issuperset(map(type, part)) for part in parts):
            return True
        is_batched = {may_hold_batch(item, size) for part, size in zip(parts, sizes, strict=True) for item in part}
        if True in is_batched and False not in is_batched:
            raise ambiguous_list(path, self.merger.dim)
        return False not in is_batched

    def _merge_tensors(self, parts: Sequence[Tensor], context: MergeContext, path: Path, spec: DimSpec) -> Any:
        handlers = [handler_for(part) for part in parts]
        if any(handlers):
            return self._merge_custom_tensors(parts, handlers, context, path)
        shapes = [part.shape for part in parts]
        if not any(shapes):
            return self._merge_scalars(parts, context, path)
        dim = self._find_batch_dim(shapes, context.sizes, path, spec, parts)
        self._record(path, _cat_description(dim))
        return torch.cat(list(parts), dim)

    def _merge_custom_tensors(
        self, parts: Sequence[Any], handlers: Sequence[TypeHandler | None], context: MergeContext, path: Path
    ) -> Any:
        handler = handlers[0]
        if handler is None or any(other is not handler for other in handlers):
            layouts = [layout_of(part) for part in parts]
            raise cannot_merge(
                path, parts, f"the replicas returned tensors of different layouts, {layouts}", context.sizes
            )
        return self._merge_custom(parts, context, path, handler)

    def _merge_arrays(self, parts: Sequence[Any], context: MergeContext, path: Path, spec: DimSpec) -> Any:
        known_dim, shapes = self.batch_dims.get(path), [part.shape for part in parts]
        if known_dim is not None and can_cat(shapes, context.sizes, *known_dim):
            dim = known_dim[1]
        else:
            dim = self._find_batch_dim(shapes, context.sizes, path, spec, parts)
        self._record(path, _cat_description(dim))
        return np.concatenate(parts, dim)

    def _find_batch_dim(
        self, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], path: Path, spec: DimSpec, parts: Sequence[Any]
    ) -> int:
        """The declared dim, or else the dim that has the shard's size on every replica.

        If several dims do, the dim of earlier merges is preferred, then the merger's `dim`.
        """
        rank = len(shapes[0])
        shape_lists = [list(shape) for shape in shapes]
        if spec.is_dim:
            same_rank = all(len(shape) == rank for shape in shapes) and -rank <= spec.batch_dim < rank
            dim = spec.batch_dim % rank if rank else 0
            if same_rank and can_cat(shapes, [shape[dim] for shape in shapes], rank, dim):
                return dim
            raise cannot_merge(
                path, parts, f"tensors of shapes {shape_lists} cannot be concatenated along dim {dim}", sizes
            )
        preferred = self.merger.dim % rank if -rank <= self.merger.dim < rank else -1
        matches = [dim for dim in range(rank) if has_batch_dim(shapes, sizes, rank, dim)]
        known_dim = self.batch_dims.get(path)
        if known_dim is not None and known_dim[0] == rank and known_dim[1] in matches:
            preferred = known_dim[1]
        fitting = [dim for dim in matches if can_cat(shapes, sizes, rank, dim)]
        if preferred in fitting or len(fitting) == 1:
            dim = preferred if preferred in fitting else fitting[0]
            self.batch_dims[path] = rank, dim
            return dim
        raise cannot_merge(path, parts, f"tensors of shapes {shape_lists}", sizes, has_two_batch_dims=len(matches) > 1)

    def _merge_scalars(self, parts: Sequence[Tensor], context: MergeContext, path: Path) -> Any:
        if not context.are_equal(parts):
            raise cannot_merge(
                path, parts, f"a 0-d tensor that differs between replicas ({format_values(parts)})", context.sizes
            )
        if is_integer(parts[0]):
            raise cannot_merge(
                path, parts, f"a constant or a count, which is equal here ({format_values(parts)})", context.sizes
            )
        self._record(path, "equal on every replica")
        if any(part.requires_grad for part in parts):
            return mean_of_equal_tensors(parts, context)
        return parts[0]

    def _merge_custom(self, parts: Sequence[Any], context: MergeContext, path: Path, handler: TypeHandler) -> Any:
        try:
            counts = [handler.size(part) for part in parts]
            if counts == list(context.sizes):
                self._record(path, "merged by its type's handler")
                return merge_by_handler(handler, parts)
        except InstepError as error:  # the handler cannot locate the samples
            raise cannot_merge(path, parts, str(error), context.sizes) from error
        if all(count is None for count in counts):
            raise no_batch_size(path, parts[0])
        raise cannot_merge(path, parts, f"{type(parts[0]).__name__} of {counts} samples", context.sizes)

    def _merge_plain(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        first = parts[0]
        if isinstance(first, torch.Size):
            self._record(path, "a shape, merged entry by entry")
            return merge_torch_sizes(self.verdicts, parts, context, path)
        if not isinstance(first, (*SCALARS, np.generic, np.ndarray)):
            raise unregistered_type(path, first)
        if type(first) is int and parts == list(context.sizes):
            raise cannot_merge(
                path, parts, f"a constant or the number of samples ({format_values(parts)})", context.sizes
            )
        if all(equal_values(part, first) for part in parts):
            self._record(path, "equal on every replica")
            return first
        raise cannot_merge(
            path, parts, f"a value that differs between replicas ({format_values(parts)})", context.sizes
        )

    def _record(self, path: Path, action: str) -> None:
        self.actions[path] = action


class _CollectingPass(_MergePass):
    """A merge that goes on after an error, to find the problems of all leaves. Its records are copies."""

    def __init__(self, merger: Merger) -> None:
        super().__init__(merger)
        self.batch_dims, self.readings, self.actions = dict(self.batch_dims), dict(self.readings), {}
        self.problems: list[Problem] = []

    def merge_node(
        self, parts: Sequence[Any], context: MergeContext, path: Path, spec: DimSpec, inherited: MergeRule | None
    ) -> Any:
        try:
            return super().merge_node(parts, context, path, spec, inherited)
        except MergeError as error:
            if not error.problems:
                raise
            self.problems += error.problems
            return None


def _is_sliceable(part: Any) -> bool:
    return isinstance(part, list) or is_sample_tuple(part)
