"""A source module as a worker holds it, on memory shared with the parent, and its gradient slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

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
from instep.engines.processes.serialization.containers import encode_items
from instep.engines.processes.serialization.reducers import make_generator
from instep.engines.processes.transport.channel import SOURCE, TensorTag, rebuild_by_value
from instep.engines.processes.transport.copy_streams import StagedTensor, copy_all_to_device, copy_all_to_host
from instep.engines.processes.transport.cuda_driver import DeviceMemory
from instep.engines.processes.transport.cuda_ipc import open_shared
from instep.engines.processes.transport.doorbell import Doorbell, gradient_chunks
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.replicas.object_graph import tensors_equal
from instep.replicas.replica import Replica, ReplicaResult, TensorPair
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.tensors import ReplicaTensors, has_gradients
from instep.runtime.modes import set_inference_mode
from instep.runtime.rng import GeneratorPairs
from instep.structure.shapes import is_dense
from instep.structure.tree import tensors_in


class _TensorNumbering:
    """What a replica has for each tensor of the table."""

    def __init__(self, pairs: Sequence[TensorPair], tensors: Sequence[Tensor]) -> None:
        self.pairs = pairs
        made = {id(source): made for source, made in pairs}
        self.replica_tensors = [made.get(id(source), source) for source in tensors]
        self.numbers = {id(tensor): n for both in (tensors, self.replica_tensors) for n, tensor in enumerate(both)}


LARGE_GRADIENT_BYTES = 64 * 1024
"""Gradients of so many bytes go to their slots as they come; smaller ones at the end, all at once."""
CHECKED_CALLS = 3
"""The calls of a method in which writes are looked for that no version tells of."""


class _UnguardedTensors(ReplicaTensors):
    """Tensors that no code reaches outside of a call; a hook on each would cost every backward."""

    uses_guard = False

    def may_have_gradients(self) -> bool:
        return has_gradients(leaf for _, leaf in self.trainable)


class _WorkerReplica(Replica):
    """A replica in a process where nothing is done but what it is asked for."""

    tensors_class = _UnguardedTensors


class WorkerModule:
    """One module, its tensors by number, and the replica that is made of it."""

    module: nn.Module
    replica_set: ReplicaSet

    def __init__(self, table: TensorTableRequest, fds: Sequence[int]) -> None:
        self.device = table.device
        pulled = {
            entry.location.block_id
            for entry in table.tensors
            if entry.location is not None and entry.location.needs_copy
        }
        self._shared_blocks: dict[int, SharedMemory] = {}
        self._device_blocks = {n: open_shared(handle, nbytes, self.device) for n, nbytes, handle in table.ipc_handles}
        for (number, nbytes), fd in zip(table.blocks, fds, strict=False):  # the others are for the gradients
            # What is only copied from need not be copied on write, which accelerators do not take well.
            self._shared_blocks[number] = SharedMemory.attach(fd, nbytes, writable=number in pulled)
        self._storages: dict[tuple[int, int], Tensor] = {}
        self._clean_calls: dict[str, int] = {}
        """By the name of a method: in how many calls nothing was written to an argument unseen."""
        self._pieces_by_block: dict[int, list[StagedTensor]] = {}
        """By the number of a block: what is copied from it, and to where."""
        self.tensors = [self._rebuild_tensor(entry, table.storages) for entry in table.tensors]
        self._gradient_slots: dict[int, Tensor] = {}
        self._replica: Replica | None = None
        self.sequence_number = 0
        """What brought the last values of what is copied from common memory; 0 if nothing else did."""
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
        """By the number of a tensor: the parts of its slot that are rung for, each with its place among all."""
        if table.has_doorbell:
            assert isinstance(self._gradient_memory, SharedMemory)
            cut = gradient_chunks((number, self.tensors[number]) for number, _ in offsets)
            self._doorbell = Doorbell(fds[-2], self._gradient_memory, cut)
            for place, (number, start, stop) in enumerate(cut):
                part = self._gradient_slots[number].view(-1)[start:stop]
                self._slot_chunks.setdefault(number, []).append((place, part))
        self.begin_backward(())

    @property
    def device_block_numbers(self) -> set[int]:
        """The numbers of the blocks of another process's device memory that it has opened."""
        return set(self._device_blocks)

    def _rebuild_tensor(self, entry: TensorSpec, sent: Sequence[Tensor]) -> Tensor:
        if entry.location is None:
            assert entry.value is not None
            data = entry.value.detach()
            data = data.to(self.device) if entry.on_source_device else data
        else:
            spot = entry.location
            key = spot.block_id, spot.offset
            if key not in self._storages:
                self._storages[key] = self._rebuild_storage(spot, sent, entry.on_source_device)
            storage = self._storages[key].untyped_storage()
            data = torch.empty(0, dtype=spot.dtype, device=self._storages[key].device)
            data.set_(storage, spot.storage_offset, spot.size, spot.stride)
        if issubclass(entry.tensor_type, nn.Parameter):
            data = torch.Tensor._make_subclass(entry.tensor_type, data, entry.requires_grad)
        made: Tensor = data.requires_grad_(entry.requires_grad)
        made.__dict__.update(entry.attributes)
        return made

    def _rebuild_storage(self, spot: TensorLocation, sent: Sequence[Tensor], near: bool) -> Tensor:
        block = self._device_blocks.get(spot.block_id) or self._shared_blocks.get(spot.block_id)
        if block is None:
            return sent[spot.offset].to(self.device) if near else sent[spot.offset]
        if not spot.needs_copy:
            return block.tensor(spot.offset, spot.nbytes)
        own = torch.empty(spot.nbytes, dtype=torch.uint8, device=self.device)
        self._pieces_by_block.setdefault(spot.block_id, []).append(StagedTensor(spot.offset, own))
        return own

    def resolve_tensor(self, tag: TensorTag, tensor: Tensor | None) -> Tensor:
        """A tensor of a message that may be one of the table."""
        return self.tensors[tag[1]] if tag[0] == SOURCE else rebuild_by_value(tag, tensor)

    def load(self, order: ModuleRequest) -> None:
        """Make the replica of a module."""
        self.module, self._generators = order.module, order.generators
        patch = None if order.sync_batchnorm is None else SyncBatchNormPatch(order.sync_batchnorm)
        self._copy_from_host()
        self.replica_set = ReplicaSet(
            self.module, [self.device], patch=patch, replica_classes=[_WorkerReplica], home=order.source_device
        )
        if order.private_containers:
            self.replica_set.sync()
            self.replica_set.privatize_changed(order.private_containers)

    def set_attributes(self, news: AttributesRequest) -> None:
        """Set attributes of the module, which its replica then follows."""
        self._generators += news.generators
        modules = self.replica_set.sync()[0].source_modules
        for (index, name), value in zip(news.targets, news.values.values(), strict=True):
            modules[index].__dict__[name] = value

    def _copy_from_host(self) -> None:
        """Copy what lies in common memory to the device."""
        for number, pieces in self._pieces_by_block.items():
            copy_all_to_device(self._shared_blocks[number], pieces)

    def host_pieces(self) -> list[StagedTensor]:
        """What is copied from common memory, to which it can come otherwise."""
        return [piece for pieces in self._pieces_by_block.values() for piece in pieces]

    def _unshare(self, numbers: Iterable[int]) -> None:
        """Give tensors whose values this process is told memory of its own, where theirs is the source's itself.

        Memory of an accelerator that was opened is not copied on write.
        """
        for number in numbers:
            address = self.tensors[number].untyped_storage().data_ptr() if is_dense(self.tensors[number]) else 0
            if not any(storage.data_ptr() == address for storage in self._shared_device_storages()):
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=self.device)
            own = whole.set_(self.tensors[number].untyped_storage()).clone().untyped_storage()
            for tensor in filter(is_dense, self.tensors):
                if tensor.untyped_storage().data_ptr() == address:
                    view = torch.empty(0, dtype=tensor.dtype, device=self.device)
                    tensor.data = view.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _shared_device_storages(self) -> Iterator[Tensor]:
        return (storage for (block, _), storage in self._storages.items() if block in self._device_blocks)

    def prepare_replica(self, run: ForwardRequest) -> Replica:
        """The replica, with everything that has changed since."""
        if run.sequence_number != 0 and run.sequence_number != self.sequence_number:
            raise GroupAborted("the values of the module's tensors did not arrive")
        if run.refresh_state and not run.sequence_number:
            self._copy_from_host()
        if run.tensor_values:
            self.replica_set.discard_prefetched()
            self._copy_values(run.tensor_values)
        replica = self.replica_set.sync()[0]
        if replica is not self._replica:
            self._replica = replica
            places = {id(tensor): number for number, tensor in enumerate(self.tensors)}
            for source, leaf in replica.trainable:
                if is_dense(source) and source.nbytes >= LARGE_GRADIENT_BYTES:
                    # Python's collector does not see what such a hook holds: held by it, nothing here would ever go.
                    leaf.register_post_accumulate_grad_hook(
                        partial(_store_gradient_hook, weakref.ref(self), places[id(source)])
                    )
        replica.name = f"replica {run.replica_index} on {self.device}"
        if run.carried_state:
            slots: Any = [
                SimpleNamespace(module=replica.source_modules[i], name=name) for i, name, _ in run.carried_state
            ]
            replica.assign_shard(slots, [part for _, _, part in run.carried_state])
        return replica

    def _copy_values(self, fresh: Mapping[int, Tensor]) -> None:
        """Take the values that were sent."""
        with torch.no_grad(), set_inference_mode(False):
            self._unshare(fresh)
            for number, value in fresh.items():
                tensor = self.tensors[number]
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.to(tensor.device)

    def watch_arguments(self, method: str, tensors: Sequence[Tensor]) -> Callable[[], dict[int, Tensor]]:
        """What says, when the call is over, which arguments were written to: their values now, by their numbers.

        Writes through `.data` move no version. They are looked for in the first calls of a method, and as long as there
        are any.
        """
        versions = [tensor._version for tensor in tensors]
        before = (
            [tensor.detach().clone() for tensor in tensors]
            if self._clean_calls.get(method, 0) < CHECKED_CALLS
            else None
        )

        def written() -> dict[int, Tensor]:
            moved = {
                i: t.detach() for i, (t, then) in enumerate(zip(tensors, versions, strict=True)) if t._version != then
            }
            if before is not None:
                pairs = enumerate(zip(tensors, before, strict=True))
                hidden = {i: t.detach() for i, (t, then) in pairs if i not in moved and not tensors_equal(t, then)}
                self._clean_calls[method] = 0 if hidden else self._clean_calls.get(method, 0) + 1
                moved |= hidden
            return moved

        return written

    def generator_pairs(self, run: ForwardRequest) -> GeneratorPairs:
        """The caller's generators as they are now, each with what the replica has in its place.

        First those that the module holds, then those among the arguments that several replicas were given.
        """
        for number, state in run.generator_states.items():
            self._generators[number].set_state(state)
        given = [
            (make_generator(str(generator.device), state), generator) for state, generator in run.argument_generators
        ]
        return [*self.replica_set.replicas[0].cloner.generators, *given]

    def generator_number(self, source: torch.Generator) -> int | None:
        """The number of a generator of the module."""
        return next((number for number, known in enumerate(self._generators) if known is source), None)

    def replica_tensors(self) -> list[Tensor]:
        """What the replica has for each tensor of the table."""
        return self._current_numbering().replica_tensors

    def tensor_numbers(self) -> dict[int, int]:
        """By the id of a tensor, of the module or of the replica: its number."""
        return self._current_numbering().numbers

    def _current_numbering(self) -> _TensorNumbering:
        """What the replica has, made anew only when it has other tensors."""
        tensors = self.replica_set.replicas[0].tensors if self.replica_set.replicas else None
        pairs = [] if tensors is None else [*tensors.trainable, *tensors.state]
        if (
            self._last_numbering is None
            or len(pairs) != len(self._last_numbering.pairs)
            or not all(map(is_, pairs, self._last_numbering.pairs))
        ):
            self._last_numbering = _TensorNumbering(pairs, self.tensors)
        return self._last_numbering

    def collect_changes(self, outcome: ReplicaResult) -> ForwardReply:
        """What `forward` changed on the replica, in terms that the other process knows; the replica is put back."""
        replica, crew = self.replica_set.replicas[0], self.replica_set
        ran = ForwardReply()
        if outcome.written_state or crew.private_weights:
            numbers = self.tensor_numbers()
            ran.written_tensors = {numbers[id(source)]: copy.detach().clone() for source, copy in outcome.written_state}
            ran.private_parameters = {
                numbers[id(s)]: made.detach() for s, made in replica.trainable if id(s) in crew.private_weights
            }
        if not outcome.changes:
            return ran
        ran.attributes = [
            (change.module_index, change.name, change.new, change.is_buffer) for change in outcome.changes.attributes
        ]
        places = {
            id(made): crew.shared_containers.paths.get(id(source)) for source, _, made in replica.cloner.containers
        }
        for inside in outcome.changes.containers:
            items = list(encode_items(inside.container, inside.before.items, inside.after.items))
            ran.containers.append((str(places[id(inside.container)]), inside.after.keys, items))
        replica.revert(outcome.changes)
        return ran

    def begin_backward(self, wanted: Iterable[int]) -> None:
        """A backward begins: gradients of these tensors go to their slots as they come."""
        self._wanted_gradients = set(wanted)
        self._filled_slots: set[int] = set()
        if self._doorbell is not None:
            self._doorbell.reset()

    def store_gradient(self, number: int, leaf: Tensor) -> None:
        """Put a gradient into its slot as soon as it is there: it is in the cache, and its memory free for the next."""
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
        elif number in self._slot_chunks:  # a backward inside of the backward brought one before, and it may be read
            return False
        else:
            slot.add_(gradient)
        return True

    def _store_small(self, gradients: dict[int, Tensor]) -> Collection[int]:
        """Put the small ones into their slots, all at once; says which those were."""
        small = {
            number
            for number, gradient in gradients.items()
            if number not in self._filled_slots
            and self._can_store(number, gradient)
            and gradient.nbytes < LARGE_GRADIENT_BYTES
        }
        if small:
            torch._foreach_copy_([self._gradient_slots[n] for n in small], [gradients[n] for n in small])
            self._filled_slots.update(small)
        return small

    def _can_store(self, number: int, gradient: Tensor) -> bool:
        return self.fits_slot(number, gradient) and self._gradient_slots[number].device == gradient.device

    def _store_and_signal(self, number: int, gradient: Tensor) -> None:
        """The other process adds up the first stretches while the next ones are copied."""
        assert self._doorbell is not None
        flat = gradient.reshape(-1)
        start = 0
        for place, part in self._slot_chunks[number]:
            stop = start + part.numel()
            part.copy_(flat[start:stop])
            self._doorbell.ring(place)
            start = stop

    def fits_slot(self, number: int, gradient: Tensor) -> bool:
        """Whether a gradient is such as its tensor's slot is made for."""
        slot = self._gradient_slots.get(number)
        return slot is not None and gradient.layout is torch.strided and gradient.dtype == slot.dtype

    def flush_gradients(self, gradients: dict[int, Tensor | None]) -> tuple[list[int], dict[int, Tensor]]:
        """The backward is over, and left these; says whose gradients lie in slots, and returns the others.

        Those are sparse, or they came after a gradient of the same tensor that was rung for.
        """
        here = {n: g for n, g in gradients.items() if g is not None}
        put = self._store_small(here)
        left = {n: g for n, g in here.items() if n not in put and not self._store(n, g)}
        if not left:
            filled = sorted(self._filled_slots)
            self.begin_backward(())
            return filled, left
        far = [n for n, gradient in left.items() if n not in self._filled_slots and self.fits_slot(n, gradient)]
        if far:  # the slots are on the host
            assert isinstance(self._gradient_memory, SharedMemory)
            copy_all_to_host(
                self._gradient_memory, [StagedTensor(self._slot_offsets[number], left.pop(number)) for number in far]
            )
            self._filled_slots.update(far)
        both = {number for number in left.keys() & self._filled_slots if number not in self._slot_chunks}
        for number in both:
            left[number] = self._gradient_slots[number] + left[number]
        filled = sorted(self._filled_slots - both)
        self.begin_backward(())
        return filled, left


def _store_gradient_hook(mirror: weakref.ref[WorkerModule], number: int, leaf: Tensor) -> None:
    there = mirror()
    if there is not None:
        there.store_gradient(number, leaf)


def gradient_slot(memory: SharedMemory | DeviceMemory, offset: int, tensor: Tensor) -> Tensor:
    """The place for one tensor's gradient, in the shape of the tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    flat: Tensor = memory.tensor(offset, nbytes).view(tensor.dtype)
    return flat.view(tensor.shape)


def backward_roots(ran: ForwardReply, outcome: ReplicaResult) -> list[Tensor]:
    """Where a backward may begin."""
    tokens = [] if outcome.context is None else outcome.context.tokens
    return [*tensors_in([ran.output, ran.attributes, ran.containers, ran.written_with_grad]), *tokens]


def used_arguments(ran: ForwardReply, leaves: Mapping[int, Tensor], outcome: ReplicaResult) -> list[int]:
    """The arguments, by their numbers, that what comes back was made from."""
    used = reachable_leaves(backward_roots(ran, outcome))
    return [number for number, leaf in leaves.items() if id(leaf) in used]
