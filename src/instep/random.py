"""The caller's random state around a call, and the streams that replicas draw from inside it.

Every replica has a stream of its own, seeded by one number that the state of the caller's generator decides, and by the
replica's index. A call in which something was drawn moves the caller's generator by one number, whatever the count of
replicas; a call that draws nothing does not move it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from instep.modes import All
from instep.private import is_routed, route, route_draws, stand_in_for_default_generator
from instep.sources import Source, Stream, state_bytes

Held = list[tuple[torch.Generator, torch.Generator]]
"""Generators of the caller, each with what a replica has in its place."""

_here = threading.local()
_once = threading.RLock()
_joint: list[Streams] = []
"""The calls whose replicas are in one backward together, the latest last."""


Drawn = tuple[Stream | None, bool, bool]


def drawing() -> Drawn:
    """How this thread draws on the CPU."""
    return getattr(_here, "stream", None), getattr(_here, "in_turn", False), is_routed()


def draw_by(how: Drawn) -> None:
    """Let this thread draw as it did."""
    _here.stream, _here.in_turn, routed = how
    route(routed)


class _Drawing:
    """A thread that draws from a stream while inside; without one, from the default generator in a replica's turn."""

    __slots__ = ("_outer", "_stream")

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._outer = drawing()
        route(True)
        _here.stream, _here.in_turn = self._stream, self._stream is None

    def __exit__(self, *_: object) -> None:
        draw_by(self._outer)


