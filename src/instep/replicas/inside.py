"""What containers hold after a call, from what each replica's own container holds: by equality, or by rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from instep.errors import StateError
from instep.replicas.contents import Contents, contents_of, is_array
from instep.replicas.equal import equal
from instep.replicas.shelf import Place
from instep.replicas.watch import MISSING

SAMPLES, ENTRIES = "one entry a sample", "the same entries whatever the batch"


class Judge(Protocol):
    """Who knows the rules."""

    readings: dict[str, str]

    def rule(self, place: Place) -> Any: ...

    def varies(self, place: Place) -> bool: ...

    def stays(self, place: Place) -> bool: ...

    def output_rule(self, place: Place) -> Any: ...

    def merge(self, place: Place, old: Any, new: list[Any], sizes: Sequence[int]) -> Any: ...

    def refuse(self, place: Place, new: list[Any]) -> Any: ...


def merge_contents(
    container: Any, place: Place, old: Contents, new: Sequence[Contents], sizes: Sequence[int], judge: Judge
) -> Contents:
    """The contents that the whole would have left in a container. Objects of the source stand for themselves."""
    rule = judge.rule(place)
    if callable(rule):
        made = rule(_shown(container, old), [_shown(container, one) for one in new], list(sizes))
        return _given(container, made, place)
    if rule == "first":
        return new[0]
    if is_array(container):
        return Contents((), (judge.merge(place, old.items[0], [one.items[0] for one in new], sizes),))
    if isinstance(container, set):
        return _merge_sets(place, old, new, judge)
    if isinstance(container, (list, deque)):
        return Contents((), _merge_sequences(container, place, old.items, [one.items for one in new], sizes, judge))
    return _merge_tables(place, old, new, sizes, judge)


def _given(container: Any, made: Any, place: Place) -> Contents:
    """What a function of the user's gave for a container; what cannot be put there is refused before any write."""
    if is_array(container):
        return Contents((), (np.asarray(made),))
    sequence = isinstance(container, (list, deque))
    wanted: Any = set if isinstance(container, set) else (list, tuple, deque) if sequence else dict
    if not isinstance(made, wanted):
        raise StateError(
            f"the function in state={{{str(place)!r}: ...}} returned a {type(made).__name__} for a "
            f"{type(container).__name__}: it returns what the whole would have, in the same form."
        )
    return contents_of(made)


def _shown(container: Any, contents: Contents) -> Any:
    """Contents as a user's rule sees them: a plain list, set, dictionary or array."""
    if is_array(container):
        return contents.items[0]
    if isinstance(container, set):
        return set(contents.items)
    if isinstance(container, (list, deque)):
        return list(contents.items)
    return dict(zip(contents.keys, contents.items, strict=True))


def _merge_sets(place: Place, old: Contents, new: Sequence[Contents], judge: Judge) -> Contents:
    before, after = set(old.items), [set(one.items) for one in new]
    if all(one == after[0] for one in after) and (after[0] == before or not judge.varies(place)):
        return new[0]
    if judge.rule(place) in ("cat", "sum"):
        gone = set().union(*(before - one for one in after))
        return Contents((), tuple(before.union(*after) - gone))
    return Contents((), tuple(judge.refuse(place, after)))


def _merge_tables(place: Place, old: Contents, new: Sequence[Contents], sizes: Sequence[int], judge: Judge) -> Contents:
    """Dictionaries and attributes, entry by entry."""
    before = dict(zip(old.keys, old.items, strict=True))
    tables = [dict(zip(one.keys, one.items, strict=True)) for one in new]
    alike = all(list(table) == list(tables[0]) for table in tables)
    keys = list(tables[0]) if alike else list(dict.fromkeys(key for table in (before, *tables) for key in table))
    merged = {}
    for key in keys:
        was, now = before.get(key, MISSING), [table.get(key, MISSING) for table in tables]
        value = _merge_entry(place.at(key), was, now, sizes, judge)
        if value is not MISSING:
            merged[key] = value
    return Contents(tuple(merged), tuple(merged.values()))


def _merge_entry(place: Place, was: Any, now: list[Any], sizes: Sequence[int], judge: Judge) -> Any:
    if all(value is was for value in now) or all(value is MISSING for value in now):
        return now[0]
    if judge.rule(place) == "cat":
        changed = [value for value in now if value is not was]
        if all(equal(value, changed[0]) for value in changed):
            return changed[0]
    return judge.merge(place, was, now, sizes)


def _merge_sequences(
    container: Any,
    place: Place,
    old: tuple[Any, ...],
    new: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
    judge: Judge,
) -> tuple[Any, ...]:
    """Lists that grew, lists whose entries changed, and lists that are the same on every replica."""
    kept = [_kept(old, items) for items in new]
    full = isinstance(container, deque) and container.maxlen is not None
    if full or len(set(kept)) == 1:
        added = [items[count:] for items, count in zip(new, kept, strict=True)]
        if kept[0] or not old or full or len({*map(len, new), len(old)}) > 1:
            head = old if full else old[len(old) - kept[0] :]
            return (*head, *_merge_added(place, kept[0], added, sizes, judge))
    lengths = set(map(len, new))
    if len(lengths) == 1:
        was = old if lengths == {len(old)} else (MISSING,) * len(new[0])
        columns = [list(column) for column in zip(*new, strict=True)]
        return tuple(judge.merge(place.at(index), was[index], column, sizes) for index, column in enumerate(columns))
    return tuple(judge.refuse(place, [list(items) for items in new]))


def _kept(old: tuple[Any, ...], items: tuple[Any, ...]) -> int:
    """How many of the last items that a list had are still there, now at its beginning."""
    for count in range(min(len(old), len(items)), 0, -1):
        if items[0] is old[-count] and all(map(is_, items[:count], old[-count:])):
            return count
    return 0


def _merge_added(
    place: Place, start: int, added: Sequence[tuple[Any, ...]], sizes: Sequence[int], judge: Judge
) -> list[Any]:
    """What lists grew by: one entry a sample, or entries that each mean the whole batch."""
    path, lengths = str(place), [len(items) for items in added]
    rule, spoken = judge.rule(place), judge.output_rule(place.at(start)) is not None
    joined = [item for items in added for item in items]
    columns = [list(column) for column in zip(*added, strict=False)]
    if rule == "cat":
        return joined
    reading = ENTRIES if judge.stays(place) else judge.readings.get(path)
    if lengths == list(sizes) and rule is None and not spoken and reading != ENTRIES:
        if reading == SAMPLES or len(set(lengths)) > 1:
            judge.readings[path] = SAMPLES
            return joined
        if sizes[0] < 2 or all(_alike(column) for column in columns) or _follow_the_batch(joined, sizes[0]):
            return list(judge.refuse(place, [list(items) for items in added]))
        return joined
    if len(set(lengths)) > 1:
        return list(judge.refuse(place, [list(items) for items in added]))
    if lengths != list(sizes):
        judge.readings[path] = ENTRIES
    return [judge.merge(place.at(start + index), MISSING, column, sizes) for index, column in enumerate(columns)]


def _alike(column: list[Any]) -> bool:
    return all(equal(value, column[0]) for value in column)


def _follow_the_batch(items: Sequence[Any], size: int) -> bool:
    """Whether each entry holds as many samples as the shard: then it is no sample itself."""
    return all(isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == size for item in items)
