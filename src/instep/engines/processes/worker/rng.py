"""Random number generators of a worker during a call, and which of them were used."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch

from instep.engines.processes.messages import ForwardReply, ForwardRequest
from instep.engines.processes.worker.module import WorkerModule
from instep.runtime.backoff import NEVER, Backoff
from instep.runtime.rng import CallerRng, ReplicaRng, stream_seed, supports_thread_streams


class WorkerCallRng:
    """The random number generators of one forward, seeded as the request says."""

    def __init__(self, request: ForwardRequest, module: WorkerModule) -> None:
        self._request, self._module = request, module
        self._generator_pairs = module.generator_pairs(request)
        self._exclusive_states = [generator.get_state() for generator in request.exclusive_generators]
        if request.python_seed is not None:
            seed_python_rng(stream_seed(request.python_seed, request.replica_index))
        # for code that uses the default generator directly
        torch.default_generator.manual_seed(stream_seed(request.seed, request.replica_index))
        caller_rng = self._caller_rng = CallerRng([module.device] * request.num_replicas, out_of_process=True)
        caller_rng.cpu.set_base_seed(request.seed)
        if caller_rng.accelerator_seed is not caller_rng.cpu:
            caller_rng.accelerator_seed.set_base_seed(request.device_seed)
        self.rng = ReplicaRng(
            caller_rng,
            [self._generator_pairs] * request.num_replicas,
            per_thread=supports_thread_streams(),
            serialized=request.serialized,
        )

    def record_draws(self, reply: ForwardReply) -> None:
        """Report which generators were used."""
        request, caller_rng = self._request, self._caller_rng
        reply.default_rng_used = not request.serialized and caller_rng.cpu.was_used()
        self.rng.report_use()
        reply.device_rng_used = caller_rng.device_streams_used
        reply.host_rng_used = caller_rng.cpu.streams_used or reply.default_rng_used
        if self._generator_pairs:
            self._record_generators(reply)
        for index, before in enumerate(self._exclusive_states):
            state = request.exclusive_generators[index].get_state()
            if not state.equal(before):
                reply.exclusive_generator_states[index] = state

    def _record_generators(self, reply: ForwardReply) -> None:
        """Report the generators of the module and of the arguments, in this order in `_generator_pairs`."""
        used = [self._caller_rng.track(source).streams_used for source, _ in self._generator_pairs]
        split = len(used) - len(self._request.argument_generators)
        reply.argument_generators_used = [i for i, was_used in enumerate(used[split:]) if was_used]
        numbers = (self._module.generator_number(source) for source, _ in compress(self._generator_pairs[:split], used))
        reply.module_generators_used = [number for number in numbers if number is not None]


def backward_context(rng: ReplicaRng, device: torch.device, index: int) -> AbstractContextManager[None]:
    """The context of the backward of a replica on a device. On accelerators a thread of autograd may run it."""
    return rng.backward_context(index) if device.type == "cpu" else rng.joint_backward_context(index)


class PythonRngMonitor:
    """Detects whether calls of a wrapper use Python's or NumPy's global generators.

    Workers seed theirs from the caller's, and hashing the state costs about 0.1 ms. The state is therefore compared
    before and after the first replica, which uses the caller's generators, at ever fewer calls.
    """

    def __init__(self) -> None:
        self._checks = Backoff(limit=NEVER, eager=4)
        self._used = False

    def begin_call(self) -> int | None:
        """Before a call: a seed computed from the generators' states; None if it is not needed."""
        self._checks.advance()
        if not self._used and not self._checks.is_due:
            return None
        self._checks.record()
        return _hash_rng_state()

    def end_call(self, before: int | None) -> None:
        """After the first replica has run: check whether it used the generators."""
        if not self._used and before is not None:
            self._used = _hash_rng_state() != before


def _hash_rng_state() -> int:
    numpy: Any = sys.modules.get("numpy.random")  # a module that is not imported is not used
    states = random.getstate(), None if numpy is None else numpy.get_state(legacy=False)
    return int.from_bytes(hashlib.blake2b(pickle.dumps(states, 5), digest_size=8).digest(), "little")


def seed_python_rng(seed: int) -> None:
    """Seed the global generators of Python and NumPy, in a worker."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