class Streams:
    """Where the replicas of one call draw from.

    With `own`, draws on the CPU come from a generator of the replica's thread. Otherwise, where replicas run `in_turn`,
    the caller's generator stands at the replica's seed while it runs. So do the generators of accelerators, if no other
    replica draws from them meanwhile.
    """

    def __init__(self, state: RandomState, held: Sequence[Held], *, own: bool, in_turn: bool) -> None:
        self.in_turn = in_turn
        """Whether replicas run one after another."""
        self.state = state
        self._threads = own
        self._own = own and not in_turn
        self._streams = [Stream(state.host, index) for index in range(len(held))]
        self.held = [list(pairs) for pairs in held]
        self._of_threads: dict[int, Stream] = {}
        self._caller = self._index = 0

    def arguments(self, shards: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """The arguments of each replica, with a generator of its own for each that several of them were given."""
        if all(isinstance(value, Tensor) for value in shards[0]) or not _hold_generators(shards):
            return shards
        counts = Counter(key for values in shards for key in {id(g) for g in generators_in(values)})
        shared = {key for key, count in counts.items() if count > 1}
        if not shared:
            return shards
        return [list(self._own_generators(values, shared, index)) for index, values in enumerate(shards)]

    def _own_generators(self, value: Any, shared: Collection[int], index: int) -> Any:
        if isinstance(value, torch.Generator) and id(value) in shared:
            known = next((made for source, made in self.held[index] if source is value), None)
            if known is None:
                known = counterpart(value, self.state.devices[index])
                self.held[index].append((value, known))
            return known
        if type(value) is dict:
            return {key: self._own_generators(item, shared, index) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._own_generators(item, shared, index) for item in value)
        return value

    def forward(self, index: int) -> AbstractContextManager[None]:
        """Around one replica's part of a forward, in the thread that runs it."""
        if self._own and not self.held[index] and not self.state.others:
            return self.backward(index)
        return self._standing(index)

    def _standing(self, index: int) -> AbstractContextManager[Any]:
        standing = []
        for source, generator in self.held[index]:
            if generator is not source and generator is not _default(generator.device):
                standing.append(_Standing(generator, self.state.add(source), index))
        device = self.state.devices[index]
        if device in self.state.others and (self.in_turn or not self.state.shares(device)):
            other = self.state.others[device]
            standing.append(_Standing(other.generator, self.state.home, index, restore=other.before))
        if self.in_turn:
            host = self.state.host
            standing.append(_Standing(host.generator, host, index, restore=host.before))
        return All([*standing, self.backward(index)])

    def step_aside(self) -> Callable[[], None]:
        """Let another replica have its turn in the middle of one's own; call what this returns to go on."""
        sources = (self.state.host, *self.state.others.values())
        states = [(source.generator, source.generator.get_state()) for source in sources]

        def go_on() -> None:
            for generator, state in states:
                generator.set_state(state)

        return go_on

    def backward(self, index: int) -> AbstractContextManager[None]:
        """Around one replica's part of a backward on the CPU: its stream goes on where forward left it."""
        if not self._threads:
            return nullcontext()
        return _Drawing(self._streams[index] if self._own else None)

    @contextmanager
    def joint_backward(self, index: int = 0) -> Iterator[None]:
        """Around one backward for all replicas: on the CPU, each thread that takes part draws from a stream of its own.

        Autograd's device threads work at the same time, and recompute checkpointed regions by setting the state. A
        replica that has a backward of its own gives its index.
        """
        if not self._own:
            yield
            return
        self._caller, self._index = threading.get_ident(), index
        _joint.append(self)
        outer = route(True)
        try:
            yield
        finally:
            route(outer)
            _joint.remove(self)

    def of_this_thread(self) -> Stream:
        """The stream of a thread that takes part in a joint backward."""
        place = 0 if threading.get_ident() == self._caller else 1 + torch.accelerator.current_device_index()
        number = len(self._streams) * (1 + place) + self._index
        return self._of_threads.setdefault(place, Stream(self.state.host, number))

    def renew(self) -> None:
        """Before a backward: what first draws there is seeded by the caller's generator as it is then."""
        self.state.host.renew()

    def settle(self) -> None:
        """Move the caller's generators by one number each, where something was drawn."""
        for stream in (*self._streams, *self._of_threads.values()):
            stream.note()
        self.state.settle()


class _Standing:
    """A generator that stands at a replica's seed inside, and is put back on the way out if it is the caller's.

    Not made of a generator function, here or below: one that an interruption leaves open ends when it is cleared away,
    and would put back then what has moved on since.
    """

    def __init__(self, generator: torch.Generator, source: Source, index: int, restore: Tensor | None = None) -> None:
        self._generator, self._source, self._index, self._restore = generator, source, index, restore

    def __enter__(self) -> None:
        self._generator.manual_seed(self._source.seed(self._index))
        self._start = self._generator.get_state()

    def __exit__(self, *_: object) -> None:
        if state_bytes(self._generator.get_state()) != state_bytes(self._start):
            self._source.drawn = True
        if self._restore is not None:
            self._generator.set_state(self._restore)


class Turns:
    """Whether the replicas of one wrapper run one after another, learnt from how they draw.

    They need to where they draw from one generator by a way that gives no stream to a thread. Code draws so while it is
    being compiled, so that one call alone does not decide.
    """

    def __init__(self) -> None:
        self.always = False
        self._before = False

    def note(self, moved: bool) -> None:
        """A call was run side by side; did replicas draw from one generator?"""
        self.always = self.always or (moved and (self._before or not threads_can_draw()))
        self._before = moved


class RandomState:
    """The state of torch's generators when this was made, for a call with replicas on these devices."""

    def __init__(self, devices: Sequence[torch.device], *, apart: bool = False) -> None:
        """`apart` means that only the first replica is in this process, and draws here."""
        self.devices = devices
        self._apart = apart
        self.host = Source(torch.default_generator)
        here = devices[:1] if apart else devices
        self.others = {d: Source(g) for d in here if d.type != "cpu" and (g := _default(d)) is not None}
        self.home = self.others.get(self.devices[0], self.host)
        """What seeds the streams of accelerators."""
        self._held: dict[int, Source] = {}
        self._lock = threading.Lock()

    def add(self, generator: torch.Generator) -> Source:
        """A generator that the module holds or was given; it is put back with the rest."""
        with self._lock:
            if id(generator) not in self._held:
                self._held[id(generator)] = Source(generator)
            return self._held[id(generator)]

    def shares(self, device: torch.device) -> bool:
        """Whether several replicas of this process are on a device."""
        return not self._apart and self.devices.count(device) > 1

    def moved(self) -> bool:
        """Whether numbers were drawn from a generator that several replicas share."""
        return self.host.moved() or any(source.moved() for device, source in self.others.items() if self.shares(device))

    def settle(self) -> None:
        for source in (self.host, *self.others.values(), *self._held.values()):
            source.settle()

    def restore(self) -> None:
        """Put every generator back."""
        for source in (self.host, *self.others.values(), *self._held.values()):
            source.restore()


def _hold_generators(shards: Sequence[Sequence[Any]]) -> bool:
    return any(True for values in shards for _ in generators_in(values))


def generators_in(value: Any) -> Iterator[torch.Generator]:
    """Every generator in an argument of a call."""
    if isinstance(value, torch.Generator):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from generators_in(item)


def counterpart(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """What a replica on `device` has in place of a generator of the caller; a default one stays a default one."""
    near = device if generator.device.type == device.type else generator.device
    if generator is _default(generator.device):
        return _default(near) or generator
    return torch.Generator(near)


def _default(device: torch.device) -> torch.Generator | None:
    """The default generator of a device; None where its backend does not give it away."""
    if device.type == "cpu":
        return torch.default_generator
    backend: Any = torch.get_device_module(device)
    if hasattr(backend, "init"):
        backend.init()
    generators: Any = getattr(backend, "default_generators", ())
    return generators[device.index or 0] if generators else None


class _ThreadGenerator:
    """What `torch.get_rng_state`, `torch.manual_seed` and the like see: in a replica's thread, its stream.

    Checkpointing saves and sets the state by these functions.
    """

    read = 0
    """How often the state was."""

    def __getattr__(self, name: str) -> Any:
        self.read += name == "get_state"
        return getattr(_pick() or torch.default_generator, name)


_stand_in = _ThreadGenerator()


def times_read() -> int:
    """How often code has read the state of the CPU's default generator: whoever does may set it again."""
    threads_can_draw()  # which puts the stand-in there
    return _stand_in.read


def _pick() -> torch.Generator | None:
    """The generator of the stream that this thread draws from, if it has one."""
    stream: Stream | None = getattr(_here, "stream", None)
    if stream is None and _joint and is_routed() and not getattr(_here, "in_turn", False):
        stream = _joint[-1].of_this_thread()
    return None if stream is None else stream.generator()


def threads_can_draw() -> bool:
    """Whether a thread can have its own stream on the CPU, asked once; else replicas that draw run one at a time."""
    with _once:
        return _set_up()


@cache
def _set_up() -> bool:
    try:
        route_draws(_pick)
        return _try_out()
    except (AttributeError, AssertionError, KeyError, RuntimeError, TypeError, ValueError):
        return False


def _try_out() -> bool:
    source = Source(torch.default_generator)
    stream = Stream(source, 0)
    with _Drawing(stream):
        drawn = torch.nn.functional.dropout(torch.ones(64, device="cpu")), torch.randperm(64, device="cpu")
    generator = torch.Generator().manual_seed(source.seed(0))
    mask = torch.empty(64, device="cpu").bernoulli_(0.5, generator=generator) * 2
    order = torch.randperm(64, device="cpu", generator=generator)
    alike = torch.equal(drawn[0], mask) and torch.equal(drawn[1], order)
    alike = alike and torch.equal(generator.get_state(), stream.generator().get_state())
    if source.moved() or not alike:
        source.restore()
        return False
    stand_in_for_default_generator(_stand_in)
    return True
