"""Merging of lists, sets, dictionaries and arrays that `forward` changed on the replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from instep.errors import StateError
from instep.replicas.diff import MISSING
from instep.replicas.object_graph import Contents, is_numeric_array, read_contents, values_equal
from instep.replicas.shared_containers import StatePath

PER_SAMPLE, PER_CALL = "one entry per sample", "a fixed number of entries per call"


class MergePolicy(Protocol):
    """The state rules, and what the probe has found (implemented by `StateMerger`)."""

    list_growth: dict[str, str]

    def state_rule(self, path: StatePath) -> Any: ...

    def is_sample_dependent(self, path: StatePath) -> bool: ...

    def is_constant(self, path: StatePath) -> bool: ...

    def output_rule(self, path: StatePath) -> Any: ...

    def merge_value(self, path: StatePath, old: Any, new: list[Any], sizes: Sequence[int]) -> Any: ...

    def reject(self, path: StatePath, new: list[Any]) -> Any: ...


def merge_contents(
    container: Any, path: StatePath, old: Contents, new: Sequence[Contents], sizes: Sequence[int], policy: MergePolicy
) -> Contents:
    """The contents of a container after a call, from the contents on each replica."""
    rule = policy.state_rule(path)
    if callable(rule):
        result = rule(_as_builtin(container, old), [_as_builtin(container, one) for one in new], list(sizes))
        return _contents_from_rule(container, result, path)
    if rule == "first":
        return new[0]
    if is_numeric_array(container):
        return Contents((), (policy.merge_value(path, old.items[0], [one.items[0] for one in new], sizes),))
    if isinstance(container, set):
        return _merge_sets(path, old, new, policy)
    if isinstance(container, (list, deque)):
        return Contents((), _merge_sequences(container, path, old.items, [one.items for one in new], sizes, policy))
    return _merge_dicts(path, old, new, sizes, policy)


def _contents_from_rule(container: Any, result: Any, path: StatePath) -> Contents:
    """The contents that a user's rule returned. Raises `StateError` if they do not fit the container."""
    if is_numeric_array(container):
        return Contents((), (np.asarray(result),))
    is_sequence = isinstance(container, (list, deque))
    expected: Any = set if isinstance(container, set) else (list, tuple, deque) if is_sequence else dict
    if not isinstance(result, expected):
        raise StateError(
            f"the function in state={{{str(path)!r}: ...}} returned a value of type {type(result).__name__}, and the "
            f"attribute is a {type(container).__name__}.\nReturn a value of the same type."
        )
    return read_contents(result)


def _as_builtin(container: Any, contents: Contents) -> Any:
    """Contents as a list, set, dictionary or array, for a user's rule."""
    if is_numeric_array(container):
        return contents.items[0]
    if isinstance(container, set):
        return set(contents.items)
    if isinstance(container, (list, deque)):
        return list(contents.items)
    return dict(zip(contents.keys, contents.items, strict=True))


def _merge_sets(path: StatePath, old: Contents, new: Sequence[Contents], policy: MergePolicy) -> Contents:
    before, after = set(old.items), [set(one.items) for one in new]
    if all(one == after[0] for one in after) and (after[0] == before or not policy.is_sample_dependent(path)):
        return new[0]
    if policy.state_rule(path) in ("cat", "sum"):
        removed = set().union(*(before - one for one in after))
        return Contents((), tuple(before.union(*after) - removed))
    return Contents((), tuple(policy.reject(path, after)))


def _merge_dicts(
    path: StatePath, old: Contents, new: Sequence[Contents], sizes: Sequence[int], policy: MergePolicy
) -> Contents:
    """Merge dictionaries or attributes, entry by entry."""
    before, tables = old.by_key(), [one.by_key() for one in new]
    same_keys = all(list(table) == list(tables[0]) for table in tables)
    keys = list(tables[0]) if same_keys else list(dict.fromkeys(key for table in (before, *tables) for key in table))
    merged = {}
    for key in keys:
        values = [table.get(key, MISSING) for table in tables]
        value = _merge_entry(path.child(key), before.get(key, MISSING), values, sizes, policy)
        if value is not MISSING:
            merged[key] = value
    return Contents(tuple(merged), tuple(merged.values()))


