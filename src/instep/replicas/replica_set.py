"""All replicas of one source module, created and synchronized together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instep.devices import copy_to_replicas, module_device
from instep.errors import StateError, WrapError
from instep.replicas.clone import reaches_source
from instep.replicas.diff import STRUCTURE_CHANGED, Changes, ChangeTracker
from instep.replicas.fingerprint import ConfigFingerprint
from instep.replicas.names import module_names, parameter_write_error
from instep.replicas.replica import ModulePatch, Replica, ReplicaResult
from instep.replicas.shared_containers import SharedContainers
from instep.replicas.state.carried import CarriedValue
from instep.replicas.state.max_norm import is_weight_shared, max_norm_weights, merge_renormed_rows
from instep.replicas.tensors import ParameterSharing
from instep.replicas.write_watch import MemoryLayout, SavedValues, WriteDetector, data_ptr
from instep.runtime.backoff import NEVER, Backoff


class ReplicaSet:
    """One replica per device. `sync` creates them for the first call and updates them before each later one."""

    def __init__(
        self,
        source: nn.Module,
        devices: Sequence[torch.device],
        *,
        private_copies: bool = False,
        joint_graph: bool = False,
        patch: ModulePatch | None = None,
        share_tensors: Callable[[Iterable[Tensor]], None] | None = None,
        replica_classes: Sequence[type[Replica]] = (),
        source_device: torch.device | None = None,
    ) -> None:
        """`source_device` is the device that attributes of the source name, if it is not the first of `devices`."""
        self.source = source
        self._share_tensors = share_tensors
        """Moves the source's tensors to memory that the replicas can access."""
        self._replica_classes = replica_classes or [Replica] * len(devices)
        self.devices = list(devices)
        self._source_device = source_device or self.devices[0]
        classes = zip(self.devices, self._replica_classes, strict=True)
        can_share = [device == self.devices[0] or cls.is_remote for device, cls in classes]
        self.sharing = [_sharing_for(shares and not private_copies, joint_graph) for shares in can_share]
        self.patch = patch
        self._configured_sharing = list(self.sharing)
        self.frozen = False
        """Whether parameters count as unchanged and are not sent."""
        self.state_changed = False
        """Whether the last call changed state of the module."""
        self.replicas: list[Replica] = []
        self.shared_containers: SharedContainers
        """The containers of the source that replicas share."""
        self._private_weights: dict[int, Tensor] = {}
        """By id, trainable weights that `forward` rewrites (`max_norm`). Each replica has a copy."""
        self._shared_max_norm_weight = False
        self._private_containers: dict[int, Any] = {}
        """By id, containers that `forward` changes. Each replica has a copy."""
        self.overwritten_parameters: list[Tensor] = []
        """The parameters, among those written in the last call, that have the new values."""
        self.caller_only_accesses: list[Any] = []
        """Objects that a replica used and only the caller may use."""
        self.generation = 0
        """Incremented when the modules of the source are tracked anew."""
        self._running = False
        self._is_known_unchanged = False
        """Whether the forward of this call has run, and has had no local effects."""
        self._has_copies = False
        """Whether replicas have copies of parameters, which `sync` updates."""
        self.fingerprint = ConfigFingerprint()
        self._shared_object_changed = False
        """Whether an object that the replicas share was changed since the last call."""
        self._tracker: ChangeTracker | None = None
        self._prefetched_changes: Changes | None = None
        """The changes of the source for the next `sync`, if they are known already."""
        self._value_checks = Backoff(limit=NEVER, calls=1)
        """When to compare the values of trainable tensors before and after a call."""
        self._saved_values: SavedValues[int] | None = None
        """The values of trainable tensors before this call, by index, if the call is checked by value."""

    def sync(self) -> list[Replica]:
        """Update the replicas to the source and return them."""
        changes, self._prefetched_changes = self._prefetched_changes, None
        if changes is None:
            changes = self.find_source_changes()
        if changes.is_structural:
            self._create_replicas()
        elif changes:
            self._apply_changes(changes)
        if changes or self._shared_object_changed:
            self.fingerprint.update(self.replicas[0].source_modules, self._shared_object_changed)
            if self._shared_object_changed:
                for replica in self.replicas:
                    replica.on_shared_object_changed()
            self._shared_object_changed = False
        if self._has_copies:
            self._refresh_graph_copies()
            if not self.frozen:
                self._send_parameters()
        self._saved_values, self._is_known_unchanged = self._save_values(), False
        self._version_detector.reset()
        self._running = True
        return self.replicas

    def _save_values(self) -> SavedValues[int] | None:
        """Save trainable leaves before the first call, and on the CPU before ever fewer of the later ones.

        A tensor with a history, which an earlier call set, is state.
        """
        shares = self.sharing[0] in (ParameterSharing.ALIAS, ParameterSharing.SOURCE)
        if not shares or not self._value_checks.is_due:
            return None
        sources = enumerate(source for source, _ in self.replicas[0].trainable)
        return SavedValues((index, source) for index, source in sources if source.is_leaf)

    def has_shared_max_norm_weight(self) -> bool:
        """Whether code outside of an `Embedding(max_norm=...)` uses its weight, which the embedding rewrites."""
        return self._shared_max_norm_weight

    def attribute_name(self, value: Any) -> str:
        """The dotted name of the attribute that is this value; its type if no attribute is."""
        for prefix, module in self.source.named_modules():
            for name, attribute in module.__dict__.items():
                if attribute is value:
                    return f"{prefix}.{name}" if prefix else name
        return type(value).__name__

    def holds_any(self, objects: Sequence[Any]) -> bool:
        """Whether the source holds one of these caller-only objects."""
        return any(self.replicas[0].cloner.has_clone(value) for value in objects)

    def restore_changed(self) -> list[str]:
        """Restore shared containers that `forward` changed. Returns their paths."""
        return [str(self.shared_containers.paths[id(container)]) for container in self.restore_containers()]

    def privatize(self, paths: Sequence[str]) -> None:
        """Give each replica a copy of the shared containers at some paths from now on."""
        changed = self.shared_containers.at_paths(paths)
        for container in changed:
            if id(container) in self._private_containers:
                raise StateError(
                    f"forward changes {str(self.shared_containers.paths[id(container)])!r}, which all replicas share "
                    f"because it cannot be copied.\nChange it outside forward."
                )
            self._private_containers[id(container)] = container
        if changed:
            self.discard()

    def restore_containers(self) -> list[Any]:
        """Undo changes of `forward` to shared containers. Returns the containers."""
        found = self.shared_containers.restore() if self._running and not self._is_known_unchanged else []
        self._running = False  # last: an interrupted restore runs again
        return found

    def deferred_restore(self) -> Callable[[], object]:
        """A function that restores shared containers after replicas of a failed call have ended."""
        return self.shared_containers.restore if self._running else lambda: None

    def record_state_attributes(self, results: Sequence[ReplicaResult]) -> None:
        """Exclude attributes that `forward` set from the configuration fingerprint."""
        modules = self.replicas[0].source_modules
        changes = [change for result in results for change in result.changes.attributes]
        if changes:
            self.fingerprint.exclude_state([(modules[change.module_index], change.name) for change in changes], modules)

    def finish_call(self) -> None:
        """End a call. Later changes of shared containers are the user's."""
        self._running = False

    @property
    def will_save_values(self) -> bool:
        """Whether the next `sync` saves values of parameters, which then must not change before the call."""
        return self._value_checks.is_due

    def prefetch_changes(self) -> None:
        """Find the changes of the source ahead of the next `sync`."""
        self._prefetched_changes = self.find_source_changes()

    def discard_prefetched(self) -> None:
        """Drop prefetched changes, because there may be more by now."""
        self._prefetched_changes = None

    def find_source_changes(self) -> Changes:
        """Find what changed on the source since the last call, except the values of tensors."""
        if self._tracker is None or not self._layout.is_unchanged():
            return STRUCTURE_CHANGED
        changed = self.shared_containers.changed()
        if changed:
            if any(id(container) not in self._private_containers for container in changed):
                self._shared_object_changed = True
            if any(reaches_source(container, self._private_containers) for container in changed):
                return STRUCTURE_CHANGED
            self._track_containers()
        return self._tracker.diff()

    def find_changes_if_tracked(self) -> Changes | None:
        """The same; None if the source is not tracked, e.g. after a failure."""
        return None if self._tracker is None else self.find_source_changes()

    @property
    def private_weights(self) -> Mapping[int, Tensor]:
        """By id, trainable weights that `forward` rewrites (`max_norm`). Each replica has a copy."""
        return self._private_weights

    @property
    def needs_state_sync(self) -> bool:
        """Whether replicas have to copy buffers and other state from the source before they run."""
        return self.state_changed or not self.frozen

    def check_local_effects(self) -> bool:
        """Check whether the forward in this process changed what replicas share, or used what only the caller may use.

        If not, the rest of the call does not look for such changes again: this is called when the forward has ended.
        """
        found = bool(
            self.caller_only_accesses
            or self.shared_containers.changed()
            or self._version_detector.written()
            or self._address_detector.written()
            or (self._saved_values and self._saved_values.changed())
        )
        self._is_known_unchanged = not found
        return found

    def find_written_parameters(self) -> list[Tensor]:
        """Find trainable tensors of the source that `forward` wrote to in this call.

        Writes through `.data` do not increment the version counter. Some calls are checked by value (`_save_values`);
        the writes are undone there.
        """
        self.overwritten_parameters = []
        saved = self._end_value_check()
        if self._is_known_unchanged:
            return []
        if saved and (changed := saved.changed()):
            saved.restore(changed)
            return [self.replicas[0].trainable[index][0] for index in changed]
        found = [*self._version_detector.written(), *self._address_detector.written()]
        self.overwritten_parameters = [source for source, tensor in found if tensor.data_ptr() == source.data_ptr()]
        return [source for source, _ in found]

    def _end_value_check(self) -> SavedValues[int] | None:
        """Count a call of which parameters may have been checked by value. Returns the saved values."""
        saved, self._saved_values = self._saved_values, None
        if saved:
            self._value_checks.record()
            if self.devices[0].type != "cpu":
                self._value_checks.stop()
        self._value_checks.advance()
        return saved

    def finish_unchanged_call(self) -> bool:
        """End a call whose forward had no local effects. Returns False, and does nothing, if it had some.

        It does the same as `restore_containers`, `find_written_parameters` and `finish_call` then.
        """
        if self.check_local_effects():
            return False
        self.overwritten_parameters = []
        self._end_value_check()
        self._running = False
        return True

    def discard(self) -> None:
        """Create new replicas for the next call."""
        self._tracker = self._prefetched_changes = None
        self.replicas = []

    def _apply_changes(self, changes: Changes) -> None:
        """Apply changes of the source to every replica. If there are new modules, create new replicas."""
        before = len(self.replicas[0].cloner.modules)
        for replica in self.replicas:
            replica.apply(changes)
        same = len(self.replicas[0].cloner.modules) == before
        if same and max_norm_weights(self.source.modules()).keys() == self._private_weights.keys():
            self._track_source()
        else:
            self._create_replicas()

    def _create_replicas(self) -> None:
        expected, device = self.devices[0], module_device(self.source)
        if device not in (None, expected):
            raise WrapError(
                f"the module was moved to {device} after it was wrapped for {expected}.\n"
                f"Wrap it again: instep.DataParallel(model, device_ids=[...])."
            )
        _check_dense(self.source)
        if self._share_tensors is not None:
            self._share_tensors([*self.source.parameters(), *self.source.buffers()])
        self._private_weights = max_norm_weights(self.source.modules())
        self.sharing = [
            ParameterSharing.DIFFERENTIABLE_COPY if self._private_weights and s is ParameterSharing.SOURCE else s
            for s in self._configured_sharing
        ]
        self.replicas = [self._create_replica(index) for index in range(len(self.devices))]
        self._track_source()

    @property
    def modules(self) -> list[nn.Module] | None:
        """The modules of the source, registered or not; None before the replicas are created."""
        return self.replicas[0].source_modules if self.replicas else None

    def _track_source(self) -> None:
        self.generation += 1
        shared = (ParameterSharing.ALIAS, ParameterSharing.SOURCE)
        self._has_copies = bool(self._private_weights) or any(sharing not in shared for sharing in self.sharing)
        self._shared_max_norm_weight = bool(self._private_weights) and is_weight_shared(
            self.replicas[0].source_modules, self._private_weights
        )
        first = self.replicas[0]
        containers = [(value, items) for value, items, _ in first.cloner.containers]
        trainable, state = ([source for source, _ in pairs] for pairs in (first.trainable, first.tensors.state))
        joint = ParameterSharing.SOURCE in self.sharing  # such replicas use the source's tensors wherever they are
        self._tracker = ChangeTracker(first.source_modules, containers, [*trainable, *state] if joint else state)
        self._layout = MemoryLayout([] if joint else trainable)
        self._track_containers()
        self._watch_writes()

    def _track_containers(self) -> None:
        first = self.replicas[0]
        modules = first.source_modules
        self.shared_containers = SharedContainers(modules, module_names(self.source, modules), first.cloner)
        paths = self.shared_containers.paths
        private_paths = [str(paths[key]) for key in self._private_containers if key in paths]
        for replica in self.replicas:
            replica.private_container_paths = private_paths
            replica.container_paths = self.shared_containers.paths
            replica.source_changes_ref = weakref.WeakMethod(self.find_changes_if_tracked)

    def _watch_writes(self) -> None:
        local = [replica for replica in self.replicas if not replica.is_remote]  # nobody writes to stand-ins
        trainable = [pair for replica in local for pair in replica.trainable]
        pairs = [(source, tensor) for source, tensor in trainable if id(source) not in self._private_weights]
        counters = {}  # replicas that share memory with the source share its version counter
        for source, tensor in pairs:
            if not tensor.is_inference():
                counters[id(source) if tensor.data_ptr() == source.data_ptr() else id(tensor)] = (source, tensor)
        leaves = [(source, tensor) for source, tensor in pairs if tensor is not source and tensor.is_leaf]
        self._version_detector = WriteDetector(list(counters.values()), [tensor for _, tensor in counters.values()])
        self._address_detector = WriteDetector(leaves, [tensor for _, tensor in leaves], read=data_ptr)

    def _create_replica(self, index: int) -> Replica:
        return self._replica_classes[index](
            index,
            self.source,
            self.devices[index],
            self.sharing[index],
            source_device=self._source_device,
            patch=self.patch,
            private_containers=self._private_containers,
            private_weights=self._private_weights,
            caller_only_accesses=self.caller_only_accesses,
        )

    def _refresh_graph_copies(self) -> None:
        """Create replicas with differentiable copies anew: the copies belong to the graph of one call."""
        for index, sharing in enumerate(self.sharing):
            if sharing is ParameterSharing.DIFFERENTIABLE_COPY:
                self.replicas[index] = self._create_replica(index)
        if ParameterSharing.DIFFERENTIABLE_COPY in self.sharing:
            self._watch_writes()

    def _send_parameters(self) -> None:
        """Copy parameters to the replicas that do not share the source's memory."""
        copies = self._replicas_with(ParameterSharing.COPY)
        if copies:
            sources = [source for source, _ in copies[0].trainable]
            copy_to_replicas(sources, [[leaf for _, leaf in replica.trainable] for replica in copies])
        if self._private_weights:
            for replica in self._replicas_with(ParameterSharing.ALIAS):
                pairs = [pair for pair in replica.trainable if id(pair[0]) in self._private_weights]
                copy_to_replicas([source for source, _ in pairs], [[leaf for _, leaf in pairs]])

    def _replicas_with(self, sharing: ParameterSharing) -> list[Replica]:
        return [replica for replica, own in zip(self.replicas, self.sharing, strict=True) if own is sharing]

    def renormed_values(self, active: int) -> list[tuple[Tensor, Tensor]]:
        """The private weights of which `forward` rewrote rows, with their new values. `active` replicas took part."""
        found = []
        for key, weight in self._private_weights.items():
            copies = [copy for replica in self.replicas[:active] for s, copy in replica.trainable if id(s) == key]
            try:
                values = merge_renormed_rows(weight, copies)
            except ValueError:
                raise parameter_write_error(self.source, [weight]) from None
            if values is not None:
                found.append((weight, values))
        return found

    def release_carried(self, values: Sequence[CarriedValue], active: int) -> None:
        """Drop the copies of carried state on replicas that take no part in a call."""
        for replica in self.replicas[active:]:
            replica.assign_shard([value.attribute for value in values], None)


def _sharing_for(can_share: bool, joint_graph: bool) -> ParameterSharing:
    if joint_graph:
        return ParameterSharing.SOURCE if can_share else ParameterSharing.DIFFERENTIABLE_COPY
    return ParameterSharing.ALIAS if can_share else ParameterSharing.COPY


def _check_dense(source: nn.Module) -> None:
    """Raise `WrapError` for a sparse trainable parameter. Its gradients may be sparse."""
    for name, parameter in source.named_parameters():
        if parameter.requires_grad and parameter.layout is not torch.strided:
            raise WrapError(
                f"the parameter {name!r} is a {parameter.layout} tensor. Replicas cannot share it, because it gets new "
                f"memory whenever it changes.\n"
                f"Make it a dense parameter, and convert it to a sparse tensor in forward."
            )
