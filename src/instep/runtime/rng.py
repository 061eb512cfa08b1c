"""The caller's generators during a call, and the random streams that replicas draw from."""

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
from instep.runtime.modes import CombinedContext
from instep.runtime.torch_private import (
    is_rng_dispatch_enabled,
    register_rng_kernels,
    replace_default_generator,
    set_rng_dispatch,
)


class CallerGenerator:
    """A generator of the caller as it was when this was made, and the number that seeds the streams of a call."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.initial_state = generator.get_state()
        self.streams_used = False
        """Whether something was drawn from a stream that this seeds."""
        self.used_remotely = False
        """Whether numbers were drawn from what stands for the generator in another process."""
        self._advanced = False
        self._base_seed: int | None = None
        self._derived_seed: int | None = None
        """The number that the state before decides, once it was asked for."""
        self._lock = threading.Lock()

    def seed(self, index: int) -> int:
        """The seed of one replica's stream."""
        with self._lock:
            if self._base_seed is None:
                self._base_seed = self._derive_seed()
        return stream_seed(self._base_seed, index)

    @property
    def base_seed(self) -> int:
        """The number that would seed a stream now, for one that is drawn from elsewhere."""
        return self._derive_seed() if self._base_seed is None else self._base_seed

    def set_base_seed(self, number: int) -> None:
        """Seed streams by this number and no other."""
        self._base_seed = number

    def _derive_seed(self) -> int:
        """A number that the state decides. It is read from memory: nothing that surrounds the draw must see it."""
        if self._derived_seed is None:
            self._derived_seed = _hash_state(state_bytes(self.initial_state))
        return self._derived_seed

    def was_used(self) -> bool:
        """Whether numbers were drawn from the generator itself."""
        return self.used_remotely or state_bytes(self.generator.get_state()) != state_bytes(self.initial_state)

    def restore(self) -> None:
        """Put the generator back."""
        self.generator.set_state(self.initial_state)
        self.streams_used = self._advanced = self.used_remotely = False

    def advance(self) -> None:
        """Move the generator by one number if a stream was drawn from: once, however often this is called."""
        if self.streams_used and not self._advanced:
            self._advanced = True
            twin = _clone_generator(self.generator, self.generator.get_state())
            torch.empty((), dtype=torch.int64, device=twin.device).random_(generator=twin)
            self.generator.set_state(twin.get_state())

    def refresh(self) -> None:
        """Start from the generator as it is now, if nothing was derived from it so far."""
        with self._lock:
            if self._base_seed is None:
                now = self.generator.get_state()
                if state_bytes(now) != state_bytes(self.initial_state):
                    self.initial_state, self._derived_seed = now, None


def stream_seed(number: int, index: int) -> int:
    """The seed of one replica's stream, of those that are seeded by a number."""
    return (number + index) % 2**63


@lru_cache(maxsize=4)
def _hash_state(state: bytes) -> int:
    """A number that a state decides; calls that draw nothing ask for the same one again and again."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


def state_bytes(state: Tensor) -> bytes:
    """A generator's state as it lies in memory: read without an operation, and quicker than one."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _clone_generator(generator: torch.Generator, state: Tensor) -> torch.Generator:
    twin = torch.Generator(generator.device)
    twin.set_state(state)
    return twin


class RandomStream:
    """One replica's stream on the CPU: its generator comes to be when it is first asked for."""

    def __init__(self, source: CallerGenerator, index: int) -> None:
        self._source = source
        self._index = index
        self._generator: torch.Generator | None = None

    def generator(self) -> torch.Generator:
        if self._generator is None:
            self._generator = self._new_generator()
        return self._generator

    def _new_generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._source.seed(self._index))

    def report_use(self) -> None:
        """Tell the source whether something was drawn."""
        if self._generator is None:
            return
        if state_bytes(self._generator.get_state()) != state_bytes(self._new_generator().get_state()):
            self._source.streams_used = True