def _merge_entry(path: StatePath, old: Any, new: list[Any], sizes: Sequence[int], policy: MergePolicy) -> Any:
    if all(value is old for value in new) or all(value is MISSING for value in new):
        return new[0]
    if policy.state_rule(path) == "cat":
        changed = [value for value in new if value is not old]
        if all(values_equal(value, changed[0]) for value in changed):
            return changed[0]
    return policy.merge_value(path, old, new, sizes)


def _merge_sequences(
    container: Any,
    path: StatePath,
    old: tuple[Any, ...],
    new: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
    policy: MergePolicy,
) -> tuple[Any, ...]:
    """Merge lists that grew, or whose entries changed."""
    kept = [_kept_suffix_length(old, items) for items in new]
    is_bounded = isinstance(container, deque) and container.maxlen is not None
    if is_bounded or len(set(kept)) == 1:
        added = [items[count:] for items, count in zip(new, kept, strict=True)]
        if kept[0] or not old or is_bounded or len({*map(len, new), len(old)}) > 1:
            head = old if is_bounded else old[len(old) - kept[0] :]
            return (*head, *_merge_appended(path, kept[0], added, sizes, policy))
    lengths = set(map(len, new))
    if len(lengths) == 1:
        before = old if lengths == {len(old)} else (MISSING,) * len(new[0])
        columns = [list(column) for column in zip(*new, strict=True)]
        return tuple(
            policy.merge_value(path.child(index), before[index], column, sizes) for index, column in enumerate(columns)
        )
    return tuple(policy.reject(path, [list(items) for items in new]))


def _kept_suffix_length(old: tuple[Any, ...], items: tuple[Any, ...]) -> int:
    """The length of the longest suffix of `old` that `items` starts with."""
    for count in range(min(len(old), len(items)), 0, -1):
        if items[0] is old[-count] and all(map(is_, items[:count], old[-count:])):
            return count
    return 0


def _merge_appended(
    path: StatePath, start: int, added: Sequence[tuple[Any, ...]], sizes: Sequence[int], policy: MergePolicy
) -> list[Any]:
    """Merge appended entries: one per sample, or one for the whole batch."""
    name, lengths = str(path), [len(items) for items in added]
    rule, has_output_rule = policy.state_rule(path), policy.output_rule(path.child(start)) is not None
    joined = [item for items in added for item in items]
    columns = [list(column) for column in zip(*added, strict=False)]
    if rule == "cat":
        return joined
    growth = PER_CALL if policy.is_constant(path) else policy.list_growth.get(name)
    if lengths == list(sizes) and rule is None and not has_output_rule and growth != PER_CALL:
        if growth == PER_SAMPLE or len(set(lengths)) > 1:
            policy.list_growth[name] = PER_SAMPLE
            return joined
        if sizes[0] < 2 or all(_all_equal(column) for column in columns) or _hold_whole_shards(joined, sizes[0]):
            return list(policy.reject(path, [list(items) for items in added]))
        return joined
    if len(set(lengths)) > 1:
        return list(policy.reject(path, [list(items) for items in added]))
    if lengths != list(sizes):
        policy.list_growth[name] = PER_CALL
    return [
        policy.merge_value(path.child(start + index), MISSING, column, sizes) for index, column in enumerate(columns)
    ]


def _all_equal(column: list[Any]) -> bool:
    return all(values_equal(value, column[0]) for value in column)


def _hold_whole_shards(items: Sequence[Any], size: int) -> bool:
    """Whether each entry is a tensor with the samples of a shard, not one sample."""
    return all(isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == size for item in items)
