"""One replica: a persistent copy of the source module on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.errors import BridgeError
from instep.replicas.clone import Cloner
from instep.replicas.diff import MISSING, NO_CHANGES, AttributeChange, Changes, ChangeTracker
from instep.replicas.object_graph import Contents, read_contents, tensors_equal, write_contents
from instep.replicas.state.carried import CarriedValue
from instep.replicas.tensors import ParameterSharing, ReplicaTensors, shared_storage_ptrs
from instep.replicas.write_watch import WriteDetector
from instep.runtime.modes import call_compiled, set_inference_mode
from instep.runtime.rng import replica_generator
from instep.structure.shapes import is_dense
from instep.structure.tree import map_tensors, tensors_in

TensorPair = tuple[Tensor, Tensor]
ModulePatch = Callable[[nn.Module, nn.Module], None]
"""What is done to each module of a replica when it is made, given the module that it stands for."""

_VALUE_CHECKS = 3  # calls, in training and in evaluation, in which values are compared on an accelerator


class Replica:
    """The module on one device, with its own tensors; everything else is the source's own objects."""

    tensors_class = ReplicaTensors
    is_remote = False
    """Whether it stands for a replica of another process, in the source's own memory."""
    same_device = False
    """Whether it stands for one that works in the source's own memory too, on one accelerator."""

    def __init__(
        self,
        index: int,
        source: nn.Module,
        device: torch.device,
        sharing: ParameterSharing,
        *,
        source_device: torch.device | None = None,
        patch: ModulePatch | None = None,
        private_containers: Mapping[int, Any] | None = None,
        private_weights: Mapping[int, Tensor] | None = None,
        caller_only_accesses: list[Any] | None = None,
    ) -> None:
        """
        Args:
            index: The position among the replicas.
            source: The wrapped module.
            device: The device of the replica.
            sharing: How the replica gets the source's trainable tensors.
            source_device: The device that attributes of the source name, if it is not `device`.
            patch: Called for each module of the replica.
            private_containers: By id, containers of the source that each replica has a copy of.
            private_weights: By id, trainable tensors that are copied whatever `sharing` is.
            caller_only_accesses: Receives the objects that the replica used and only the caller may use.
        """
        self.index = index
        self.device = device
        self.name = f"replica {index} on {device}"
        self.tensors = self.tensors_class(device, sharing, private_weights or {}, shared_storage_ptrs(source.modules()))
        self.cloner = Cloner(
            self.tensors.create,
            partial(replica_generator, device=device),
            private_containers=private_containers,
            device_pair=None if source_device in (None, device) else (source_device, device),
            caller_only_accesses=caller_only_accesses,
        )
        self.module: nn.Module = self.cloner.clone(source)
        if sharing in (ParameterSharing.COPY, ParameterSharing.DIFFERENTIABLE_COPY):
            self._flatten_weights()
        for original, made in self.cloner.modules:
            made.__dict__["zero_grad"] = _raise_on_zero_grad
            if patch is not None:
                patch(original, made)
        self._tracker = self._new_tracker()
        self._state_writes: WriteDetector[TensorPair] = WriteDetector([], [])
        """Detects writes to state on an accelerator."""
        self._unversioned: set[int] = set()
        """By their ids, copies that `forward` was seen to write without moving a version counter."""
        self.private_container_paths: list[str] = []
        """The paths of the private containers."""
        self.source_changes_ref: Callable[[], Callable[[], Changes | None] | None] = _no_source
        """What says what has changed on the source since its replicas were last ready, as long as that exists."""
        self.container_paths: Mapping[int, Any] = {}
        """By the id of a container of the source: where it is."""
        self._value_checks_left = {True: _VALUE_CHECKS, False: _VALUE_CHECKS}
        self._assigned_shards: dict[tuple[int, str], tuple[Any, Any]] = {}
        """Parts of carried state that the replica was given for one call, each with a copy of it as it was."""

    def __repr__(self) -> str:
        return self.name

    def _new_tracker(self) -> ChangeTracker:
        return ChangeTracker([module for _, module in self.cloner.modules], *self._tracked_state())

    def _tracked_state(self) -> tuple[list[tuple[Any, Contents]], list[Tensor]]:
        """What is watched beside the modules themselves: containers, and whether tensors take a gradient."""
        made = [(made, read_contents(made)) for _, _, made in self.cloner.containers]
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
    def trainable(self) -> list[TensorPair]:
        """(source, counterpart) for each tensor that takes a gradient."""
        return self.tensors.trainable

    def _flatten_weights(self) -> None:
        """Lay recurrent weights out as cuDNN wants them, once, where they have memory of their own."""
        with set_inference_mode(False):
            for module in self.modules:
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()

    def apply(self, changes: Changes) -> None:
        """Set on the replica what was set on the source."""
        for change in changes.attributes:
            _, module = self.cloner.modules[change.module_index]
            held = module._buffers if change.is_buffer else module.__dict__
            key = (change.module_index, change.name, change.is_buffer)
            held[change.name], gone = self.cloner.reclone_attribute(key, change.name, change.new)
            self.tensors.forget({id(made) for made in gone if isinstance(made, Tensor)})
        for inside in changes.containers:
            counterparts = {id(source): made for source, _, made in self.cloner.containers}
            if id(inside.container) in counterparts:
                gone = self.cloner.update_container(inside.container, counterparts[id(inside.container)])
                self.tensors.forget({id(made) for made in gone if isinstance(made, Tensor)})
        self._tracker.retarget(changes, *self._tracked_state())

    def accepts_host_arguments(self, chosen: bool) -> bool:  # noqa: ARG002
        """Whether arguments may be left on the host; not where somebody has `chosen` which of them stay there."""
        return False

    def on_shared_object_changed(self) -> None:
        """Something was changed inside an object that the replica shares with the source."""

    def assign_shard(self, slots: Sequence[CarriedValue], parts: Sequence[Any] | None) -> None:
        """Give the replica its samples' part of carried state; None only forgets the whole that it had."""
        self._assigned_shards = {}
        places = {id(module): index for index, module in enumerate(self.source_modules)}
        for number, slot in enumerate(slots):
            index = places[id(slot.module)]
            source, module = self.cloner.modules[index]
            buffer = slot.name in source._buffers
            held = module._buffers if buffer else module.__dict__
            self.tensors.forget({id(tensor) for tensor in tensors_in(held.get(slot.name))})
            if parts is not None:
                held[slot.name] = parts[number]
                self._assigned_shards[index, slot.name] = (
                    parts[number],
                    map_tensors(lambda t: t.detach().clone(), parts[number]),
                )
                self._tracker.accept(Changes(False, [AttributeChange(index, slot.name, None, parts[number], buffer)]))
        self._watch_state()

    def _written_shards(self) -> list[AttributeChange]:
        """Carried state that `forward` wrote in place."""
        found = []
        for (index, name), (part, before) in self._assigned_shards.items():
            _, module = self.cloner.modules[index]
            buffer = name in module._buffers
            same = (module._buffers if buffer else module.__dict__).get(name) is part
            pairs = zip(tensors_in(part), tensors_in(before), strict=True)
            if same and not all(tensors_equal(now, then) for now, then in pairs):
                found.append(AttributeChange(index, name, part, part, buffer))
        return found

    def sync_state(self) -> None:
        """Bring buffers and other tensors without gradient up to the source's values.

        They are written without moving their version counters. A graph that still needs an old value then meets the new
        one exactly as it would on one device, and is told of it in the same way (see `Notes`).
        """
        if not self.tensors.state:
            return
        stale = [pair for pair in self.tensors.state if not self._is_known_equal(*pair)]
        with set_inference_mode(False), torch.no_grad():
            alike = [(s, c) for s, c in stale if s.shape == c.shape and s.dtype == c.dtype and is_dense(s)]
            if alike:
                torch._foreach_copy_([copy.data for _, copy in alike], [source.detach() for source, _ in alike])
            done = {id(copy) for _, copy in alike}
            for source, copy in stale:
                if id(copy) not in done:
                    copy.data = self.tensors.copy(source).data
        self._watch_state()

    def _watch_state(self) -> None:
        if self.device.type != "cpu":
            state = list(self.tensors.state)
            self._state_writes = WriteDetector(state, [copy for _, copy in state])

    def _is_known_equal(self, source: Tensor, copy: Tensor) -> bool:
        """Whether values are equal, as far as that can be determined without synchronizing an accelerator."""
        return self.device.type == "cpu" and source.device.type == "cpu" and tensors_equal(source, copy)

    def changes(self) -> Changes:
        """What `forward` set on the replica since it was last brought up to date."""
        changes = self._tracker.diff()
        if self._assigned_shards and not changes.is_structural:
            return Changes(False, [*changes.attributes, *self._written_shards()], changes.containers)
        return changes

    def written_state(self) -> list[TensorPair]:
        """State tensors whose values `forward` wrote in place, as (source, copy).

        On the CPU values are compared. On an accelerator that would wait for the device, so there the version counter
        tells, and the statistics of batch normalisation, which move without it, are known by their class. The first
        calls compare values there too, on the source's device: what they find is taken as written ever after.
        """
        if self.device.type == "cpu":
            return [pair for pair in self.tensors.state if not tensors_equal(pair[0].cpu(), pair[1])]
        silent = self._unversioned | {
            id(buffer)
            for module in self.modules
            if isinstance(module, _BatchNorm) and module.training
            for buffer in module.buffers(recurse=False)
        }
        found = self._state_writes.written()
        counted = {id(copy) for _, copy in found}
        found += [pair for pair in self.tensors.state if id(pair[1]) in silent and id(pair[1]) not in counted]
        if self._value_checks_left[self.module.training]:
            self._value_checks_left[self.module.training] -= 1
            known = {id(copy) for _, copy in found}
            rest = [pair for pair in self.tensors.state if id(pair[1]) not in known and pair[0].device == self.device]
            quiet = [pair for pair in rest if not tensors_equal(*pair)]
            self._unversioned.update(id(copy) for _, copy in quiet)
            found += quiet
        return found

    def revert(self, changes: Changes) -> None:
        """Set back what `forward` set on the replica."""
        for change in changes.attributes:
            _, module = self.cloner.modules[change.module_index]
            held = module._buffers if change.is_buffer else module.__dict__
            if change.old is MISSING:
                held.pop(change.name, None)
            else:
                held[change.name] = change.old
        for inside in changes.containers:
            write_contents(inside.container, inside.before)
        self._tracker.accept(changes)