GeneratorPairs = list[tuple[torch.Generator, torch.Generator]]
"""Generators of the caller, each with what a replica has in its place."""

_thread_local = threading.local()
_setup_lock = threading.RLock()
_joint_backwards: list[ReplicaRng] = []
"""The calls whose replicas are in one backward together, the latest last."""


ThreadRngState = tuple[RandomStream | None, bool, bool]


def thread_rng_state() -> ThreadRngState:
    """How this thread draws on the CPU."""
    return getattr(_thread_local, "stream", None), getattr(_thread_local, "in_turn", False), is_rng_dispatch_enabled()


def set_thread_rng_state(how: ThreadRngState) -> None:
    """Let this thread draw as it did."""
    _thread_local.stream, _thread_local.in_turn, routed = how
    set_rng_dispatch(routed)


register_thread_local(thread_rng_state, set_thread_rng_state)


class _UseStream:
    """A thread that draws from a stream while inside; without one, from the default generator in a replica's turn."""

    __slots__ = ("_outer", "_stream")

    def __init__(self, stream: RandomStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._outer = thread_rng_state()
        set_rng_dispatch(True)
        _thread_local.stream, _thread_local.in_turn = self._stream, self._stream is None

    def __exit__(self, *_: object) -> None:
        set_thread_rng_state(self._outer)


class ReplicaRng:
    """Where the replicas of one call draw from.

    With `own`, draws on the CPU come from a generator of the replica's thread. Otherwise, where replicas run `in_turn`,
    the caller's generator stands at the replica's seed while it runs. So do the generators of accelerators, if no other
    replica draws from them meanwhile.
    """

    def __init__(
        self, caller: CallerRng, generator_pairs: Sequence[GeneratorPairs], *, per_thread: bool, serialized: bool
    ) -> None:
        self.serialized = serialized
        """Whether replicas run one after another."""
        self.caller = caller
        self._can_route = per_thread
        self._per_thread = per_thread and not serialized
        self._streams = [RandomStream(caller.cpu, index) for index in range(len(generator_pairs))]
        self.generator_pairs = [list(pairs) for pairs in generator_pairs]
        self._autograd_streams: dict[int, RandomStream] = {}
        self._caller_thread = self._joint_index = 0

    def replace_generators(self, shards: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """The arguments of each replica, with a generator of its own for each that several of them were given."""
        if all(isinstance(value, Tensor) for value in shards[0]) or not _has_generators(shards):
            return shards
        counts = Counter(key for values in shards for key in {id(g) for g in generators_in(values)})
        shared = {key for key, count in counts.items() if count > 1}
        if not shared:
            return shards
        return [list(self._replace_shared(values, shared, index)) for index, values in enumerate(shards)]

    def _replace_shared(self, value: Any, shared: Collection[int], index: int) -> Any:
        if isinstance(value, torch.Generator) and id(value) in shared:
            known = next((made for source, made in self.generator_pairs[index] if source is value), None)
            if known is None:
                known = replica_generator(value, self.caller.devices[index])
                self.generator_pairs[index].append((value, known))
            return known
        if type(value) is dict:
            return {key: self._replace_shared(item, shared, index) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._replace_shared(item, shared, index) for item in value)
        return value

    def forward_context(self, index: int) -> AbstractContextManager[None]:
        """Around one replica's part of a forward, in the thread that runs it."""
        if self._per_thread and not self.generator_pairs[index] and not self.caller.accelerators:
            return self.backward_context(index)
        return self._seeded_context(index)

    def _seeded_context(self, index: int) -> AbstractContextManager[Any]:
        standing = []
        for source, generator in self.generator_pairs[index]:
            if generator is not source and generator is not _default_generator(generator.device):
                standing.append(_SeededGenerator(generator, self.caller.track(source), index))
        device = self.caller.devices[index]
        if device in self.caller.accelerators and (self.serialized or not self.caller.is_shared(device)):
            other = self.caller.accelerators[device]
            standing.append(
                _SeededGenerator(other.generator, self.caller.accelerator_seed, index, restore=other.initial_state)
            )
        if self.serialized:
            host = self.caller.cpu
            standing.append(_SeededGenerator(host.generator, host, index, restore=host.initial_state))
        return CombinedContext([*standing, self.backward_context(index)])

    def suspend(self) -> Callable[[], None]:
        """Let another replica have its turn in the middle of one's own; call what this returns to go on."""
        sources = (self.caller.cpu, *self.caller.accelerators.values())
        states = [(source.generator, source.generator.get_state()) for source in sources]

        def go_on() -> None:
            for generator, state in states:
                generator.set_state(state)

        return go_on

    def backward_context(self, index: int) -> AbstractContextManager[None]:
        """Around one replica's part of a backward on the CPU: its stream goes on where forward left it."""
        if not self._can_route:
            return nullcontext()
        return _UseStream(self._streams[index] if self._per_thread else None)

    @contextmanager
    def joint_backward_context(self, index: int = 0) -> Iterator[None]:
        """Around one backward for all replicas: on the CPU, each thread that takes part draws from a stream of its own.

        Autograd's device threads work at the same time, and recompute checkpointed regions by setting the state. A
        replica that has a backward of its own gives its index.
        """
        if not self._per_thread:
            yield
            return
        self._caller_thread, self._joint_index = threading.get_ident(), index
        _joint_backwards.append(self)
        outer = set_rng_dispatch(True)
        try:
            yield
        finally:
            set_rng_dispatch(outer)
            _joint_backwards.remove(self)

    def stream_for_thread(self) -> RandomStream:
        """The stream of a thread that takes part in a joint backward."""
        place = 0 if threading.get_ident() == self._caller_thread else 1 + torch.accelerator.current_device_index()
        number = len(self._streams) * (1 + place) + self._joint_index
        return self._autograd_streams.setdefault(place, RandomStream(self.caller.cpu, number))

    def refresh(self) -> None:
        """Before a backward: what first draws there is seeded by the caller's generator as it is then."""
        self.caller.cpu.refresh()

    def advance(self) -> None:
        """Move the caller's generators by one number each, where something was drawn."""
        for stream in (*self._streams, *self._autograd_streams.values()):
            stream.report_use()
        self.caller.advance()


class _SeededGenerator:
    """A generator that stands at a replica's seed inside, and is put back on the way out if it is the caller's.

    Not made of a generator function, here or below: one that an interruption leaves open ends when it is cleared away,
    and would put back then what has moved on since.
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
    """Whether the replicas of one wrapper run one after another, learnt from how they draw.

    They need to where they draw from one generator by a way that gives no stream to a thread. Code draws so while it is
    being compiled, so that one call alone does not decide.
    """

    def __init__(self) -> None:
        self.serialize = False
        self._shared_last_call = False

    def record(self, moved: bool) -> None:
        """A call was run side by side; did replicas draw from one generator?"""
        self.serialize = self.serialize or (moved and (self._shared_last_call or not supports_thread_streams()))
        self._shared_last_call = moved


class CallerRng:
    """The state of torch's generators when this was made, for a call with replicas on these devices."""

    def __init__(self, devices: Sequence[torch.device], *, out_of_process: bool = False) -> None:
        """`apart` means that only the first replica is in this process, and draws here."""
        self.devices = devices
        self._out_of_process = out_of_process
        self.cpu = CallerGenerator(torch.default_generator)
        here = devices[:1] if out_of_process else devices
        self.accelerators = {
            d: CallerGenerator(g) for d in here if d.type != "cpu" and (g := _default_generator(d)) is not None
        }
        self.accelerator_seed = self.accelerators.get(self.devices[0], self.cpu)
        """What seeds the streams of accelerators."""
        self._tracked: dict[int, CallerGenerator] = {}
        self._lock = threading.Lock()

    def track(self, generator: torch.Generator) -> CallerGenerator:
        """A generator that the module holds or was given; it is put back with the rest."""
        with self._lock:
            if id(generator) not in self._tracked:
                self._tracked[id(generator)] = CallerGenerator(generator)
            return self._tracked[id(generator)]

    def is_shared(self, device: torch.device) -> bool:
        """Whether several replicas of this process are on a device."""
        return not self._out_of_process and self.devices.count(device) > 1

    def is_shared_generator_used(self) -> bool:
        """Whether numbers were drawn from a generator that several replicas share."""
        return self.cpu.was_used() or any(
            source.was_used() for device, source in self.accelerators.items() if self.is_shared(device)
        )

    def advance(self) -> None:
        for source in (self.cpu, *self.accelerators.values(), *self._tracked.values()):
            source.advance()

    def restore(self) -> None:
        """Put every generator back."""
        for source in (self.cpu, *self.accelerators.values(), *self._tracked.values()):
            source.restore()


def _has_generators(shards: Sequence[Sequence[Any]]) -> bool:
    return any(True for values in shards for _ in generators_in(values))


def generators_in(value: Any) -> Iterator[torch.Generator]:
    """Every generator in an argument of a call."""
    if isinstance(value, torch.Generator):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from generators_in(item)


def replica_generator(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """What a replica on `device` has in place of a generator of the caller; a default one stays a default one."""
    near = device if generator.device.type == device.type else generator.device
    if generator is _default_generator(generator.device):
        return _default_generator(near) or generator
    return torch.Generator(near)


def _default_generator(device: torch.device) -> torch.Generator | None:
    """The default generator of a device; None where its backend does not give it away."""
    if device.type == "cpu":
        return torch.default_generator
    backend: Any = torch.get_device_module(device)
    if hasattr(backend, "init"):
        backend.init()
    generators: Any = getattr(backend, "default_generators", ())
    return generators[device.index or 0] if generators else None


class _DefaultGeneratorProxy:
    """What `torch.get_rng_state`, `torch.manual_seed` and the like see: in a replica's thread, its stream.

    Checkpointing saves and sets the state by these functions.
    """

    state_reads = 0
    """How often the state was."""

    def __getattr__(self, name: str) -> Any:
        self.state_reads += name == "get_state"
        return getattr(_current_generator() or torch.default_generator, name)


_proxy = _DefaultGeneratorProxy()


def rng_state_reads() -> int:
    """How often code has read the state of the CPU's default generator: whoever does may set it again."""
    supports_thread_streams()  # which puts the stand-in there
    return _proxy.state_reads


def _current_generator() -> torch.Generator | None:
    """The generator of the stream that this thread draws from, if it has one."""
    stream: RandomStream | None = getattr(_thread_local, "stream", None)
    if (
        stream is None
        and _joint_backwards
        and is_rng_dispatch_enabled()
        and not getattr(_thread_local, "in_turn", False)
    ):
        stream = _joint_backwards[-1].stream_for_thread()
    return None if stream is None else stream.generator()


def supports_thread_streams() -> bool:
    """Whether a thread can have its own stream on the CPU, asked once; else replicas that draw run one at a time."""
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
        drawn = torch.nn.functional.dropout(torch.ones(64, device="cpu")), torch.randperm(64, device="cpu")
    generator = torch.Generator().manual_seed(source.seed(0))
    mask = torch.empty(64, device="cpu").bernoulli_(0.5, generator=generator) * 2
    order = torch.randperm(64, device="cpu", generator=generator)
    alike = torch.equal(drawn[0], mask) and torch.equal(drawn[1], order)
    alike = alike and torch.equal(generator.get_state(), stream.generator().get_state())
    if source.was_used() or not alike:
        source.restore()
        return False
    replace_default_generator(_proxy)
    return True
