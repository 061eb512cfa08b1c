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

PER_SAMPLE, PER_CALL = "one entry per sample", "the same entries whatever the batch"


class MergePolicy(Protocol):
    """Who knows the rules."""

    list_growth: dict[str, str]

    def state_rule(self, place: StatePath) -> Any: ...

    def is_sample_dependent(self, place: StatePath) -> bool: ...

    def is_constant(self, place: StatePath) -> bool: ...

    def output_rule(self, place: StatePath) -> Any: ...

    def merge_value(self, place: StatePath, old: Any, new: list[Any], sizes: Sequence[int]) -> Any: ...

    def reject(self, place: StatePath, new: list[Any]) -> Any: ...


def merge_contents(
    container: Any, place: StatePath, old: Contents, new: Sequence[Contents], sizes: Sequence[int], judge: MergePolicy
) -> Contents:
    """The contents that the whole would have left in a container. Objects of the source stand for themselves."""
    rule = judge.state_rule(place)
    if callable(rule):
        made = rule(_as_builtin(container, old), [_as_builtin(container, one) for one in new], list(sizes))
        return _contents_from_rule(container, made, place)
    if rule == "first":
        return new[0]
    if is_numeric_array(container):
        return Contents((), (judge.merge_value(place, old.items[0], [one.items[0] for one in new], sizes),))
    if isinstance(container, set):
        return _merge_sets(place, old, new, judge)
    if isinstance(container, (list, deque)):
        return Contents((), _merge_sequences(container, place, old.items, [one.items for one in new], sizes, judge))
    return _merge_dicts(place, old, new, sizes, judge)


def _contents_from_rule(container: Any, made: Any, place: StatePath) -> Contents:
    """What a function of the user's gave for a container; what cannot be put there is refused before any write."""
    if is_numeric_array(container):
        return Contents((), (np.asarray(made),))
    sequence = isinstance(container, (list, deque))
    wanted: Any = set if isinstance(container, set) else (list, tuple, deque) if sequence else dict
    if not isinstance(made, wanted):
        raise StateError(
            f"the function in state={{{str(place)!r}: ...}} returned a {type(made).__name__} for a "
            f"{type(container).__name__}: it returns what the whole would have, in the same form."
        )
    return read_contents(made)


def _as_builtin(container: Any, contents: Contents) -> Any:
    """Contents as a user's rule sees them: a plain list, set, dictionary or array."""
    if is_numeric_array(container):
        return contents.items[0]
    if isinstance(container, set):
        return set(contents.items)
    if isinstance(container, (list, deque)):
        return list(contents.items)
    return dict(zip(contents.keys, contents.items, strict=True))


def _merge_sets(place: StatePath, old: Contents, new: Sequence[Contents], judge: MergePolicy) -> Contents:
    before, after = set(old.items), [set(one.items) for one in new]
    if all(one == after[0] for one in after) and (after[0] == before or not judge.is_sample_dependent(place)):
        return new[0]
    if judge.state_rule(place) in ("cat", "sum"):
        gone = set().union(*(before - one for one in after))
        return Contents((), tuple(before.union(*after) - gone))
    return Contents((), tuple(judge.reject(place, after)))


def _merge_dicts(
    place: StatePath, old: Contents, new: Sequence[Contents], sizes: Sequence[int], judge: MergePolicy
) -> Contents:
    """Dictionaries and attributes, entry by entry."""
    before = dict(zip(old.keys, old.items, strict=True))
    tables = [dict(zip(one.keys, one.items, strict=True)) for one in new]
    alike = all(list(table) == list(tables[0]) for table in tables)
    keys = list(tables[0]) if alike else list(dict.fromkeys(key for table in (before, *tables) for key in table))
    merged = {}
    for key in keys:
        was, now = before.get(key, MISSING), [table.get(key, MISSING) for table in tables]
        value = _merge_entry(place.child(key), was, now, sizes, judge)
        if value is not MISSING:
            merged[key] = value
    return Contents(tuple(merged), tuple(merged.values()))


def _merge_entry(place: StatePath, was: Any, now: list[Any], sizes: Sequence[int], judge: MergePolicy) -> Any:
    if all(value is was for value in now) or all(value is MISSING for value in now):
        return now[0]
    if judge.state_rule(place) == "cat":
        changed = [value for value in now if value is not was]
        if all(values_equal(value, changed[0]) for value in changed):
            return changed[0]
    return judge.merge_value(place, was, now, sizes)


def _merge_sequences(
    container: Any,
    place: StatePath,
    old: tuple[Any, ...],
    new: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
    judge: MergePolicy,
) -> tuple[Any, ...]:
    """Lists that grew, lists whose entries changed, and lists that are the same on every replica."""
    kept = [_kept_suffix_length(old, items) for items in new]
    full = isinstance(container, deque) and container.maxlen is not None
    if full or len(set(kept)) == 1:
        added = [items[count:] for items, count in zip(new, kept, strict=True)]
        if kept[0] or not old or full or len({*map(len, new), len(old)}) > 1:
            head = old if full else old[len(old) - kept[0] :]
            return (*head, *_merge_appended(place, kept[0], added, sizes, judge))
    lengths = set(map(len, new))
    if len(lengths) == 1:
        was = old if lengths == {len(old)} else (MISSING,) * len(new[0])
        columns = [list(column) for column in zip(*new, strict=True)]
        return tuple(
            judge.merge_value(place.child(index), was[index], column, sizes) for index, column in enumerate(columns)
        )
    return tuple(judge.reject(place, [list(items) for items in new]))


def _kept_suffix_length(old: tuple[Any, ...], items: tuple[Any, ...]) -> int:
    """How many of the last items that a list had are still there, now at its beginning."""
    for count in range(min(len(old), len(items)), 0, -1):
        if items[0] is old[-count] and all(map(is_, items[:count], old[-count:])):
            return count
    return 0


def _merge_appended(
    place: StatePath, start: int, added: Sequence[tuple[Any, ...]], sizes: Sequence[int], judge: MergePolicy
) -> list[Any]:
    """What lists grew by: one entry per sample, or entries that each mean the whole batch."""
    path, lengths = str(place), [len(items) for items in added]
    rule, spoken = judge.state_rule(place), judge.output_rule(place.child(start)) is not None
    joined = [item for items in added for item in items]
    columns = [list(column) for column in zip(*added, strict=False)]
    if rule == "cat":
        return joined
    reading = PER_CALL if judge.is_constant(place) else judge.list_growth.get(path)
    if lengths == list(sizes) and rule is None and not spoken and reading != PER_CALL:
        if reading == PER_SAMPLE or len(set(lengths)) > 1:
            judge.list_growth[path] = PER_SAMPLE
            return joined
        if sizes[0] < 2 or all(_all_equal(column) for column in columns) or _hold_whole_shards(joined, sizes[0]):
            return list(judge.reject(place, [list(items) for items in added]))
        return joined
    if len(set(lengths)) > 1:
        return list(judge.reject(place, [list(items) for items in added]))
    if lengths != list(sizes):
        judge.list_growth[path] = PER_CALL
    return [
        judge.merge_value(place.child(start + index), MISSING, column, sizes) for index, column in enumerate(columns)
    ]


def _all_equal(column: list[Any]) -> bool:
    return all(values_equal(value, column[0]) for value in column)


def _hold_whole_shards(items: Sequence[Any], size: int) -> bool:
    """Whether each entry holds as many samples as the shard: then it is no sample itself."""
    return all(isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == size for item in items)
