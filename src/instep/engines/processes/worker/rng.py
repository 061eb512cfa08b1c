"""Random number generators of a worker during a call, and which of them were used."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from itertools import compress
from typing import Any

import torch

from instep.engines.processes.messages import ForwardReply, ForwardRequest
from instep.engines.processes.worker.module import WorkerModule
from instep.runtime.rng import CallerRng, ReplicaRng, stream_seed, supports_thread_streams


class CallRng:
    """Where a replica draws from, as the process that asks for a forward has said."""

    def __init__(self, run: ForwardRequest, mirror: WorkerModule) -> None:
        self._request, self._module = run, mirror
        self._generator_pairs = mirror.generator_pairs(run)
        self._exclusive_states = [generator.get_state() for generator in run.exclusive_generators]
        if run.python_seed is not None:
            seed_python_rng(stream_seed(run.python_seed, run.replica_index))
        torch.default_generator.manual_seed(stream_seed(run.seed, run.replica_index))  # for whoever asks for it by name
        state = self._random_state = CallerRng([mirror.device] * run.num_replicas, out_of_process=True)
        state.cpu.set_base_seed(run.seed)
        if state.accelerator_seed is not state.cpu:
            state.accelerator_seed.set_base_seed(run.device_seed)
        self.streams = ReplicaRng(
            state,
            [self._generator_pairs] * run.num_replicas,
            per_thread=supports_thread_streams(),
            serialized=run.serialized,
        )

    def record_draws(self, ran: ForwardReply) -> None:
        """Say what was drawn from."""
        run, state = self._request, self._random_state
        ran.default_rng_used = not run.serialized and state.cpu.was_used()
        self.streams.advance()
        ran.device_rng_used = state.accelerator_seed is not state.cpu and state.accelerator_seed.streams_used
        ran.host_rng_used = state.cpu.streams_used or ran.default_rng_used
        if self._generator_pairs:
            self._record_generators(ran)
        if self._exclusive_states:
            pairs = enumerate(
                zip(
                    [generator.get_state() for generator in run.exclusive_generators],
                    self._exclusive_states,
                    strict=True,
                )
            )
            ran.exclusive_generator_states = {i: now for i, (now, then) in pairs if not now.equal(then)}

    def _record_generators(self, ran: ForwardReply) -> None:
        """Of the module's generators first, and then of those among the arguments."""
        drawn = [self._random_state.track(source).streams_used for source, _ in self._generator_pairs]
        split = len(drawn) - len(self._request.argument_generators)
        ran.argument_generators_used = [i for i, moved in enumerate(drawn[split:]) if moved]
        numbers = (
            self._module.generator_number(source) for source, _ in compress(self._generator_pairs[:split], drawn)
        )
        ran.module_generators_used = [number for number in numbers if number is not None]


_EAGER_CALLS = 3
"""Calls in which it is always seen whether something was drawn; after them, in those numbered 4, 8, 16 and so on."""


class PythonRngMonitor:
    """Whether the calls of one wrapper draw from Python's or NumPy's generators."""

    def __init__(self) -> None:
        self._calls = 0
        self._drawn = False

    def begin_call(self) -> int | None:
        """Before a call: a number that the generators' states decide; None where it is not needed."""
        self._calls += 1
        looks = self._drawn or self._calls <= _EAGER_CALLS or not self._calls & (self._calls - 1)
        return _hash_rng_state() if looks else None

    def end_call(self, before: int | None) -> None:
        """After the first replica has run: see whether it has drawn."""
        if not self._drawn and before is not None:
            self._drawn = _hash_rng_state() != before


def _hash_rng_state() -> int:
    numpy: Any = sys.modules.get("numpy.random")  # whoever has not imported it has not drawn
    states = random.getstate(), None if numpy is None else numpy.get_state(legacy=False)
    return int.from_bytes(hashlib.blake2b(pickle.dumps(states, 5), digest_size=8).digest(), "little")


def seed_python_rng(number: int) -> None:
    """In a worker: let draws begin at a number."""
    random.seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
