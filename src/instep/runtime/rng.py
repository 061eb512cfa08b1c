"""The caller's generators during a call, and the random streams that replicas draw from.

Every replica has its own stream, seeded by a number derived from the state of the caller's generator and by the
replica's index. A call in which replicas draw advances the caller's generator by one number, whatever the number of
replicas; a call that draws nothing does not advance it.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from instep.runtime.ambient import register_thread_local
from instep.runtime.locks import ForkSafeLock
from instep.runtime.modes import CombinedContext
from instep.runtime.torch_private import (
    is_rng_dispatch_enabled,
    register_rng_kernels,
    replace_default_generator,
    set_rng_dispatch,
)

_seed_lock = ForkSafeLock()


class CallerGenerator:
    """A generator of the caller, its state at the start of a call, and the seed derived from it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.initial_state, self._initial_bytes = generator.get_state(), b""
        self.streams_used = False
        """Whether a stream that it seeds was drawn from."""
        self.used_remotely = False
        """Whether its counterpart in another process was drawn from."""
        self._was_used: bool | None = None
        """Whether it was drawn from in this process, once `record_use` has looked."""
        self._advanced = False
        self._base_seed: int | None = None
        self._derived_seed: int | None = None
        """The base seed that follows from `initial_state`, once it was asked for."""

    def set_initial_state(self, state: Tensor) -> None:
        """Take a state as the initial one."""
        self.initial_state, self._initial_bytes = state, b""

    def _read_initial(self) -> bytes:
        self._initial_bytes = self._initial_bytes or state_bytes(self.initial_state)
        return self._initial_bytes

    def seed(self, index: int) -> int:
        """The seed of one replica's stream."""
        with _seed_lock:
            if self._base_seed is None:
                self._base_seed = self._derive_seed()
        return stream_seed(self._base_seed, index)

    @property
    def base_seed(self) -> int:
        """The base seed, for streams in other processes."""
        return self._derive_seed() if self._base_seed is None else self._base_seed

    def set_base_seed(self, number: int) -> None:
        """Use this base seed instead of a derived one."""
        self._base_seed = number

    def _derive_seed(self) -> int:
        if self._derived_seed is None:
            self._derived_seed = _hash_state(self._read_initial())
        return self._derived_seed

    def was_used(self) -> bool:
        """Whether the generator itself was drawn from."""
        return self.used_remotely or (self._find_use() if self._was_used is None else self._was_used)

    def _find_use(self) -> bool:
        return state_bytes(self.generator.get_state()) != self._read_initial()

    def record_use(self) -> bool:
        """Return `was_used()`, and keep it: nothing in this process draws from the generator in this call any more."""
        self._was_used = self._find_use()
        return self.was_used()

    def restore(self) -> None:
        """Restore the initial state."""
        self.generator.set_state(self.initial_state)
        self.streams_used = self._advanced = self.used_remotely = False
        self._was_used = None

    def advance(self) -> None:
        """Advance the generator by one number if a stream was drawn from; at most once."""
        if self.streams_used and not self._advanced:
            self._advanced = True
            clone = torch.Generator(self.generator.device)
            clone.set_state(self.generator.get_state())
            torch.empty((), dtype=torch.int64, device=clone.device).random_(generator=clone)
            self.generator.set_state(clone.get_state())

    def refresh(self) -> None:
        """Take the current state as the initial state, unless a seed was derived already."""
        with _seed_lock:
            if self._base_seed is None:
                self.set_initial_state(self.generator.get_state())
                self._derived_seed = None


def stream_seed(number: int, index: int) -> int:
    """The seed of one replica's stream."""
    return (number + index) % 2**63


@lru_cache(maxsize=4)
def _hash_state(state: bytes) -> int:
    """Hash a state. Cached: calls that draw nothing hash the same state."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


def state_bytes(state: Tensor) -> bytes:
    """A generator's state as bytes, read without a torch op: modes around the call must not see it."""
    return ctypes.string_at(state.data_ptr(), state.numel())


class RandomStream:
    """One replica's random stream on the CPU. Its generator is created lazily."""

    def __init__(self, source: CallerGenerator, index: int) -> None:
        self._source = source
        self._index = index
        self._generator: torch.Generator | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its generator exists."""
        return self._generator is not None

    def generator(self) -> torch.Generator:
        if self._generator is None:
            self._generator = self._new_generator()
        return self._generator

    def _new_generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._source.seed(self._index))

    def report_use(self) -> None:
        """Set `streams_used` of the caller's generator if something was drawn."""
        if self._generator is None:
            return
        if state_bytes(self._generator.get_state()) != state_bytes(self._new_generator().get_state()):
            self._source.streams_used = True


