"""One replica: a persistent copy of the source module on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from instep.replicas.state.batch_norm import StatisticsBlocks, WrittenStatistics, find_statistics
from instep.replicas.state.carried import Attribute
from instep.replicas.tensors import ParameterSharing, ReplicaTensors, shared_storage_ptrs
from instep.replicas.write_watch import WriteDetector
from instep.runtime.modes import call_compiled, set_inference_mode
from instep.runtime.rng import replica_generator
from instep.structure.shapes import is_dense
from instep.structure.tree import map_tensors, tensors_in

TensorPair = tuple[Tensor, Tensor]
ModulePatch = Callable[[nn.Module, nn.Module], None]
"""Called with each module of the source and its copy when a replica is created."""

_VALUE_CHECKS = 3
"""The number of calls, in each of training and evaluation mode, that compare the values of state on an accelerator."""


class Replica:
    """A copy of the source module on one device. Objects without tensors or modules are shared with the source."""

    tensors_class = ReplicaTensors
    is_remote = False
    """Whether the replica runs in another process."""
    same_device = False
    """Whether the replica runs in another process on the source's accelerator, and uses the source's memory."""

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
        self.patch = patch
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
        self.statistics = self._find_statistics()
        """The running statistics of batch norm layers, known by class. The other state is `general_state`."""
        self._statistics_moved = False
        """Whether the running statistics have to be moved to new blocks."""
        self.syncs_statistics: bool = getattr(patch, "enabled", False)
        """Whether all replicas compute equal running statistics."""
        for original, copy in self.cloner.modules:
            copy.__dict__["zero_grad"] = _raise_on_zero_grad
            if patch is not None:
                patch(original, copy)
        self._tracker = ChangeTracker(self.modules, *self._tracked_state())
        self._state_writes: WriteDetector[TensorPair] = WriteDetector([], [])
        """Detects writes to state on an accelerator."""
        self.statistics_written: set[int] = set()
        """Ids of running statistics that synchronized batch norm has written since the last `written_state`."""
        self._unversioned: set[int] = set()
        """Ids of copies that `forward` has written without incrementing the version counter."""
        self.private_container_paths: list[str] = []
        """The paths of the private containers."""
        self.source_changes_ref: Callable[[], Callable[[], Changes | None] | None] = _no_source
        """A weak reference to the function that returns what has changed on the source since the last `sync`."""
        self.container_paths: Mapping[int, Any] = {}
        """The paths of the source's containers, by id."""
        self._value_checks_left = {True: _VALUE_CHECKS, False: _VALUE_CHECKS}
        self._assigned_shards: dict[tuple[int, str], tuple[Any, Any]] = {}
        """By module index and name: the shard of carried state for this call, and a copy of it."""

    def __repr__(self) -> str:
        return self.name

    def _tracked_state(self) -> tuple[list[tuple[Any, Contents]], list[Tensor]]:
        """The containers and tensors that are tracked beside the modules."""
        containers = [(copy, read_contents(copy)) for _, _, copy in self.cloner.containers]
        return containers, [tensor for _, tensor in (*self.tensors.trainable, *self.tensors.state)]

    @property
    def modules(self) -> list[nn.Module]:
        """Every module of the replica."""
        return [copy for _, copy in self.cloner.modules]

    @property
    def source_modules(self) -> list[nn.Module]:
        """The source's modules, in the same order."""
        return list(map(itemgetter(0), self.cloner.modules))

    @property
    def trainable(self) -> list[TensorPair]:
        """(source, replica's tensor) for each tensor that requires a gradient."""
        return self.tensors.trainable

    def _flatten_weights(self) -> None:
        """Make the weights of recurrent layers contiguous for cuDNN."""
        with set_inference_mode(False):
            for module in self.modules:
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()

    def _find_statistics(self) -> StatisticsBlocks | None:
        return find_statistics(self.cloner.modules, self.tensors.state, self.tensors.shared_storages)

    def _release_statistics(self) -> None:
        """Treat running statistics like other state until the next `sync_state`."""
        self.statistics, self._statistics_moved = None, True

    def _forget(self, copies: Iterable[Any]) -> None:
        """Forget copies that the replica no longer uses."""
        ids = {id(copy) for copy in copies if isinstance(copy, Tensor)}
        if not ids:
            return
        self.tensors.forget(ids)
        if self.statistics is not None and not self.statistics.copy_ids.isdisjoint(ids):
            self._release_statistics()

    @property
    def general_state(self) -> list[TensorPair]:
        """(source, copy) for each state tensor that is no known running statistic."""
        state, statistics = self.tensors.state, self.statistics
        if statistics is None:
            return state
        if len(statistics.copy_ids) == len(state):  # all of them
            return []
        return [pair for pair in state if id(pair[1]) not in statistics.copy_ids]

    def apply(self, changes: Changes) -> None:
        """Apply changes of the source to the replica."""
        for change in changes.attributes:
            _, module = self.cloner.modules[change.module_index]
            table = module._buffers if change.is_buffer else module.__dict__
            key = (change.module_index, change.name, change.is_buffer)
            table[change.name], unused = self.cloner.reclone_attribute(key, change.name, change.new)
            self._forget(unused)
        for container, _, _ in changes.containers:
            copies = {id(source): copy for source, _, copy in self.cloner.containers}
            if id(container) in copies:
                unused = self.cloner.update_container(container, copies[id(container)])
                self._forget(unused)
        self._tracker.retarget(changes, *self._tracked_state())

    def accepts_host_arguments(self, chosen: bool) -> bool:  # noqa: ARG002
        """Whether arguments may stay on the host. `chosen` says that the user has chosen their devices."""
        return False

    def on_shared_object_changed(self) -> None:
        """Called when an object that the replica shares with the source was changed."""

    def assign_shard(self, attributes: Sequence[Attribute], shards: Sequence[Any] | None) -> None:
        """Set shards of the source's carried attributes. None only drops the copies of the whole values."""
        self._assigned_shards = {}
        indices = {id(module): index for index, module in enumerate(self.source_modules)}
        for number, (owner, name) in enumerate(attributes):
            index = indices[id(owner)]
            source, module = self.cloner.modules[index]
            is_buffer = name in source._buffers
            table = module._buffers if is_buffer else module.__dict__
            self._forget(tensors_in(table.get(name)))
            if shards is not None:
                shard = table[name] = shards[number]
                self._assigned_shards[index, name] = (shard, map_tensors(lambda t: t.detach().clone(), shard))
                self._tracker.accept(Changes(False, [AttributeChange(index, name, None, shard, is_buffer)]))
        self._watch_state()

    def _written_shards(self) -> list[AttributeChange]:
        """Shards of carried state that `forward` wrote in place."""
        found = []
        for (index, name), (shard, copy) in self._assigned_shards.items():
            _, module = self.cloner.modules[index]
            is_buffer = name in module._buffers
            is_assigned = (module._buffers if is_buffer else module.__dict__).get(name) is shard
            if is_assigned and not all(map(tensors_equal, tensors_in(shard), tensors_in(copy))):
                found.append(AttributeChange(index, name, shard, shard, is_buffer))
        return found

    def sync_state(self) -> None:
        """Copy buffers and other tensors that require no gradient from the source.

        Version counters are not incremented here: `VersionTracker` increments them if the caller has written to the
        source, so that a backward through an older graph fails exactly when it would on one device.
        """
        if not self.tensors.state:
            return
        if self.statistics is not None:
            if self.statistics.is_current():
                self.statistics.sync()
            else:
                self._release_statistics()
        stale = [pair for pair in self.general_state if not self._is_known_equal(*pair)]
        with set_inference_mode(False), torch.no_grad():
            same_layout = [(s, c) for s, c in stale if s.shape == c.shape and s.dtype == c.dtype and is_dense(s)]
            if same_layout:
                torch._foreach_copy_([c.data for _, c in same_layout], [s.detach() for s, _ in same_layout])
            copied = {id(copy) for _, copy in same_layout}
            for source, copy in stale:
                if id(copy) not in copied:
                    copy.data = self.tensors.copy(source).data
        if self._statistics_moved:
            self.statistics, self._statistics_moved = self._find_statistics(), False
        self._watch_state()

    def _watch_state(self) -> None:
        if self.device.type != "cpu":
            self._state_writes = WriteDetector.from_pairs((pair, pair[1]) for pair in self.general_state)

    def _is_known_equal(self, source: Tensor, copy: Tensor) -> bool:
        """Whether values on the CPU are equal. On an accelerator the comparison would synchronize."""
        return self.device.type == "cpu" and source.device.type == "cpu" and tensors_equal(source, copy)

    def changes(self) -> Changes:
        """The attributes and containers that `forward` changed on the replica."""
        changes = self._tracker.diff()
        if self._assigned_shards and not changes.is_structural:
            return Changes(False, [*changes.attributes, *self._written_shards()], changes.containers)
        return changes

    def written_statistics(self) -> WrittenStatistics | None:
        """The known running statistics, if `forward` has written any. `written_state` has to be called next."""
        if self.statistics is None:
            return None
        if not self.statistics.is_current():
            self._release_statistics()  # forward has set the data of a tensor
            return None
        return self.statistics.written(self.statistics_written, compare=self._compares_values)

    @property
    def _compares_values(self) -> bool:
        """Whether state is compared by value in this call. On an accelerator that synchronizes."""
        return self.device.type == "cpu" or self._value_checks_left[self.module.training] > 0

    def written_state(self) -> list[TensorPair]:
        """Other state tensors that `forward` wrote in place, as (source, copy).

        On the CPU values are compared. On an accelerator that would synchronize, so version counters are compared.
        Batch norm does not increment them for its statistics. It reports them if it is synchronized; those of torch's
        layers count as written in training mode. Other such writes are found by the first calls, which do compare
        values, and count as written in all later calls.
        """
        reported = set(self.statistics_written)
        self.statistics_written.clear()
        state = self.general_state
        if self.device.type == "cpu":
            return [pair for pair in state if not tensors_equal(pair[0].cpu(), pair[1])]
        compares_values = self._compares_values
        if compares_values:
            self._value_checks_left[self.module.training] -= 1
        if not state:
            return []
        norms = [module for module in self.modules if isinstance(module, _BatchNorm) and module.training]
        written = {id(copy) for _, copy in self._state_writes.written()} | self._unversioned | reported
        written.update(id(buffer) for norm in norms for buffer in norm.buffers(recurse=False))
        if self._statistics_moved:  # released since `sync_state`, which has not watched them
            written.update(id(copy) for _, copy in state)
        if compares_values:
            unknown = [pair for pair in state if id(pair[1]) not in written]
            self._unversioned.update(
                id(copy) for source, copy in unknown if source.device == self.device and not tensors_equal(source, copy)
            )
            written |= self._unversioned
        return [pair for pair in state if id(pair[1]) in written]

    def revert(self, changes: Changes) -> None:
        """Undo changes that `forward` made on the replica."""
        for change in changes.attributes:
            _, module = self.cloner.modules[change.module_index]
            table = module._buffers if change.is_buffer else module.__dict__
            if change.old is MISSING:
                table.pop(change.name, None)
            else:
                table[change.name] = change.old
        for container, before, _ in changes.containers:
            write_contents(container, before)
        self._tracker.accept(changes)


