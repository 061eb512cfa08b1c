"""Replaying a worker's forward on a replacement, if the worker died before the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from instep.autograd.bridge import Gradients
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.remote_module import RemoteModuleState, versioned_tensors
from instep.engines.processes.controller.remote_replica import RemoteReplica, register_recorder, registered_recorders
from instep.engines.processes.controller.rendezvous import CollectiveLog
from instep.engines.processes.messages import ForwardRequest
from instep.engines.processes.transport.channel import reply_rebuilder
from instep.errors import WorkerFailure
from instep.replicas.diff import MISSING, Changes
from instep.replicas.object_graph import Contents, is_atomic, read_contents, tensors_equal, write_contents
from instep.replicas.state.batch_norm import FlatCopy, flat_copies
from instep.replicas.write_watch import WriteDetector
from instep.structure.tree import map_tensors, tensors_in

AttributeKey = tuple[nn.Module, str, bool]
"""A module, the name of an attribute, and whether it is a buffer."""


@dataclass(eq=False)
class ReplayableCall:
    """The graph of a replica in a worker, and what is needed to replay its forward.

    When it is freed, the worker can drop the call too. It does not reference its `RemoteReplica`, which references
    tensors that earlier calls left on the module, and so the graphs of these calls.
    """

    call_id: int
    client: WorkerClient
    module_state: RemoteModuleState
    name: str
    recreate_replica: Callable[[], RemoteReplica]
    """Creates a remote replica of the module's current state."""
    private_containers: list[str]
    """Paths of containers of which each replica has a copy."""
    modules: list[nn.Module]
    source_changes_ref: Callable[[], Callable[[], Changes | None] | None]
    """A weak reference to the function that compares the module with its state at the last call."""
    request: ForwardRequest
    collectives: CollectiveLog
    arguments: list[Tensor]
    output_indices: dict[int, int] = field(default_factory=dict)
    """By `id()` of an output tensor: its index."""
    output_versions: dict[int, int] = field(default_factory=dict)
    """By the index of an output tensor: its version when it was received."""
    input_indices: list[int] = field(default_factory=list)
    """Indices of the arguments that need a gradient."""
    old_attributes: dict[AttributeKey, Any] = field(default_factory=dict)
    """Old values of attributes and buffers that have changed since."""
    old_contents: dict[int, tuple[Any, Contents]] = field(default_factory=dict)
    """By `id()`: containers that have changed since, with their old contents."""
    old_values: dict[int, Tensor] = field(default_factory=dict)
    """By `id()` of a module tensor: its value before it was written."""
    old_blocks: dict[tuple[int, ...], FlatCopy] = field(default_factory=dict)
    """By the `id()`s of module tensors: their values before they were written, not yet in `old_values`."""
    is_exact: bool = True
    """Whether the module's state before the call can be restored."""
    consumed_tokens: list[list[int]] = field(default_factory=list)
    """Collective tokens that each earlier backward has consumed."""
    arguments_changed: bool = False
    """Whether `forward` changed its arguments, so that it cannot be replayed."""
    is_prepared: bool = False
    """Whether the worker ran it as a prepared forward, so that it knows which gradients a backward returns."""
    received_gradients: Gradients | None = None
    """Gradients of the replica's parameters from the last backward, until they are collected."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.client.released.append, ("call", self.call_id))
        self._source_ids, self._local_indices = self.module_state.source_ids, self.module_state.local_indices
        self.record_versions()
        self._replica: RemoteReplica | None = None  # keeps a replayed module: the worker drops it with the replica
        register_recorder(self.modules[0], self)

    @property
    def is_first_run(self) -> bool:
        """Whether the forward was not run again on a replacement."""
        return self._replica is None

    def keep_inputs(self, positions: Sequence[int]) -> None:
        self.input_indices = [self.input_indices[position] for position in positions]

    def record_versions(self) -> None:
        """Record tensor versions: later writes count as after the forward."""
        self._argument_versions = WriteDetector(*versioned_tensors(self.arguments))
        self._module_versions = WriteDetector(*self.module_state.versioned)

    def tensor_indices(self, leaves: Sequence[Tensor]) -> list[int | None]:
        """The leaves' indices in the worker's tensor table; None for a leaf that is not in it."""
        return list(map(self._local_indices.get, map(id, leaves)))

    def changed_tensors(self) -> tuple[list[int], list[int]]:
        """Indices of arguments, and of module tensors, written to since the forward."""
        return self._argument_versions.written(), self._module_versions.written()

    def record_changes(self, changes: Changes) -> None:
        """Record the old values of attributes and containers that change now."""
        for change in changes.attributes:
            key = self.modules[change.module_index], change.name, change.is_buffer
            self.old_attributes.setdefault(key, _detached(change.old))
        for container, before, _ in changes.containers:
            if id(container) in self.old_contents:
                continue
            if any(map(_holds_graph, before.items)):
                self.is_exact = False
            else:
                self.old_contents[id(container)] = (
                    container,
                    Contents(before.keys, tuple(map(_detached_item, before.items))),
                )
        self.is_exact = self.is_exact and not changes.is_structural

    def record_values(self, values: Mapping[int, Tensor]) -> None:
        """Record the values of module tensors that are written now, by `id()`. Values recorded earlier are kept."""
        self._separate_blocks()
        for key, value in values.items():
            self.old_values.setdefault(key, value)

    def record_blocks(self, blocks: Sequence[FlatCopy]) -> None:
        """Record the values of module tensors that are written now, as flat copies."""
        for copy in blocks:
            self.old_blocks.setdefault(copy.keys, copy)

    def _separate_blocks(self) -> None:
        for copy in self.old_blocks.values():
            for tensor, value in copy.split():
                self.old_values.setdefault(id(tensor), value)
        self.old_blocks = {}

    def ensure_on(self, client: WorkerClient, outputs: Sequence[Tensor]) -> list[list[int]]:
        """Make sure that a worker has the graph. Returns the tokens to consume again after a replay.

        `outputs` are outputs of the forward that the caller has.
        """
        if client is self.client:
            return []
        self._replay(client, outputs)
        return self.consumed_tokens

    def _replay(self, client: WorkerClient, outputs: Sequence[Tensor]) -> None:
        """Run the forward again on a replacement worker."""
        written_arguments, written_tensors = self.changed_tensors()
        detect_changes = self.source_changes_ref()
        changes = None if detect_changes is None else detect_changes()
        if changes is not None:
            self.record_changes(changes)
        elif not all(map(self._is_unmodified, outputs)):  # only unmodified outputs can show that nothing changed
            self.is_exact = False
        if written_tensors:
            raise self._lost_error("weights")
        if self.arguments_changed or written_arguments:
            raise self._lost_error("arguments")
        if not self.is_exact or not self._has_same_structure():
            raise self._lost_error("module")
        with self._restored_module():
            replica = self._replica = self.recreate_replica()
            replica.private_container_paths = self.private_containers
            module_state = client.sync_module(replica)
        self._separate_blocks()
        indices = module_state.tensor_indices
        old_values = {indices[key]: value for key, value in self.old_values.items() if key in indices}
        request = self.request
        module_state.refresh_staging(self, follow=True)
        request.module_id, request.refresh_state, request.sequence_number = replica.module_id, True, 0
        request.tensor_values = module_state.unshared_values() | old_values
        states = {id(self.module_state.generators[number]): state for number, state in request.generator_states.items()}
        request.generator_states = {
            number: states[id(generator)]
            for number, generator in enumerate(module_state.generators)
            if id(generator) in states
        }
        request.rows, request.gathered_rows = (), self.collectives.row_log.all()
        pending = client.new_pending()
        client.send_forward(request, module_state, pending)
        _, tensors = client.channel.decode(
            client.wait_reply(pending, self.collectives), reply_rebuilder(self.arguments, module_state.local_tensors)
        )
        if not all(self._matches(output, tensors) for output in outputs):
            client.released.append(("call", pending.request_id))
            raise self._lost_error("weights, or something else that it reads,")
        self.call_id, self.client, self.module_state = pending.request_id, client, module_state
        self._local_indices = {copy: indices[source] for copy, source in self._source_ids.items() if source in indices}
        weakref.finalize(self, client.released.append, ("call", pending.request_id))

    def _matches(self, output: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether the replay gave the same output; shows writes without a version (`.data`, fused optimizers).

        An output that the caller has written to since cannot be compared.
        """
        if not self._is_unmodified(output):
            return True
        index = self.output_indices[id(output)]
        return index < len(tensors) and tensors_equal(output, tensors[index].to(output.device))

    def _is_unmodified(self, output: Tensor) -> bool:
        return output._version == self.output_versions[self.output_indices[id(output)]]

    def _lost_error(self, what: str) -> WorkerFailure:
        return WorkerFailure(
            f"the worker of {self.name} ended between a forward and its backward, and the {what} changed since, so "
            f"the forward cannot be repeated exactly.\n"
            f"Call backward() before the module is changed, or run the step again."
        )

    def _has_same_structure(self) -> bool:
        modules, tensors = set(map(id, self.modules)), set(map(id, self.module_state.tensors))
        root = self.modules[0]
        return modules.issuperset(map(id, root.modules())) and tensors.issuperset(map(id, root.parameters()))

    @contextmanager
    def _restored_module(self) -> Iterator[None]:
        """Restore the module's attributes and containers from before the call while inside."""
        attributes = {key: _attribute_dict(key).get(key[1], MISSING) for key in self.old_attributes}
        containers = [(container, read_contents(container)) for container, _ in self.old_contents.values()]
        try:
            for container, contents in self.old_contents.values():
                write_contents(container, contents)
            for key, value in self.old_attributes.items():
                _set_attribute(key, value)
            yield
        finally:
            for container, contents in containers:
                write_contents(container, contents)
            for key, value in attributes.items():
                _set_attribute(key, value)


