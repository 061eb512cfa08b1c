"""Python's and NumPy's random numbers in workers, which have generators of their own.

They are seeded at each call by what the caller's stand at. Reading those takes a tenth of a millisecond, so it is done
for a `forward` that draws from them: that is seen on the first replica, which draws from the caller's, in the first
calls and in ever fewer of the later ones.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from typing import Any

_LOOKED_AT = 3
"""Calls in which it is always seen whether something was drawn; after them, in those numbered 4, 8, 16 and so on."""


class Dice:
    """Whether the calls of one wrapper draw from Python's or NumPy's generators."""

    def __init__(self) -> None:
        self._calls = 0
        self._drawn = False

    def read(self) -> int | None:
        """Before a call: a number that the generators' states decide; None where it is not needed."""
        self._calls += 1
        looks = self._drawn or self._calls <= _LOOKED_AT or not self._calls & (self._calls - 1)
        return _number() if looks else None

    def note(self, before: int | None) -> None:
        """After the first replica has run: see whether it has drawn."""
        if not self._drawn and before is not None:
            self._drawn = _number() != before


def _number() -> int:
    numpy: Any = sys.modules.get("numpy.random")  # whoever has not imported it has not drawn
    states = random.getstate(), None if numpy is None else numpy.get_state(legacy=False)
    return int.from_bytes(hashlib.blake2b(pickle.dumps(states, 5), digest_size=8).digest(), "little")


def seed(number: int) -> None:
    """In a worker: let draws begin at a number."""
    random.seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
