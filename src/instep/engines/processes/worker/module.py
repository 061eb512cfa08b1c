"""A source module as a worker holds it, on memory shared with the parent, and its gradient slots."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import is_, itemgetter

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.autograd.graph_walk import reachable_leaves
from instep.collectives.sync_batchnorm import SyncBatchNormPatch
from instep.engines.processes.messages import (
    AttributesRequest,
    ForwardReply,
    ForwardRequest,
    ModuleRequest,
    TensorLocation,
    TensorSpec,
    TensorTableRequest,
)
from instep.engines.processes.nccl.group import GroupAborted
from instep.engines.processes.serialization.reducers import make_generator
from instep.engines.processes.transport.channel import SOURCE, TensorTag, rebuild_by_value
from instep.engines.processes.transport.copy_streams import StagedTensor, copy_all_to_device, copy_all_to_host
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.engines.processes.transport.cuda_ipc import allocate_shared, open_shared
from instep.engines.processes.transport.doorbell import Doorbell, gradient_chunks
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.replicas.replica import Replica, ReplicaResult, TensorPair
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.container_encoding import encode_items
from instep.replicas.tensors import ReplicaTensors, has_gradients
from instep.replicas.write_watch import SavedValues, WriteDetector
from instep.runtime.backoff import NEVER, Backoff
from instep.runtime.modes import set_inference_mode
from instep.runtime.rng import GeneratorPairs
from instep.structure.shapes import is_dense
from instep.structure.tree import tensors_in


class _TensorNumbering:
    """The numbers of a module's tensors, and the replica's tensor for each."""

    def __init__(self, pairs: Sequence[TensorPair], tensors: Sequence[Tensor]) -> None:
        self.pairs = pairs
        copies = {id(source): copy for source, copy in pairs}
        self.replica_tensors = [copies.get(id(source), source) for source in tensors]
        self.numbers = {id(tensor): n for table in (tensors, self.replica_tensors) for n, tensor in enumerate(table)}


LARGE_GRADIENT_BYTES = 64 * 1024
"""On the CPU, gradients of this size are copied to their slots during backward; all others together at the end."""


class _UnguardedTensors(ReplicaTensors):
    """Replica tensors without gradient guards: in a worker no user code runs between calls."""

    uses_guard = False

    def may_have_gradients(self) -> bool:
        return has_gradients(map(itemgetter(1), self.trainable))


class _WorkerReplica(Replica):
    """A replica in a worker process."""

    tensors_class = _UnguardedTensors


class WorkerModule:
    """A module in a worker: its tensors, known to the parent by number, its replica and its gradient slots."""

    module: nn.Module
    replica_set: ReplicaSet

    def __init__(self, table: TensorTableRequest, fds: Sequence[int]) -> None:
        self.device = table.device
        copied_blocks = {
            entry.location.block_id
            for entry in table.tensors
            if entry.location is not None and entry.location.needs_copy
        }
        self._shared_blocks: dict[int, SharedMemory] = {}
        self._device_blocks = {n: open_shared(handle, nbytes, self.device) for n, nbytes, handle in table.ipc_handles}
        for (number, nbytes), fd in zip(table.blocks, fds, strict=False):  # later descriptors are for gradients
            # Blocks that are only read are mapped shared: accelerators copy poorly from copy-on-write mappings.
            self._shared_blocks[number] = SharedMemory.attach(fd, nbytes, writable=number in copied_blocks)
        self._storages: dict[tuple[int, int], Tensor] = {}
        self._value_checks: dict[str, Backoff] = defaultdict(lambda: Backoff(limit=NEVER, eager=3))
        """By method: at which calls the values of arguments are compared, to find writes through `.data`."""
        self._staged_by_block: dict[int, list[StagedTensor]] = {}
        """Device copies of tensors in shared memory, by block number."""
        self._copies_by_block: dict[int, DeviceMemory] = {}
        """The device memory of these copies."""
        self.tensors = [self._rebuild_tensor(entry, table.storages) for entry in table.tensors]
        self._gradient_slots: dict[int, Tensor] = {}
        self._on_gradient: Callable[[int], None] | None = None
        self._leaf_indices: dict[int, int] = {}
        """By id of a leaf: its index in the backward whose gradients are reported."""
        self._reporting_leaves = WeakTensorKeyDictionary()
        """The leaves that have a hook for `report_gradients`."""
        self._last_leaf_ids: list[int] = []
        """The ids of the leaves of the last backward whose gradients were reported."""
        self._replica: Replica | None = None
        self.sequence_number = 0
        """The broadcast that brought the current values of `staged_tensors`; 0 if they came from shared memory."""
        self._last_numbering: _TensorNumbering | None = None
        self._doorbell: Doorbell | None = None
        nbytes, offsets = table.gradient_slots
        self._gradient_memory: SharedMemory | DeviceMemory
        if table.gradient_slots_handle is None:
            self._gradient_memory = SharedMemory.attach(fds[-1], nbytes, writable=True)
        else:
            self._gradient_memory = open_shared(table.gradient_slots_handle, nbytes, self.device)
        self._slot_offsets = dict(offsets)
        for number, offset in offsets:
            self._gradient_slots[number] = gradient_slot(self._gradient_memory, offset, self.tensors[number])
        self._slot_chunks: dict[int, list[tuple[int, Tensor]]] = {}
        """Chunks of large slots by tensor number, each with its doorbell index."""
        if table.has_doorbell:
            assert isinstance(self._gradient_memory, SharedMemory)
            chunks = gradient_chunks((number, self.tensors[number]) for number, _ in offsets)
            self._doorbell = Doorbell(fds[-2], self._gradient_memory, chunks)
            for place, (number, start, stop) in enumerate(chunks):
                part = self._gradient_slots[number].view(-1)[start:stop]
                self._slot_chunks.setdefault(number, []).append((place, part))
        self.begin_backward(())

    @property
    def device_block_numbers(self) -> set[int]:
        """Numbers of the opened blocks of the parent's device memory."""
        return set(self._device_blocks)

    def _rebuild_tensor(self, entry: TensorSpec, storages: Sequence[Tensor]) -> Tensor:
        if entry.location is None:
            assert entry.value is not None
            data = entry.value.detach()
            data = data.to(self.device) if entry.on_source_device else data
        else:
            location = entry.location
            key = location.block_id, location.offset
            if key not in self._storages:
                self._storages[key] = self._rebuild_storage(location, storages, entry.on_source_device)
            storage = self._storages[key].untyped_storage()
            data = torch.empty(0, dtype=location.dtype, device=self._storages[key].device)
            data.set_(storage, location.storage_offset, location.size, location.stride)
        if issubclass(entry.tensor_type, nn.Parameter):
            data = torch.Tensor._make_subclass(entry.tensor_type, data, entry.requires_grad)
        rebuilt: Tensor = data.requires_grad_(entry.requires_grad)
        rebuilt.__dict__.update(entry.attributes)
        return rebuilt

    def _rebuild_storage(self, location: TensorLocation, storages: Sequence[Tensor], on_source_device: bool) -> Tensor:
        block = self._device_blocks.get(location.block_id) or self._shared_blocks.get(location.block_id)
        if block is None:
            return storages[location.offset].to(self.device) if on_source_device else storages[location.offset]
        if not location.needs_copy:
            return block.tensor(location.offset, location.nbytes)
        copies = self._device_copies(location.block_id, block.nbytes)
        private = (
            torch.empty(location.nbytes, dtype=torch.uint8, device=self.device)
            if copies is None
            else copies.tensor(location.offset, location.nbytes)
        )
        self._staged_by_block.setdefault(location.block_id, []).append(StagedTensor(location.offset, private))
        return private

    def resolve_tensor(self, tag: TensorTag, tensor: Tensor | None) -> Tensor:
        """Decode a tensor of a message, which may refer to the table."""
        return self.tensors[tag[1]] if tag[0] == SOURCE else rebuild_by_value(tag, tensor)

    def load(self, request: ModuleRequest) -> None:
        """Receive the module and create its replica."""
        self.module, self._generators = request.module, request.generators
        patch = None if request.sync_batchnorm is None else SyncBatchNormPatch(request.sync_batchnorm)
        self._copy_from_host()
        self.replica_set = ReplicaSet(
            self.module,
            [self.device],
            patch=patch,
            replica_classes=[_WorkerReplica],
            source_device=request.source_device,
        )
        if request.private_containers:
            self.replica_set.sync()
            self.replica_set.privatize(request.private_containers)

    def set_attributes(self, request: AttributesRequest) -> None:
        """Set attributes of the module. The replica follows at the next call."""
        self._generators += request.generators
        modules = self.replica_set.sync()[0].source_modules
        for (index, name), value in zip(request.targets, request.values.values(), strict=True):
            modules[index].__dict__[name] = value

    def _copy_from_host(self) -> None:
        """Copy staged tensors from shared memory to the device."""
        for number, tensors in self._staged_by_block.items():
            copy_all_to_device(self._shared_blocks[number], tensors)

    def _device_copies(self, block_id: int, nbytes: int) -> DeviceMemory | None:
        """Device memory for copies of a block of shared memory, at the same offsets; None on the CPU."""
        if block_id not in self._copies_by_block and self.device.type == "cuda":
            with suppress(DriverError):  # each copy is then allocated on its own
                self._copies_by_block[block_id] = allocate_shared(nbytes, self.device)
        return self._copies_by_block.get(block_id)

    def find_memory(self, run: Sequence[StagedTensor]) -> Tensor | None:
        """The device memory of neighbouring `staged_tensors`, as bytes; None if each was allocated on its own."""
        if len(self._copies_by_block) != 1 or len(self._staged_by_block) != 1:
            return None
        (memory,) = self._copies_by_block.values()
        return memory.tensor(run[0].offset, run[-1].end - run[0].offset)

    def staged_tensors(self) -> list[StagedTensor]:
        """Device copies of tensors in shared memory, which a broadcast can update too."""
        return [staged for tensors in self._staged_by_block.values() for staged in tensors]

    def _unshare(self, numbers: Iterable[int]) -> None:
        """Move tensors out of the parent's device memory, which is not copy-on-write, before they are written."""
        for number in numbers:
            address = self.tensors[number].untyped_storage().data_ptr() if is_dense(self.tensors[number]) else 0
            if not any(storage.data_ptr() == address for storage in self._shared_device_storages()):
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=self.device)
            private = whole.set_(self.tensors[number].untyped_storage()).clone().untyped_storage()
            for tensor in filter(is_dense, self.tensors):
                if tensor.untyped_storage().data_ptr() == address:
                    view = torch.empty(0, dtype=tensor.dtype, device=self.device)
                    tensor.data = view.set_(private, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _shared_device_storages(self) -> Iterator[Tensor]:
        return (storage for (block, _), storage in self._storages.items() if block in self._device_blocks)

    def prepare_replica(self, request: ForwardRequest) -> Replica:
        """Bring the replica up to date for a call."""
        if request.sequence_number != 0 and request.sequence_number != self.sequence_number:
            raise GroupAborted("the broadcast of the module's parameters did not arrive")
        if request.refresh_state and not request.sequence_number:
            self._copy_from_host()
        if request.tensor_values:
            self.replica_set.discard_prefetched()
            self._copy_values(request.tensor_values)
        replica = self.sync_replica(request.replica_index)
        if request.carried_state:
            attributes = [(replica.source_modules[i], name) for i, name, _ in request.carried_state]
            replica.assign_shard(attributes, [shard for _, _, shard in request.carried_state])
        return replica

    def sync_replica(self, index: int) -> Replica:
        """Bring the replica up to date with the module of this process."""
        replica = self.replica_set.sync()[0]
        if replica is not self._replica:
            self._replica = replica
            numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
            for source, leaf in replica.trainable if self.device.type == "cpu" else ():
                if is_dense(source) and source.nbytes >= LARGE_GRADIENT_BYTES:
                    # Weak: the garbage collector does not see references held by such a hook.
                    leaf.register_post_accumulate_grad_hook(
                        partial(_store_gradient_hook, weakref.ref(self), numbers[id(source)])
                    )
        replica.name = f"replica {index} on {self.device}"
        return replica

    def _copy_values(self, values: Mapping[int, Tensor]) -> None:
        """Copy received values into the tensors."""
        with torch.no_grad(), set_inference_mode(False):
            self._unshare(values)
            for number, value in values.items():
                tensor = self.tensors[number]
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.to(tensor.device)

    def watch_arguments(self, method: str, tensors: Sequence[Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Returns a function that gives, after the call, the values of arguments written in place, by number.

        Writes through `.data` do not change the version counter. They are detected by comparing values: in all calls of
        a method that makes such writes, in others ever more rarely.
        """
        detector = WriteDetector.from_pairs(enumerate(tensors))
        checks = self._value_checks[method]
        checks.advance()
        saved = SavedValues(enumerate(tensors)) if checks.is_due else None

        def written() -> dict[int, Tensor]:
            numbers = set(detector.written())
            if saved is not None:
                hidden = set(saved.changed()) - numbers
                if hidden:
                    del self._value_checks[method]  # compare again in the next call
                else:
                    checks.record()
                numbers |= hidden
            return {number: tensors[number].detach() for number in sorted(numbers)}

        return written

    def generator_pairs(self, request: ForwardRequest) -> GeneratorPairs:
        """The caller's generators with their current states, each with the replica's generator.

        Those of the module come first, then those among the arguments that several replicas received.
        """
        for number, state in request.generator_states.items():
            self._generators[number].set_state(state)
        argument_pairs = [
            (make_generator(str(generator.device), state), generator)
            for state, generator in request.argument_generators
        ]
        return [*self.replica_set.replicas[0].cloner.generators, *argument_pairs]

    def generator_number(self, source: torch.Generator) -> int | None:
        return next((number for number, known in enumerate(self._generators) if known is source), None)

    def replica_tensors(self) -> list[Tensor]:
        """The replica's tensor for each tensor of the table."""
        return self._current_numbering().replica_tensors

    def tensor_numbers(self) -> dict[int, int]:
        """Numbers by `id` of the module's and the replica's tensors."""
        return self._current_numbering().numbers

    def _current_numbering(self) -> _TensorNumbering:
        """The numbering, recomputed if the replica's tensors have changed."""
        tensors = self.replica_set.replicas[0].tensors if self.replica_set.replicas else None
        pairs = [] if tensors is None else [*tensors.trainable, *tensors.state]
        if (
            self._last_numbering is None
            or len(pairs) != len(self._last_numbering.pairs)
            or not all(map(is_, pairs, self._last_numbering.pairs))
        ):
            self._last_numbering = _TensorNumbering(pairs, self.tensors)
        return self._last_numbering

    def collect_changes(self, result: ReplicaResult) -> ForwardReply:
        """Encode the state that `forward` changed on the replica, and revert the replica."""
        replica, replica_set = self.replica_set.replicas[0], self.replica_set
        reply = ForwardReply()
        if result.written_state or replica_set.private_weights:
            numbers = self.tensor_numbers()
            reply.written_tensors = {
                numbers[id(source)]: copy.detach().clone() for source, copy in result.written_state
            }
            reply.private_parameters = {
                numbers[id(s)]: copy.detach() for s, copy in replica.trainable if id(s) in replica_set.private_weights
            }
        if result.statistics is not None:
            numbers, written = self.tensor_numbers(), result.statistics
            is_sent = written.compare or not replica.syncs_statistics
            blocks = [block.clone() for block in written.blocks] if is_sent else []
            reply.statistics = [numbers[key] for key in written.keys], blocks
        if not result.changes:
            return reply
        reply.attributes = [
            (change.module_index, change.name, change.new, change.is_buffer) for change in result.changes.attributes
        ]
        paths = {
            id(clone): replica_set.shared_containers.paths.get(id(source))
            for source, _, clone in replica.cloner.containers
        }
        for change in result.changes.containers:
            items = list(encode_items(change.container, change.before.items, change.after.items))
            reply.containers.append((str(paths[id(change.container)]), change.after.keys, items))
        replica.revert(result.changes)
        return reply

    def report_gradients(self, leaves: Sequence[Tensor], on_gradient: Callable[[int], None]) -> None:
        """Until `stop_reports`, call a function with the index of each leaf whose gradient arrives or grows."""
        self._on_gradient, self._leaf_indices = on_gradient, {id(leaf): index for index, leaf in enumerate(leaves)}
        ids = list(self._leaf_indices)
        if ids == self._last_leaf_ids:
            return
        self._last_leaf_ids = ids
        for leaf in leaves:
            if leaf not in self._reporting_leaves and leaf.is_leaf and leaf.requires_grad:
                self._reporting_leaves[leaf] = leaf.register_post_accumulate_grad_hook(
                    partial(_report_gradient_hook, weakref.ref(self))
                )

    def stop_reports(self) -> None:
        """End `report_gradients`. The hooks stay for the next backward."""
        self._on_gradient = None

    def report_gradient(self, leaf: Tensor) -> None:
        """Called when the gradient of a leaf has been accumulated."""
        index = self._leaf_indices.get(id(leaf))
        if self._on_gradient is not None and index is not None:
            self._on_gradient(index)

    def begin_backward(self, wanted: Iterable[int]) -> None:
        """Reset the slots. Gradients of the tensors in `wanted` are stored as backward produces them."""
        self._wanted_gradients = set(wanted)
        self._filled_slots: set[int] = set()
        if self._doorbell is not None:
            self._doorbell.reset()

    def store_gradient(self, number: int, leaf: Tensor) -> None:
        """Copy a gradient to its slot while it is in the CPU cache, and free its memory for the next one."""
        gradient = leaf.grad
        if gradient is not None and number in self._wanted_gradients and self._store(number, gradient):
            leaf.grad = None

    def _store(self, number: int, gradient: Tensor) -> bool:
        if not self._can_store(number, gradient):
            return False
        slot = self._gradient_slots[number]
        if number not in self._filled_slots:
            if number in self._slot_chunks:
                self._store_and_signal(number, gradient)
            else:
                slot.copy_(gradient)
            self._filled_slots.add(number)
        elif number in self._slot_chunks:  # stored by a nested backward; the parent may be reading it
            return False
        else:
            slot.add_(gradient)
        return True

    def _store_together(self, gradients: dict[int, Tensor]) -> Collection[int]:
        """Store small gradients, or all on an accelerator, with one foreach copy. Returns their numbers."""
        slots, filled = self._gradient_slots, self._filled_slots
        limit = LARGE_GRADIENT_BYTES if self.device.type == "cpu" else math.inf
        together = {
            number: slot
            for number, gradient in gradients.items()
            if number not in filled
            and (slot := slots.get(number)) is not None
            and gradient.layout is torch.strided
            and gradient.dtype is slot.dtype
            and gradient.device == slot.device
            and gradient.nbytes < limit
        }
        if together:
            torch._foreach_copy_(list(together.values()), [gradients[number] for number in together])
            filled.update(together)
        return together

    def _can_store(self, number: int, gradient: Tensor) -> bool:
        return self.fits_slot(number, gradient) and self._gradient_slots[number].device == gradient.device

    def _store_and_signal(self, number: int, gradient: Tensor) -> None:
        """Store a gradient in chunks; the parent adds each while the next one is copied."""
        assert self._doorbell is not None
        flat = gradient.reshape(-1)
        start = 0
        for place, part in self._slot_chunks[number]:
            stop = start + part.numel()
            part.copy_(flat[start:stop])
            self._doorbell.ring(place)
            start = stop

    def fits_slot(self, number: int, gradient: Tensor) -> bool:
        """Whether the tensor has a slot that matches the gradient's layout and dtype."""
        slot = self._gradient_slots.get(number)
        return slot is not None and gradient.layout is torch.strided and gradient.dtype == slot.dtype

    def find_slots(self, numbers: Sequence[int]) -> list[Tensor] | None:
        """The slots of these tensors, if each has one and gradients are not signalled while backward runs."""
        slots = [self._gradient_slots[number] for number in numbers if number in self._gradient_slots]
        return slots if len(slots) == len(numbers) and self._doorbell is None else None

    def store_all(self, numbers: Sequence[int], gradients: Sequence[Tensor | None]) -> bool:
        """Store the gradients of these tensors with one copy. Returns False, and stores none, unless each has one."""
        slots, layouts = self.find_slots(numbers), {None if g is None else g.layout for g in gradients}
        if slots is None or layouts != {torch.strided}:
            return False
        torch._foreach_copy_(slots, gradients)  # type: ignore[arg-type]
        self.begin_backward(())
        return True

    def flush_gradients(self, gradients: dict[int, Tensor | None]) -> tuple[list[int], dict[int, Tensor]]:
        """Store the remaining gradients. Returns the numbers of filled slots, and the gradients without a slot.

        A gradient has no slot if it is sparse, or if an earlier one of the same tensor was already signalled.
        """
        present = {n: g for n, g in gradients.items() if g is not None}
        stored = self._store_together(present)
        remaining = {}
        if len(stored) < len(present):
            remaining = {n: g for n, g in present.items() if n not in stored and not self._store(n, g)}
        if not remaining:
            filled = sorted(self._filled_slots)
            self.begin_backward(())
            return filled, remaining
        on_host = [
            n for n, gradient in remaining.items() if n not in self._filled_slots and self.fits_slot(n, gradient)
        ]
        if on_host:  # the slots are on the host
            assert isinstance(self._gradient_memory, SharedMemory)
            copy_all_to_host(
                self._gradient_memory,
                [StagedTensor(self._slot_offsets[number], remaining.pop(number)) for number in on_host],
            )
            self._filled_slots.update(on_host)
        combined = {number for number in remaining.keys() & self._filled_slots if number not in self._slot_chunks}
        for number in combined:
            remaining[number] = self._gradient_slots[number] + remaining[number]
        filled = sorted(self._filled_slots - combined)
        self.begin_backward(())
        return filled, remaining


def _store_gradient_hook(module_ref: weakref.ref[WorkerModule], number: int, leaf: Tensor) -> None:
    module = module_ref()
    if module is not None:
        module.store_gradient(number, leaf)


def _report_gradient_hook(module_ref: weakref.ref[WorkerModule], leaf: Tensor) -> None:
    module = module_ref()
    if module is not None:
        module.report_gradient(leaf)


def gradient_slot(memory: SharedMemory | DeviceMemory, offset: int, tensor: Tensor) -> Tensor:
    """The gradient slot of a tensor at an offset, with the tensor's shape."""
    nbytes = tensor.numel() * tensor.element_size()
    flat: Tensor = memory.tensor(offset, nbytes).view(tensor.dtype)
    return flat.view(tensor.shape)


def backward_roots(reply: ForwardReply, result: ReplicaResult) -> list[Tensor]:
    """Tensors from which a backward may start: outputs, changed state, written arguments and collective tokens."""
    tokens = [] if result.context is None else result.context.tokens
    return [*tensors_in([reply.output, reply.attributes, reply.containers, reply.written_with_grad]), *tokens]


def used_arguments(reply: ForwardReply, leaves: Mapping[int, Tensor], result: ReplicaResult) -> list[int]:
    """Numbers of the arguments that the backward roots depend on."""
    used = reachable_leaves(backward_roots(reply, result))
    return [number for number, leaf in leaves.items() if id(leaf) in used]