def record_old_values(root: nn.Module, written: Sequence[Tensor], statistics: Sequence[Tensor]) -> None:
    """Record the values of state and of running statistics that are about to be written, for calls to be replayed."""
    recorders = registered_recorders(root) if written or statistics else []
    if not recorders:
        return
    values, blocks = {id(source): source.detach().clone() for source in written}, flat_copies(statistics)
    for recorder in recorders:
        recorder.record_blocks(blocks)
        if values:
            recorder.record_values(values)


def _detached(value: Any) -> Any:
    """A value with detached tensors: their graphs would keep earlier calls alive."""
    return map_tensors(lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), value)


def _detached_item(item: Any) -> Any:
    return _detached(item) if isinstance(item, Tensor) else item


def _holds_graph(item: Any) -> bool:
    """Whether an object other than a tensor holds a graph, and so cannot be detached."""
    if isinstance(item, Tensor) or is_atomic(item):
        return False
    return any(not tensor.is_leaf for tensor in tensors_in(item))


def _attribute_dict(key: AttributeKey) -> dict[str, Any]:
    module, _, is_buffer = key
    attributes: dict[str, Any] = module._buffers if is_buffer else module.__dict__
    return attributes


def _set_attribute(key: AttributeKey, value: Any) -> None:
    holder, name = _attribute_dict(key), key[1]
    if value is MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