def _no_source() -> None:
    """There is nothing to look at yet."""


def _raise_on_zero_grad(*_: Any, **__: Any) -> None:
    raise BridgeError(
        "zero_grad() was called inside forward: gradients belong to the module, and replicas have none of their own.\n"
        "Call it outside, before backward()."
    )


class GraphContext(Protocol):
    """The collectives in which a replica took part (`collectives.group.ReplicaContext`)."""

    tokens: list[Tensor]
    """One token for each collective through which gradients flow, in order. Backward starts at them too."""
    hook_ids: list[int]
    """The ids of the handles of hooks that collectives registered on tensors."""


class RemoteGraph(Protocol):
    """The autograd graph of a replica in another process. The engine that runs the replica defines the class."""

    received_gradients: list[Tensor | None] | None
    """Gradients of the replica's parameters from its last backward, until they are collected."""

    def keep_inputs(self, positions: Sequence[int]) -> None:
        """Restrict the arguments that need a gradient to those at these positions."""
        ...


@dataclass
class ReplicaResult:
    """What one replica did in a call."""

    output: Any = None
    changes: Changes = NO_CHANGES
    written_state: list[TensorPair] = field(default_factory=list)
    """State tensors that were written in place, as (source, copy)."""
    error: BaseException | None = None
    written_parameters: Sequence[Tensor] = ()
    """Trainable tensors of the source that a replica of another process wrote to, in memory of its own."""
    changed_containers: Sequence[str] = ()
    """Places of containers that a replica of another process changed, and that each needs for itself."""
    written_arguments: Mapping[int, Tensor] = field(default_factory=dict)
    """By the id of an argument that a replica of another process wrote to: what it made of it."""
    used_arguments: Collection[int] = ()
    """The ids of arguments that such a replica's outputs come from."""
    remote_graph: RemoteGraph | None = None
    """The graph of a replica in another process, if it recorded one."""
    context: GraphContext | None = None
    """The collectives in which the replica took part."""


def run_replica(
    replica: Replica, method: str, args: list[Any], kwargs: dict[str, Any], compiler: Any = None
) -> ReplicaResult:
    """One replica's part of a call, and what it changed on the replica."""
    outcome = ReplicaResult()
    function: Callable[..., Any] = replica.module if method == "forward" else getattr(replica.module, method)
    outcome.output = call_compiled(compiler, function, args, kwargs)
    outcome.changes = replica.changes()
    outcome.written_state = replica.written_state()
    return outcome
