"""Encodes a container's new contents relative to the old ones, which both processes have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from instep.replicas.object_graph import Contents, is_atomic
from instep.structure.tree import SCALARS


def encode_items(container: Any, before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Each item as `(index before, None)`, or as `(-1, item)` if it is new. Indices ascend where possible.

    Items of a set are always sent: sets are ordered differently in each process.
    """
    indices: dict[int, list[int]] = {}
    for index, item in enumerate(() if isinstance(container, set) else before):
        indices.setdefault(id(item), []).append(index)
    last = -1
    for item in after:
        known = indices.get(id(item), [])
        last = next((index for index in known if index > last), known[0] if known else last)
        yield (last, None) if known else (-1, item)


def decode_contents(before: Contents, keys: Sequence[Any], items: Sequence[tuple[int, Any]]) -> Contents:
    """The inverse of `encode_items`, built from this process's objects.

    An index may be out of range if another replica has changed the container meanwhile. Such items are skipped:
    conflicting changes are an error elsewhere.
    """
    own_keys = {(type(key), key): key for key in before.keys if _is_atomic_scalar(key)}
    own_items = {(type(item), item): item for item in before.items if _is_atomic_scalar(item)}
    found = [(index, item) for index, item in items if index < len(before.items)]
    decoded = (before.items[index] if index >= 0 else _own_object(item, own_items) for index, item in found)
    return Contents(tuple(_own_object(key, own_keys) for key in keys), tuple(decoded))


def _own_object(item: Any, own: dict[Any, Any]) -> Any:
    """This process's object for an equal scalar, so that comparisons by identity still hold."""
    return own.get((type(item), item), item) if _is_atomic_scalar(item) else item


def _is_atomic_scalar(item: Any) -> bool:
    return isinstance(item, SCALARS) and is_atomic(item)
