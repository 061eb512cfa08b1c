"""One replica: a counterpart of the source module that is made once and then kept abreast of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.compiled import compiled_by
from instep.errors import BridgeError
from instep.modes import inference
from instep.random import counterpart
from instep.replicas.carry import Slot
from instep.replicas.clone import Cloner
from instep.replicas.contents import Contents, contents_of, put
from instep.replicas.equal import equal_tensors
from instep.replicas.handed import Change
from instep.replicas.tensors import Tensors, Way, shared_storages
from instep.replicas.watch import MISSING, NOTHING, Changes, Set, Watch
from instep.structure.shapes import is_dense
from instep.structure.tree import map_tensors, tensors_in

Pair = tuple[Tensor, Tensor]
Dress = Callable[[nn.Module, nn.Module], None]
"""What is done to each module of a replica when it is made, given the module that it stands for."""

_LOOKS = 3  # calls, in training and in evaluation, in which values are compared on an accelerator


class Replica:
    """The module on one device, with its own tensors; everything else is the source's own objects."""

    kind_of_tensors = Tensors
    stands_in = False
    """Whether it stands for a replica of another process, in the source's own memory."""
    near = False
    """Whether it stands for one that works in the source's own memory too, on one accelerator."""

    def __init__(
        self,
        index: int,
        source: nn.Module,
        device: torch.device,
        way: Way,
        *,
        home: torch.device | None = None,
        dress: Dress | None = None,
        own: Mapping[int, Any] | None = None,
        apart: Mapping[int, Tensor] | None = None,
        asked: list[Any] | None = None,
    ) -> None:
        self.index = index
        self.device = device
        self.name = f"replica {index} on {device}"
        self.tensors = self.kind_of_tensors(device, way, apart or {}, shared_storages(source.modules()))
        moves = None if home is None or home == device else (home, device)
        self.cloner = Cloner(self.tensors.make, partial(counterpart, device=device), own, moves, asked)
        self.module: nn.Module = self.cloner.clone(source)
        if way in (Way.PRIVATE, Way.LINK):
            self._flatten_weights()
        for original, made in self.cloner.modules:
            made.__dict__["zero_grad"] = _refuse_zero_grad
            if dress is not None:
                dress(original, made)
        self._watch = self._new_watch()
        self._versions: list[int] = []
        self._silent: set[int] = set()
        """By their ids, copies that `forward` was seen to write without moving a version counter."""
        self.owned: list[str] = []
        """The places of containers that each replica has for itself because `forward` changes them."""
        self.look: Callable[[], Callable[[], Changes | None] | None] = _nowhere
        """What says what has changed on the source since its replicas were last ready, as long as that exists."""
        self.places: Mapping[int, Any] = {}
        """By the id of a container of the source: where it is."""
        self._looks = {True: _LOOKS, False: _LOOKS}
        self._lent: dict[tuple[int, str], tuple[Any, Any]] = {}
        """Parts of carried state that the replica was given for one call, each with a copy of it as it was."""

    def __repr__(self) -> str:
        return self.name

    def _new_watch(self) -> Watch:
        return Watch([module for _, module in self.cloner.modules], *self._loose())

    def _loose(self) -> tuple[list[tuple[Any, Contents]], list[Tensor]]:
        """What is watched beside the modules themselves: containers, and whether tensors take a gradient."""
        made = [(made, contents_of(made)) for _, _, made in self.cloner.containers]
        return made, [held for _, held in (*self.tensors.trainable, *self.tensors.state)]

    @property
    def modules(self) -> list[nn.Module]:
        """Every module of the replica."""
        return [made for _, made in self.cloner.modules]

    @property
    def source_modules(self) -> list[nn.Module]:
        """The source's modules, in the same order."""
        return list(map(itemgetter(0), self.cloner.modules))

    @property
    def trainable(self) -> list[Pair]:
        """(source, counterpart) for each tensor that takes a gradient."""
        return self.tensors.trainable

    def _flatten_weights(self) -> None:
        """Lay recurrent weights out as cuDNN wants them, once, where they have memory of their own."""
        with inference(False):
            for module in self.modules:
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()

    def apply(self, changes: Changes) -> None:
        """Set on the replica what was set on the source."""
        for change in changes.attributes:
            _, module = self.cloner.modules[change.module]
            held = module._buffers if change.buffer else module.__dict__
            key = (change.module, change.name, change.buffer)
            held[change.name], gone = self.cloner.renew(key, change.name, change.new)
            self.tensors.drop({id(made) for made in gone if isinstance(made, Tensor)})
        for inside in changes.contents:
            counterparts = {id(source): made for source, _, made in self.cloner.containers}
            if id(inside.container) in counterparts:
                gone = self.cloner.refill(inside.container, counterparts[id(inside.container)])
                self.tensors.drop({id(made) for made in gone if isinstance(made, Tensor)})
        self._watch.renew(changes, *self._loose())

    def takes_from_host(self, chosen: bool) -> bool:  # noqa: ARG002
        """Whether arguments may be left on the host; not where somebody has `chosen` which of them stay there."""
        return False

    def edited(self) -> None:
        """Something was changed inside an object that the replica shares with the source."""

    def lend(self, slots: Sequence[Slot], parts: Sequence[Any] | None) -> None:
        """Give the replica its samples' part of carried state; None only forgets the whole that it had."""
        self._lent = {}
        places = {id(module): index for index, module in enumerate(self.source_modules)}
        for number, slot in enumerate(slots):
            index = places[id(slot.module)]
            source, module = self.cloner.modules[index]
            buffer = slot.name in source._buffers
            held = module._buffers if buffer else module.__dict__
            self.tensors.drop({id(tensor) for tensor in tensors_in(held.get(slot.name))})
            if parts is not None:
                held[slot.name] = parts[number]
                self._lent[index, slot.name] = parts[number], map_tensors(lambda t: t.detach().clone(), parts[number])
                self._watch.update(Changes(False, [Set(index, slot.name, None, parts[number], buffer)]))
        if self._versions:
            self._versions = [copy._version for _, copy in self.tensors.state]

    def _written_parts(self) -> list[Set]:
        """Carried state that `forward` wrote in place."""
        found = []
        for (index, name), (part, before) in self._lent.items():
            _, module = self.cloner.modules[index]
            buffer = name in module._buffers
            same = (module._buffers if buffer else module.__dict__).get(name) is part
            pairs = zip(tensors_in(part), tensors_in(before), strict=True)
            if same and not all(equal_tensors(now, then) for now, then in pairs):
                found.append(Set(index, name, part, part, buffer))
        return found

    def follow_state(self) -> None:
        """Bring buffers and other tensors without gradient up to the source's values.

        They are written without moving their version counters. A graph that still needs an old value then meets the new
        one exactly as it would on one device, and is told of it in the same way (see `Notes`).
        """
        if not self.tensors.state:
            return
        stale = [pair for pair in self.tensors.state if not self._known_equal(*pair)]
        with inference(False), torch.no_grad():
            alike = [(s, c) for s, c in stale if s.shape == c.shape and s.dtype == c.dtype and is_dense(s)]
            if alike:
                torch._foreach_copy_([copy.data for _, copy in alike], [source.detach() for source, _ in alike])
            done = {id(copy) for _, copy in alike}
            for source, copy in stale:
                if id(copy) not in done:
                    copy.data = self.tensors.copy(source).data
        if self.device.type != "cpu":
            self._versions = [copy._version for _, copy in self.tensors.state]

    def _known_equal(self, source: Tensor, copy: Tensor) -> bool:
        """Whether values are equal, as far as that can be told without waiting for an accelerator."""
        return self.device.type == "cpu" and source.device.type == "cpu" and equal_tensors(source, copy)

    def changes(self) -> Changes:
        """What `forward` set on the replica since it was last brought up to date."""
        changes = self._watch.look()
        if self._lent and not changes.structure:
            return Changes(False, [*changes.attributes, *self._written_parts()], changes.contents)
        return changes

    def written(self) -> list[Pair]:
        """State tensors whose values `forward` wrote in place, as (source, copy).

        On the CPU values are compared. On an accelerator that would wait for the device, so there the version counter
        tells, and the statistics of batch normalisation, which move without it, are known by their class. The first
        calls compare values there too, on the source's device: what they find is taken as written ever after.
        """
        if self.device.type == "cpu":
            return [pair for pair in self.tensors.state if not equal_tensors(pair[0].cpu(), pair[1])]
        silent = self._silent | {
            id(buffer)
            for module in self.modules
            if isinstance(module, _BatchNorm) and module.training
            for buffer in module.buffers(recurse=False)
        }
        moved = zip(self.tensors.state, self._versions, strict=True)
        found = [pair for pair, version in moved if pair[1]._version != version or id(pair[1]) in silent]
        if self._looks[self.module.training]:
            self._looks[self.module.training] -= 1
            known = {id(copy) for _, copy in found}
            rest = [pair for pair in self.tensors.state if id(pair[1]) not in known and pair[0].device == self.device]
            quiet = [pair for pair in rest if not equal_tensors(*pair)]
            self._silent.update(id(copy) for _, copy in quiet)
            found += quiet
        return found

    def revert(self, changes: Changes) -> None:
        """Set back what `forward` set on the replica."""
        for change in changes.attributes:
            _, module = self.cloner.modules[change.module]
            held = module._buffers if change.buffer else module.__dict__
            if change.old is MISSING:
                held.pop(change.name, None)
            else:
                held[change.name] = change.old
        for inside in changes.contents:
            put(inside.container, inside.before)
        self._watch.update(changes)


