"""Plain values: scalars, plain tensors, and lists, tuples and dictionaries of them. They need no pickler.

In an encoded value each tensor is replaced by its index, as a complex number, a type that plain values lack.
"""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from instep.structure.shapes import is_plain_tensor

_SCALARS = frozenset({type(None), bool, int, float, str})
_MAX_DEPTH, _MAX_LENGTH, _MAX_OBJECTS = 16, 64, 64
"""Maximum nesting, entries of one container, and number of containers and tensors. Beyond them, pickling is faster."""


class _NotPlain(Exception):
    """A value has to be pickled."""


def encode_plain(value: Any) -> tuple[Any, list[Tensor]] | None:
    """A plain value with its tensors replaced by their indices, and the tensors; None if it is not plain."""
    tensors: list[Tensor] = []
    try:
        return _encode(value, tensors, {}, 0), tensors
    except _NotPlain:
        return None


def encode_plain_fields(
    fields: Iterable[tuple[Any, str]], searched: Collection[str]
) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Like `encode_plain`, for the fields of a message, with their names.

    Only the fields in `searched` may hold tensors. The others must be values that `marshal` can write.
    """
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}
    try:
        encoded = [_encode(value, tensors, seen, 1) if name in searched else value for value, name in fields]
        return tuple(encoded), tensors
    except _NotPlain:
        return None


def _encode(value: Any, tensors: list[Tensor], seen: dict[int, Any], depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is Tensor:
        index = seen.get(id(value))
        if index is None:
            if not is_data_only(value):
                raise _NotPlain
            index = seen[id(value)] = complex(len(tensors))
            tensors.append(value)
        return index
    if kind is tuple:
        if not value:
            return value
        seen.setdefault(id(value))
    elif (kind is not list and kind is not dict) or id(value) in seen:  # marshal would make copies of a shared list
        raise _NotPlain
    else:
        seen[id(value)] = None
        if not value:
            return kind()
    if len(value) > _MAX_LENGTH or len(seen) > _MAX_OBJECTS or depth > _MAX_DEPTH:
        raise _NotPlain
    below = depth + 1
    if kind is dict:
        if not all(type(key) in _SCALARS for key in value):
            raise _NotPlain
        return {
            key: item if type(item) in _SCALARS else _encode(item, tensors, seen, below) for key, item in value.items()
        }
    items = [item if type(item) in _SCALARS else _encode(item, tensors, seen, below) for item in value]
    return items if kind is list else tuple(items)


def is_data_only(tensor: Tensor) -> bool:
    """Whether a tensor is sent as its data alone: it is of torch's own class, strided and without attributes."""
    return is_plain_tensor(tensor) and not (tensor.__dict__ or tensor.is_quantized or tensor.is_meta)


def is_trivial(value: Any) -> bool:
    """Whether a value holds no other values."""
    return type(value) in _SCALARS or (not value and type(value) in (tuple, list, dict))


def decode_plain(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Inverse of `encode_plain`. The containers are new ones."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is complex:
        return tensors[int(value.real)]
    if kind is dict:
        return {key: item if type(item) in _SCALARS else decode_plain(item, tensors) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([item if type(item) in _SCALARS else decode_plain(item, tensors) for item in value])
    return value


def dump_plain(value: Any) -> bytes:
    """Encode as bytes that begin differently from a pickle."""
    return b"\0" + marshal.dumps(value)


def load_plain(body: bytes) -> Any | None:
    """Inverse of `dump_plain`; None for a pickle."""
    return None if body[:1] != b"\0" else marshal.loads(memoryview(body)[1:])
