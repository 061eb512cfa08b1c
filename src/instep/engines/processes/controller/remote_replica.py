"""The controller's stand-in for a replica that runs in a worker."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from instep.engines.processes.transport.cuda_driver import DeviceMemory
from instep.engines.processes.transport.cuda_ipc import can_reach
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.replicas.clone import reaches_source
from instep.replicas.diff import AttributeChange, Changes
from instep.replicas.object_graph import is_atomic
from instep.replicas.stand_in import ReplicaStandIn
from instep.replicas.state.batch_norm import FlatCopy
from instep.replicas.state.carried import Attribute
from instep.replicas.tensors import ParameterSharing
from instep.runtime.locks import ForkSafeLock

module_ids = itertools.count(1)
"""Ids of modules, and of memory, that workers have."""


class ChangeRecorder(Protocol):
    """A call that may be replayed, which records changes of its module."""

    def record_values(self, values: Mapping[int, Tensor]) -> None:
        """Record the values of module tensors that are written now, by `id()` of the tensor."""
        ...

    def record_blocks(self, blocks: Sequence[FlatCopy]) -> None:
        """Record the values of module tensors that are written now, as flat copies."""
        ...

    def record_changes(self, changes: Changes) -> None:
        """Record the old values of attributes and containers that change now."""
        ...


_recorders: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ChangeRecorder]] = weakref.WeakKeyDictionary()
_recorders_lock = ForkSafeLock()


def register_recorder(root: nn.Module, recorder: ChangeRecorder) -> None:
    """Let a call record the changes of a module."""
    with _recorders_lock:
        _recorders.setdefault(root, weakref.WeakSet()).add(recorder)


def registered_recorders(root: nn.Module) -> list[ChangeRecorder]:
    """The calls that record the changes of a module."""
    with _recorders_lock:
        return list(_recorders.get(root, ()))


def is_same_accelerator(device: torch.device, source_device: torch.device) -> bool:
    """Whether a worker's device is the accelerator of the source."""
    return device == source_device and device.type != "cpu"


class RemoteReplica(ReplicaStandIn):
    """The controller's stand-in for a replica in a worker. It records what the worker has not been sent yet."""

    def __init__(
        self,
        index: int,
        source: nn.Module,
        device: torch.device,
        sharing: ParameterSharing,
        *,
        source_device: torch.device,
        **kwargs: Any,
    ) -> None:
        self.worker_device = device
        """The worker's device."""
        self.source_device = source_device
        """The source module's device."""
        self.worker_moves_args = False
        """Whether the worker moves the arguments of the next call to its device."""
        self.module_id = next(module_ids)
        """The id by which the worker refers to the module."""
        self.needs_full_sync = True
        """Whether the whole module has to be sent again."""
        self.needs_state_refresh = False
        """Whether the worker has to refresh state even if the call does not say so."""
        self.pending_attributes: list[AttributeChange] = []
        """Attributes to send, if the module is not sent as a whole."""
        patch: Any = kwargs.get("patch")
        self.sync_batchnorm: bool | None = None if patch is None else patch.enabled
        """Whether batch normalization is synchronized."""
        self.worker_states: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """By client: the module state its worker has."""
        self.gradient_memory: SharedMemory | DeviceMemory | None = None
        """The memory that the worker writes gradients to."""
        self.recreate = partial(type(self), index, source, device, sharing, source_device=source_device, **kwargs)
        """Creates another remote replica with the same arguments."""
        self.carried_state: list[tuple[int, str, Any]] = []
        """Shards of carried state for the next call: the submodule's index, the attribute, the shard."""
        # Arguments for another accelerator are first moved to the source's device, from where the worker gets them.
        argument_device = source_device if source_device.type != "cpu" and device.type != "cpu" else device
        super().__init__(index, source, argument_device, sharing, source_device=source_device, **kwargs)
        self.name = f"replica {index} on {device}"
        self.same_device = is_same_accelerator(device, source_device) and sharing is ParameterSharing.ALIAS
        """Whether the worker uses the source's memory, on its device."""
        self.may_use_ipc = self.same_device or can_reach(device, source_device)
        """Whether tensors are sent through memory on the source's device, if the worker can open it."""

    def accepts_host_arguments(self, chosen: bool) -> bool:
        self.worker_moves_args = (
            not chosen and self.worker_device != self.source_device and self.worker_device.type != "cpu"
        )
        return self.worker_moves_args

    def apply(self, changes: Changes) -> None:
        super().apply(changes)
        for recorder in registered_recorders(self.source_modules[0]):
            recorder.record_changes(changes)
        plain = all(is_atomic(c.new) or not reaches_source(c.new) for c in changes.attributes)
        if changes.containers or not plain or any(change.is_buffer for change in changes.attributes):
            self.needs_full_sync = True
        else:
            self.pending_attributes += changes.attributes

    def sync_state(self) -> None:
        self.needs_state_refresh = True

    def on_shared_object_changed(self) -> None:
        self.needs_full_sync = True

    def assign_shard(self, attributes: Sequence[Attribute], shards: Sequence[Any] | None) -> None:
        super().assign_shard(attributes, shards)
        indices = {id(module): index for index, module in enumerate(self.source_modules)}
        self.carried_state = []
        if shards is not None:
            self.carried_state = [
                (indices[id(owner)], name, shard) for (owner, name), shard in zip(attributes, shards, strict=True)
            ]
        elif attributes:
            self.needs_full_sync = True
