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
    """One replica a device. `ready` makes them when they are first needed and follows the source at every call."""

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
        """Moves the source's tensors to where its replicas can reach them."""
        self._replica_classes = replica_classes or [Replica] * len(devices)
        self.devices = list(devices)
        self._source_device = source_device or self.devices[0]
        near = [
            d == self.devices[0] or kind.is_remote for d, kind in zip(self.devices, self._replica_classes, strict=True)
        ]
        self.sharing = [_sharing_for(is_near and not private_copies, joint_graph) for is_near in near]
        self.patch = patch
        self._configured_sharing = list(self.sharing)
        self.frozen = False
        """Whether values are taken as unchanged: nothing is sent or compared."""
        self.state_changed = False
        """Whether the last call changed state of the module."""
        self.replicas: list[Replica] = []
        self.shared_containers: SharedContainers
        """The containers of the source, and which of them replicas share."""
        self._private_weights: dict[int, Tensor] = {}
        """By their ids, trainable weights that `forward` itself rewrites: each replica has its own."""
        self._shared_max_norm_weight = False
        self._private_containers: dict[int, Any] = {}
        """By their ids, containers that each replica has for itself, because `forward` changes them."""
        self.overwritten_parameters: list[Tensor] = []
        """Of the tensors that were last found written, those that hold now what `forward` wrote."""
        self.caller_only_accesses: list[Any] = []
        """Iterators of the source that a replica wanted something of."""
        self.generation = 0
        """How many times the modules of the source were taken stock of."""
        self._running = False
        self.fingerprint = ConfigFingerprint()
        self._shared_object_changed = False
        """Whether something inside an object that the source holds was changed since the last call."""
        self._tracker: ChangeTracker | None = None
        self._prefetched_changes: Changes | None = None
        """What was found by looking ahead of a call."""
        self._value_checks = Backoff(limit=NEVER, calls=1)
        """When to compare the values of trainable tensors before and after a call."""
        self._saved_values: SavedValues[int] = SavedValues()
        """The values of trainable tensors before this call, by index, if the call is checked by value."""

    def sync(self) -> list[Replica]:
        """The replicas, with everything that changed on the source since the last call."""
        changes, self._prefetched_changes = (
            self.source_changes() if self._prefetched_changes is None else self._prefetched_changes,
            None,
        )
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
        self._refresh_graph_copies()
        if not self.frozen:
            self._send_parameters()
        self._saved_values = self._save_values()
        self._version_detector.reset()
        self._running = True
        return self.replicas

    def _save_values(self) -> SavedValues[int]:
        """Save trainable leaves before the first call, and on the CPU before ever fewer of the later ones.

        A tensor with a history, which an earlier call set, is state.
        """
        shares = self.sharing[0] in (ParameterSharing.ALIAS, ParameterSharing.SOURCE)
        if not shares or not self._value_checks.is_due:
            return SavedValues()
        sources = enumerate(source for source, _ in self.replicas[0].trainable)
        return SavedValues((index, source) for index, source in sources if source.is_leaf)

    def has_shared_max_norm_weight(self) -> bool:
        """Whether code outside of an `Embedding(max_norm=...)` uses its weight, which the embedding rewrites."""
        return self._shared_max_norm_weight

    def attribute_name(self, held: Any) -> str:
        """What an attribute of a module is called that holds this; its type, if it is deeper inside."""
        modules = [module for module in self.source.modules() if any(v is held for v in module.__dict__.values())]
        if not modules:
            return type(held).__name__
        prefix = module_names(self.source, modules[:1])[0]
        name = next(key for key, value in modules[0].__dict__.items() if value is held)
        return f"{prefix}.{name}" if prefix else name

    def holds_any(self, iterators: Sequence[Any]) -> bool:
        """Whether the source holds one of these."""
        return any(self.replicas[0].cloner.has_clone(iterator) for iterator in iterators)

    def privatize_changed(self, places: Sequence[str] = ()) -> bool:
        """Whether `forward` changed containers that replicas share, here or, at these places, elsewhere.

        Then they are put back, and from now on each replica has its own.
        """
        changed = {
            id(container): container
            for container in (*self.restore_containers(), *self.shared_containers.at_paths(places))
        }.values()
        if not changed:
            return False
        for container in changed:
            if id(container) in self._private_containers:
                raise StateError(
                    f"forward changes {str(self.shared_containers.paths[id(container)])!r}, which every replica would "
                    f"do once more, and of which no copy can be made for each.\nChange it outside forward."
                )
            self._private_containers[id(container)] = container
        self.discard()
        return True

    def restore_containers(self) -> list[Any]:
        """Put back what `forward` changed in containers that replicas share, and say which those were."""
        found = self.shared_containers.restore() if self._running else []
        self._running = False  # not before: an interrupted one is called again
        return found

    def deferred_restore(self) -> Callable[[], object]:
        """What puts the containers of this call back, if its replicas go on after it has failed."""
        return self.shared_containers.restore if self._running else lambda: None

    def record_state_attributes(self, outcomes: Sequence[ReplicaResult]) -> None:
        """What these calls of `forward` have set is state, and no setting of the module's."""
        modules = self.replicas[0].source_modules
        changes = [change for outcome in outcomes for change in outcome.changes.attributes]
        if changes:
            self.fingerprint.exclude_state([(modules[change.module_index], change.name) for change in changes], modules)

    def finish_call(self) -> None:
        """The call is over: what changes from now on is the user's doing."""
        self._running = False

    def prefetch_changes(self) -> None:
        """Look for changes now: `ready` does not have to, if it is known by then that there were no more."""
        self._prefetched_changes = self.source_changes()

    def discard_prefetched(self) -> None:
        """What was found by looking ahead may no longer be all."""
        self._prefetched_changes = None

    def source_changes(self) -> Changes:
        """What changed on the source since the last call, apart from values."""
        if self._tracker is None or not self._layout.is_unchanged():
            return STRUCTURE_CHANGED
        moved = self.shared_containers.changed()
        if moved:
            self._shared_object_changed = self._shared_object_changed or any(
                id(container) not in self._private_containers for container in moved
            )
            if any(reaches_source(container, self._private_containers) for container in moved):
                return STRUCTURE_CHANGED
            self._track_containers()
        return self._tracker.diff()

    def source_changes_if_tracked(self) -> Changes | None:
        """The same; None where nobody has watched, after a failure or when the replicas were given up."""
        return None if self._tracker is None else self.source_changes()

    @property
    def private_weights(self) -> Mapping[int, Tensor]:
        """By their ids, trainable weights that `forward` itself rewrites: each replica has its own."""
        return self._private_weights

    @property
    def needs_state_sync(self) -> bool:
        """Whether replicas have to look at the source's buffers and other state before they run."""
        return self.state_changed or not self.frozen

    def written_parameters(self) -> list[Tensor]:
        """Trainable tensors of the source that `forward` wrote to in this call.

        Writes through `.data` do not increment the version counter. Some calls are checked by value (`_save_values`);
        the writes are undone there.
        """
        self.overwritten_parameters = []
        saved, self._saved_values = self._saved_values, SavedValues()
        if saved:
            self._value_checks.record()
            if self.devices[0].type != "cpu":
                self._value_checks.stop()
        self._value_checks.advance()
        changed = saved.changed()
        if changed:
            saved.restore(changed)
            return [self.replicas[0].trainable[index][0] for index in changed]
        found = [*self._version_detector.written(), *self._address_detector.written()]
        self.overwritten_parameters = [source for source, tensor in found if tensor.data_ptr() == source.data_ptr()]
        return [source for source, _ in found]

    def discard(self) -> None:
        """Make the replicas anew at the next call: after a failure nobody knows what they hold."""
        self._tracker = self._prefetched_changes = None
        self.replicas = []

    def _apply_changes(self, changes: Changes) -> None:
        """Set on every replica what was set on the source; new modules need new replicas."""
        before = len(self.replicas[0].cloner.modules)
        for replica in self.replicas:
            replica.apply(changes)
        same = len(self.replicas[0].cloner.modules) == before
        if same and max_norm_weights(self.source.modules()).keys() == self._private_weights.keys():
            self._track_source()
        else:
            self._create_replicas()

    def _create_replicas(self) -> None:
        home, now = self.devices[0], module_device(self.source)
        if now not in (None, home):
            raise WrapError(
                f"the module was moved to {now} after it was wrapped for {home}.\n"
                f"Wrap it anew: instep.DataParallel(model, device_ids=[...])."
            )
        _check_dense(self.source)
        if self._share_tensors is not None:
            self._share_tensors([*self.source.parameters(), *self.source.buffers()])
        self._private_weights = max_norm_weights(self.source.modules())
        self.sharing = [
            ParameterSharing.DIFFERENTIABLE_COPY if self._private_weights and way is ParameterSharing.SOURCE else way
            for way in self._configured_sharing
        ]
        places = zip(self.devices, self.sharing, strict=True)
        self.replicas = [self._create_replica(index, *place) for index, place in enumerate(places)]
        self._track_source()

    @property
    def modules(self) -> list[nn.Module] | None:
        """The modules of the source, registered or not; None before they are known."""
        return self.replicas[0].source_modules if self.replicas else None

    def _track_source(self) -> None:
        self.generation += 1
        self._shared_max_norm_weight = bool(self._private_weights) and is_weight_shared(
            self.replicas[0].source_modules, self._private_weights
        )
        first = self.replicas[0]
        containers = [(value, items) for value, items, _ in first.cloner.containers]
        trainable, state = ([source for source, _ in pairs] for pairs in (first.trainable, first.tensors.state))
        joint = (
            ParameterSharing.SOURCE in self.sharing
        )  # replicas that hold the source's own tensors follow wherever these move
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
            replica.source_changes_ref = weakref.WeakMethod(self.source_changes_if_tracked)

    def _watch_writes(self) -> None:
        trainable = [pair for replica in self.replicas for pair in replica.trainable]
        pairs = [(source, tensor) for source, tensor in trainable if id(source) not in self._private_weights]
        counters = {}  # replicas that share memory with the source share its version counter
        for source, tensor in pairs:
            if not tensor.is_inference():
                counters[id(source) if tensor.data_ptr() == source.data_ptr() else id(tensor)] = (source, tensor)
        leaves = [(source, tensor) for source, tensor in pairs if tensor is not source and tensor.is_leaf]
        self._version_detector = WriteDetector(list(counters.values()), [tensor for _, tensor in counters.values()])
        self._address_detector = WriteDetector(leaves, [tensor for _, tensor in leaves], read=data_ptr)

    def _create_replica(self, index: int, device: torch.device, sharing: ParameterSharing) -> Replica:
        return self._replica_classes[index](
            index,
            self.source,
            device,
            sharing,
            source_device=self._source_device,
            patch=self.patch,
            private_containers=self._private_containers,
            private_weights=self._private_weights,
            caller_only_accesses=self.caller_only_accesses,
        )

    def _refresh_graph_copies(self) -> None:
        """Replicas that are linked to the source's graph are made anew: their tensors belong to one call."""
        for index, way in enumerate(self.sharing):
            if way is ParameterSharing.DIFFERENTIABLE_COPY:
                self.replicas[index] = self._create_replica(index, self.devices[index], way)
        if ParameterSharing.DIFFERENTIABLE_COPY in self.sharing:
            self._watch_writes()

    def _send_parameters(self) -> None:
        """Parameters to the replicas that have memory of their own."""
        far = [
            replica for replica, way in zip(self.replicas, self.sharing, strict=True) if way is ParameterSharing.COPY
        ]
        if far:
            sources = [source for source, _ in far[0].trainable]
            copy_to_replicas(sources, [[leaf for _, leaf in replica.trainable] for replica in far])
        if self._private_weights:
            near = [
                replica
                for replica, way in zip(self.replicas, self.sharing, strict=True)
                if way is ParameterSharing.ALIAS
            ]
            apart = [[pair for pair in replica.trainable if id(pair[0]) in self._private_weights] for replica in near]
            for pairs in apart:
                copy_to_replicas([source for source, _ in pairs], [[leaf for _, leaf in pairs]])

    def renormed_values(self, active: int) -> list[tuple[Tensor, Tensor]]:
        """Weights that `forward` itself rewrote rows of, each with its new values."""
        found = []
        for key, weight in self._private_weights.items():
            copies = [held for replica in self.replicas[:active] for s, held in replica.trainable if id(s) == key]
            try:
                values = merge_renormed_rows(weight, copies)
            except ValueError:
                raise parameter_write_error(self.source, [weight]) from None
            if values is not None:
                found.append((weight, values))
        return found

    def release_carried(self, slots: Sequence[CarriedValue], active: int) -> None:
        """Let replicas that have no part in a call forget carried state that the others get parts of."""
        for replica in self.replicas[active:]:
            replica.assign_shard(slots, None)


def _sharing_for(near: bool, joint: bool) -> ParameterSharing:
    if joint:
        return ParameterSharing.SOURCE if near else ParameterSharing.DIFFERENTIABLE_COPY
    return ParameterSharing.ALIAS if near else ParameterSharing.COPY


def _check_dense(source: nn.Module) -> None:
    """`WrapError` for a weight that is sparse itself; gradients may be."""
    for name, parameter in source.named_parameters():
        if parameter.requires_grad and parameter.layout is not torch.strided:
            raise WrapError(
                f"the parameter {name!r} is a {parameter.layout} tensor, which gets new memory whenever it changes: "
                f"replicas would lose sight of it.\n"
                f"Keep its values as a dense parameter, and make it sparse in forward."
            )
