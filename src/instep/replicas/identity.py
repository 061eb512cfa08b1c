"""The identities of everything that some dictionaries hold, as one string of bytes.

Comparing two such strings takes a quarter of the time that comparing object by object does, and it is asked of every
attribute of every module at every call. It reads the addresses that a tuple keeps of its items; an interpreter that
keeps them otherwise is noticed once, on import, and compared object by object.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

Table = dict[Any, Any]

_HEADER = tuple.__basicsize__
_WORD = ctypes.sizeof(ctypes.c_void_p)


def _addresses(items: tuple[Any, ...]) -> bytes:
    return ctypes.string_at(id(items) + _HEADER, _WORD * len(items))


def _keeps_addresses() -> bool:
    """Whether this interpreter's tuples are laid out as assumed: a header, then the addresses of the items."""
    sample: tuple[Any, ...] = (object(), [], "text")
    expected = b"".join(id(item).to_bytes(_WORD, "little") for item in sample)
    table = dict(zip("abc", sample, strict=True))
    return _addresses(sample) == expected and tuple(map(id, gc.get_referents(table))) == tuple(map(id, sample))


FAST = _keeps_addresses()


class Holdings:
    """What some dictionaries held when this was made; holds on to it, so that no identity is used again."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._sizes = [len(table) for table in tables]
        self._items = tuple(chain.from_iterable(map(dict.values, tables)))
        self._held = tuple(gc.get_referents(*tables))
        self._bytes = _addresses(self._held) if FAST else b""

    def same(self) -> bool:
        """Whether every dictionary still holds the very same objects."""
        if FAST:
            return _addresses(tuple(gc.get_referents(*self._tables))) == self._bytes
        sizes = [len(table) for table in self._tables]
        return sizes == self._sizes and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._items))