GeneratorPairs = list[tuple[torch.Generator, torch.Generator]]
"""The caller's generators, each with the replica's counterpart."""


class _ThreadLocal(threading.local):
    stream: RandomStream | None = None
    serialized = False


_thread_local = _ThreadLocal()
_setup_lock = threading.RLock()
_joint_backwards: list[ReplicaRng] = []
"""The calls whose replicas run in one joint backward, the latest last."""


ThreadRngState = tuple[RandomStream | None, bool, bool]


def thread_rng_state() -> ThreadRngState:
    """The CPU random state of this thread."""
    return _thread_local.stream, _thread_local.serialized, is_rng_dispatch_enabled()


def set_thread_rng_state(state: ThreadRngState) -> None:
    """Restore what `thread_rng_state` returned."""
    _thread_local.stream, _thread_local.serialized, dispatch_enabled = state
    set_rng_dispatch(dispatch_enabled)


register_thread_local(thread_rng_state, set_thread_rng_state)


class _UseStream:
    """Context manager: this thread draws from a stream, or without one from the default generator."""

    __slots__ = ("_outer", "_stream")

    def __init__(self, stream: RandomStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._outer = thread_rng_state()
        set_rng_dispatch(True)
        _thread_local.stream, _thread_local.serialized = self._stream, self._stream is None

    def __exit__(self, *_: object) -> None:
        set_thread_rng_state(self._outer)


class ReplicaRng:
    """The random streams of one call's replicas.

    With `per_thread`, draws on the CPU come from a generator of the replica's thread. If replicas are `serialized`, the
    caller's generator is set to the replica's seed while it runs. So are the generators of accelerators, if no other
    replica draws from them meanwhile.
    """

    def __init__(
        self, caller: CallerRng, generator_pairs: Sequence[GeneratorPairs], *, per_thread: bool, serialized: bool
    ) -> None:
        self.serialized = serialized
        """Whether replicas run one after another."""
        self.caller = caller
        self._has_streams = per_thread
        self._per_thread = per_thread and not serialized
        self._streams = [RandomStream(caller.cpu, index) for index in range(len(generator_pairs))]
        self.generator_pairs = [list(pairs) for pairs in generator_pairs]
        self._autograd_streams: dict[int, RandomStream] = {}
        self._caller_thread = self._joint_index = 0

    @property
    def is_untouched(self) -> bool:
        """Whether no stream has begun, so that another call with the same seeds can use them."""
        return self.is_untouched_on_host and not self.caller.device_streams_used

    @property
    def is_untouched_on_host(self) -> bool:
        """Whether no stream on the CPU has begun."""
        started = any(stream.has_begun for stream in self._streams)
        return not (started or self._autograd_streams or self.caller.cpu.streams_used)

    def replace_generators(self, shards: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Replace generators among the arguments that several replicas share by one for each replica."""
        if all(isinstance(value, Tensor) for value in shards[0]):
            return shards
        counts = Counter(key for values in shards for key in {id(g) for g in generators_in(values)})
        shared = {key for key, count in counts.items() if count > 1}
        if not shared:
            return shards
        return [list(self._replace_shared(values, shared, index)) for index, values in enumerate(shards)]

    def _replace_shared(self, value: Any, shared: Collection[int], index: int) -> Any:
        if isinstance(value, torch.Generator) and id(value) in shared:
            counterpart = next((other for source, other in self.generator_pairs[index] if source is value), None)
            if counterpart is None:
                counterpart = replica_generator(value, self.caller.devices[index])
                self.generator_pairs[index].append((value, counterpart))
            return counterpart
        if type(value) is dict:
            return {key: self._replace_shared(item, shared, index) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._replace_shared(item, shared, index) for item in value)
        return value

    def forward_context(self, index: int) -> AbstractContextManager[None]:
        """The context of one replica's forward, in its thread."""
        if self._per_thread and not self.generator_pairs[index] and not self.caller.accelerators:
            return self.backward_context(index)
        return self._seeded_context(index)

    def _seeded_context(self, index: int) -> AbstractContextManager[Any]:
        contexts = []
        for original, generator in self.generator_pairs[index]:
            if generator is not original and generator is not default_generator(generator.device):
                contexts.append(_SeededGenerator(generator, self.caller.track(original), index))
        device = self.caller.devices[index]
        if device in self.caller.accelerators and (self.serialized or not self.caller.is_shared(device)):
            source = self.caller.accelerators[device]
            contexts.append(
                _SeededGenerator(source.generator, self.caller.accelerator_seed, index, restore=source.initial_state)
            )
        if self.serialized:
            cpu = self.caller.cpu
            contexts.append(_SeededGenerator(cpu.generator, cpu, index, restore=cpu.initial_state))
        return CombinedContext([*contexts, self.backward_context(index)])

    def suspend(self) -> Callable[[], None]:
        """Save the generators while another replica runs; returns a function that restores them."""
        sources = (self.caller.cpu, *self.caller.accelerators.values())
        states = [(source.generator, source.generator.get_state()) for source in sources]

        def resume() -> None:
            for generator, state in states:
                generator.set_state(state)

        return resume

    def backward_context(self, index: int) -> AbstractContextManager[None]:
        """The context of one replica's backward on the CPU; its stream continues from forward."""
        if not self._has_streams:
            return nullcontext()
        return _UseStream(self._streams[index] if self._per_thread else None)

    @contextmanager
    def joint_backward_context(self, index: int = 0) -> Iterator[None]:
        """The context of one backward for all replicas: on the CPU, each thread draws from its own stream.

        Autograd's device threads run concurrently, and set the RNG state when they recompute checkpointed regions.
        A replica with its own backward passes its index.
        """
        if not self._per_thread:
            yield
            return
        self._caller_thread, self._joint_index = threading.get_ident(), index
        _joint_backwards.append(self)
        outer = is_rng_dispatch_enabled()
        set_rng_dispatch(True)
        try:
            yield
        finally:
            set_rng_dispatch(outer)
            _joint_backwards.remove(self)

    def stream_for_thread(self) -> RandomStream:
        """This thread's stream in a joint backward."""
        slot = 0 if threading.get_ident() == self._caller_thread else 1 + torch.accelerator.current_device_index()
        number = len(self._streams) * (1 + slot) + self._joint_index
        return self._autograd_streams.setdefault(slot, RandomStream(self.caller.cpu, number))

    def refresh(self) -> None:
        """Before a backward: seed streams that are first used there from the caller's current state."""
        self.caller.cpu.refresh()

    def advance(self) -> None:
        """Advance the caller's generators by one number each, if something was drawn."""
        self.report_use()
        self.caller.advance()

    def report_use(self) -> None:
        """Set `streams_used` of the caller's generator if something was drawn from a stream on the CPU."""
        for stream in (*self._streams, *self._autograd_streams.values()):
            stream.report_use()


class _SeededGenerator:
    """Context manager: sets a generator to a replica's seed, and restores it on exit if it is the caller's.

    Not a `@contextmanager` generator: one that an interruption leaves suspended runs its `finally` when it is garbage
    collected, and would then restore outdated state.
    """

    def __init__(
        self, generator: torch.Generator, source: CallerGenerator, index: int, restore: Tensor | None = None
    ) -> None:
        self._generator, self._source, self._index, self._restore = generator, source, index, restore

    def __enter__(self) -> None:
        self._generator.manual_seed(self._source.seed(self._index))
        self._start = self._generator.get_state()

    def __exit__(self, *_: object) -> None:
        if state_bytes(self._generator.get_state()) != state_bytes(self._start):
            self._source.streams_used = True
        if self._restore is not None:
            self._generator.set_state(self._restore)


class SerializationPolicy:
    """Decides whether a wrapper's replicas run one after another, from how they draw.

    They have to if they draw from a shared generator in a way that per-thread streams do not cover. Code also does so
    while it is being compiled, so a single call does not decide.
    """

    def __init__(self) -> None:
        self.serialize = False
        self._shared_last_call = False

    def record(self, used: bool) -> None:
        """Record whether replicas drew from a shared generator in a concurrent call."""
        self.serialize = self.serialize or (used and (self._shared_last_call or not supports_thread_streams()))
        self._shared_last_call = used


class CallerRng:
    """The caller's generators and their states at the start of a call on these devices."""

    def __init__(self, devices: Sequence[torch.device], *, out_of_process: bool = False) -> None:
        """`out_of_process` means that only the first replica runs in this process."""
        self.devices = devices
        self._out_of_process = out_of_process
        self.cpu = CallerGenerator(torch.default_generator)
        local_devices = devices[:1] if out_of_process else devices
        self.accelerators = {
            d: CallerGenerator(g) for d in local_devices if d.type != "cpu" and (g := default_generator(d)) is not None
        }
        self.accelerator_seed = self.accelerators.get(self.devices[0], self.cpu) if self.accelerators else self.cpu
        """The generator that seeds the streams of accelerators."""
        self._tracked: dict[int, CallerGenerator] = {}

    @property
    def device_streams_used(self) -> bool:
        """Whether a stream on an accelerator was drawn from."""
        return self.accelerator_seed is not self.cpu and self.accelerator_seed.streams_used

    def track(self, generator: torch.Generator) -> CallerGenerator:
        """Track a generator of the module or of the arguments; `restore` restores it too."""
        with _seed_lock:
            if id(generator) not in self._tracked:
                self._tracked[id(generator)] = CallerGenerator(generator)
            return self._tracked[id(generator)]

    def is_shared(self, device: torch.device) -> bool:
        """Whether several replicas of this process use a device."""
        return not self._out_of_process and self.devices.count(device) > 1

    def is_shared_generator_used(self) -> bool:
        """Whether a generator that several replicas share was drawn from."""
        return self.cpu.was_used() or any(
            source.was_used() for device, source in self.accelerators.items() if self.is_shared(device)
        )

    def record_remote_use(self, *, host: bool, device: bool = False, default: bool = False) -> None:
        """Record what a replica in another process drew: from its streams, or directly from the default generator."""
        if host:
            self.cpu.streams_used = True
            self.cpu.seed(0)
        if device:
            self.accelerator_seed.streams_used = True
            self.accelerator_seed.seed(0)
        self.cpu.used_remotely = self.cpu.used_remotely or default

    def advance(self) -> None:
        for source in (self.cpu, *self.accelerators.values(), *self._tracked.values()):
            source.advance()

    def restore(self) -> None:
        """Restore every generator."""
        for source in (self.cpu, *self.accelerators.values(), *self._tracked.values()):
            source.restore()


def generators_in(value: Any) -> Iterator[torch.Generator]:
    """Yield the generators in an argument."""
    if isinstance(value, torch.Generator):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from generators_in(item)


def replica_generator(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A replica's counterpart of a caller's generator; a default generator's is a default generator."""
    target = device if generator.device.type == device.type else generator.device
    if generator is default_generator(generator.device):
        return default_generator(target) or generator
    return torch.Generator(target)


def default_generator(device: torch.device) -> torch.Generator | None:
    """The default generator of a device; None if its backend does not expose it."""
    if device.type == "cpu":
        return torch.default_generator
    backend: Any = torch.get_device_module(device)
    if hasattr(backend, "init"):
        backend.init()
    generators: Any = getattr(backend, "default_generators", ())
    return generators[device.index or 0] if generators else None


class _DefaultGeneratorProxy:
    """The generator behind `torch.get_rng_state`, `torch.manual_seed` etc.: in a replica's thread, its stream.

    Checkpointing saves and sets the RNG state through these functions.
    """

    state_reads = 0
    """How often `get_state` was read."""

    def __getattr__(self, name: str) -> Any:
        self.state_reads += name == "get_state"
        return getattr(_current_generator() or torch.default_generator, name)


_proxy = _DefaultGeneratorProxy()


def rng_state_reads() -> int:
    """How often the state of the CPU's default generator was read; code that reads it may set it again."""
    supports_thread_streams()  # installs the proxy
    return _proxy.state_reads


def _current_generator() -> torch.Generator | None:
    """The generator of this thread's stream; None if it has none."""
    stream = _thread_local.stream
    if stream is None and _joint_backwards and is_rng_dispatch_enabled() and not _thread_local.serialized:
        stream = _joint_backwards[-1].stream_for_thread()
    return None if stream is None else stream.generator()


def supports_thread_streams() -> bool:
    """Whether threads can have their own CPU streams. If not, replicas that draw run one at a time."""
    with _setup_lock:
        return _install_rng_kernels()


@cache
def _install_rng_kernels() -> bool:
    try:
        register_rng_kernels(_current_generator)
        return _check_thread_streams()
    except (AttributeError, AssertionError, KeyError, RuntimeError, TypeError, ValueError):
        return False


def _check_thread_streams() -> bool:
    source = CallerGenerator(torch.default_generator)
    stream = RandomStream(source, 0)
    with _UseStream(stream):
        draws = torch.nn.functional.dropout(torch.ones(64, device="cpu")), torch.randperm(64, device="cpu")
    generator = torch.Generator().manual_seed(source.seed(0))
    mask = torch.empty(64, device="cpu").bernoulli_(0.5, generator=generator) * 2
    order = torch.randperm(64, device="cpu", generator=generator)
    equal = torch.equal(draws[0], mask) and torch.equal(draws[1], order)
    equal = equal and torch.equal(generator.get_state(), stream.generator().get_state())
    if source.was_used() or not equal:
        source.restore()
        return False
    replace_default_generator(_proxy)
    return True
