"""A generator of the caller's, and the streams of numbers that replicas draw instead."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from functools import lru_cache

import torch
from torch import Tensor


class Source:
    """A generator of the caller as it was when this was made, and the number that seeds the streams of a call."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.before = generator.get_state()
        self.drawn = False
        """Whether something was drawn from a stream that this seeds."""
        self.elsewhere = False
        """Whether numbers were drawn from what stands for the generator in another process."""
        self._advanced = False
        self._number: int | None = None
        self._ahead: int | None = None
        """The number that the state before decides, once it was asked for."""
        self._lock = threading.Lock()

    def seed(self, index: int) -> int:
        """The seed of one replica's stream."""
        with self._lock:
            if self._number is None:
                self._number = self._look_ahead()
        return seed_of(self._number, index)

    @property
    def number(self) -> int:
        """The number that would seed a stream now, for one that is drawn from elsewhere."""
        return self._look_ahead() if self._number is None else self._number

    def fix(self, number: int) -> None:
        """Seed streams by this number and no other."""
        self._number = number

    def _look_ahead(self) -> int:
        """A number that the state decides. It is read from memory: nothing that surrounds the draw must see it."""
        if self._ahead is None:
            self._ahead = _digest(state_bytes(self.before))
        return self._ahead

    def moved(self) -> bool:
        """Whether numbers were drawn from the generator itself."""
        return self.elsewhere or state_bytes(self.generator.get_state()) != state_bytes(self.before)

    def restore(self) -> None:
        """Put the generator back."""
        self.generator.set_state(self.before)
        self.drawn = self._advanced = self.elsewhere = False

    def settle(self) -> None:
        """Move the generator by one number if a stream was drawn from: once, however often this is called."""
        if self.drawn and not self._advanced:
            self._advanced = True
            twin = _twin(self.generator, self.generator.get_state())
            torch.empty((), dtype=torch.int64, device=twin.device).random_(generator=twin)
            self.generator.set_state(twin.get_state())

    def renew(self) -> None:
        """Start from the generator as it is now, if nothing was derived from it so far."""
        with self._lock:
            if self._number is None:
                now = self.generator.get_state()
                if state_bytes(now) != state_bytes(self.before):
                    self.before, self._ahead = now, None


def seed_of(number: int, index: int) -> int:
    """The seed of one replica's stream, of those that are seeded by a number."""
    return (number + index) % 2**63


@lru_cache(maxsize=4)
def _digest(state: bytes) -> int:
    """A number that a state decides; calls that draw nothing ask for the same one again and again."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


def state_bytes(state: Tensor) -> bytes:
    """A generator's state as it lies in memory: read without an operation, and quicker than one."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _twin(generator: torch.Generator, state: Tensor) -> torch.Generator:
    twin = torch.Generator(generator.device)
    twin.set_state(state)
    return twin


class Stream:
    """One replica's stream on the CPU: its generator comes to be when it is first asked for."""

    def __init__(self, source: Source, index: int) -> None:
        self._source = source
        self._index = index
        self._generator: torch.Generator | None = None

    def generator(self) -> torch.Generator:
        if self._generator is None:
            self._generator = self._new()
        return self._generator

    def _new(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._source.seed(self._index))

    def note(self) -> None:
        """Tell the source whether something was drawn."""
        if self._generator is None:
            return
        if state_bytes(self._generator.get_state()) != state_bytes(self._new().get_state()):
            self._source.drawn = True