def _no_source() -> None:
    """The reference of a replica that belongs to no set."""


def _raise_on_zero_grad(*_: Any, **__: Any) -> None:
    raise BridgeError(
        "zero_grad() was called inside forward: gradients belong to the module, replicas have none.\n"
        "Call it outside forward, before backward()."
    )


class GraphContext(Protocol):
    """The collectives in which a replica took part (`collectives.group.ReplicaContext`)."""

    tokens: list[Tensor]
    """One token for each collective through which gradients flow, in order. Backward starts at them too."""


class RemoteGraph(Protocol):
    """The autograd graph of a replica in another process. The engine that runs the replica defines the class."""

    received_gradients: list[Tensor | None] | None
    """Gradients of the replica's parameters from its last backward, until they are collected."""

    def keep_inputs(self, positions: Sequence[int]) -> None:
        """Restrict the arguments that need a gradient to those at these positions."""
        ...


@dataclass
class RemoteEffects:
    """What the forward of a replica in another process did to tensors and containers of this one."""

    written_parameters: Sequence[Tensor] = ()
    """Trainable tensors of the source."""
    changed_containers: Sequence[str] = ()
    """Paths of shared containers."""
    written_arguments: Mapping[int, Tensor] = field(default_factory=dict)
    """The new values of arguments, by the id of the argument."""
    used_arguments: Collection[int] = ()
    """Ids of the arguments on which the outputs depend."""
    graph: RemoteGraph | None = None
    """The autograd graph, if forward recorded one."""


@dataclass
class ReplicaResult:
    """The output of one replica's forward, and what it changed."""

    output: Any = None
    changes: Changes = NO_CHANGES
    written_state: list[TensorPair] = field(default_factory=list)
    """Other state tensors that forward wrote in place, as (source, copy)."""
    error: BaseException | None = None
    remote: RemoteEffects = field(default_factory=RemoteEffects)
    """Empty for a replica in this process, whose effects are found on the objects themselves."""
    context: GraphContext | None = None
    """The collectives in which the replica took part."""
    statistics: WrittenStatistics | None = None
    """The running statistics of batch norm layers that are known by class, if forward may have written them."""


def run_replica(
    replica: Replica, method: str, args: list[Any], kwargs: dict[str, Any], compiler: Any = None
) -> ReplicaResult:
    """Run a method on one replica, and record what it changed."""
    function: Callable[..., Any] = replica.module if method == "forward" else getattr(replica.module, method)
    output = call_compiled(compiler, function, args, kwargs)
    changes, statistics = replica.changes(), replica.written_statistics()
    return ReplicaResult(output, changes, replica.written_state(), statistics=statistics)