def _nowhere() -> None:
    """There is nothing to look at yet."""


def _refuse_zero_grad(*_: Any, **__: Any) -> None:
    raise BridgeError(
        "zero_grad() was called inside forward: gradients belong to the module, and replicas have none of their own.\n"
        "Call it outside, before backward()."
    )


@dataclass
class Outcome:
    """What one replica did in a call."""

    output: Any = None
    changes: Changes = NOTHING
    written: list[Pair] = field(default_factory=list)
    """State tensors that were written in place, as (source, copy)."""
    error: BaseException | None = None
    refused: Sequence[Tensor] = ()
    """Trainable tensors of the source that a replica of another process wrote to, in memory of its own."""
    parted: Sequence[str] = ()
    """Places of containers that a replica of another process changed, and that each needs for itself."""
    given: Sequence[Change] = ()
    """What a replica of another process changed inside of its arguments, and what it holds there now."""
    made: Mapping[int, Tensor] = field(default_factory=dict)
    """By the id of an argument that a replica of another process wrote to: what it made of it."""
    used: Collection[int] = ()
    """The ids of arguments that such a replica's outputs come from."""
    remote: Any = None
    """For a replica of another process: what its backward is asked for by."""
    seat: Any = None
    """Its place among the replicas of the call, with what they did together (a `Seat`, of a higher floor)."""


def run(replica: Replica, method: str, args: list[Any], kwargs: dict[str, Any], compiler: Any = None) -> Outcome:
    """One replica's part of a call, and what it changed on the replica."""
    outcome = Outcome()
    function: Callable[..., Any] = replica.module if method == "forward" else getattr(replica.module, method)
    outcome.output = compiled_by(compiler, function, args, kwargs)
    outcome.changes = replica.changes()
    outcome.written = replica.written()
    return outcome
