"""The controller's end of the connection to one worker: sends requests and receives replies."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from instep.collectives.group import PeerFailure
from instep.engines.base import add_replica_note
from instep.engines.processes import messages
from instep.engines.processes.controller.remote_module import RemoteModuleState, TensorTableBuilder
from instep.engines.processes.controller.remote_replica import RemoteReplica
from instep.engines.processes.controller.rendezvous import CollectiveLog, ControllerRendezvous, error_result
from instep.engines.processes.controller.replies import (
    RUNNING,
    ReplyGenerator,
    acts_for_caller,
    run_to_end,
    wrap_stop_iteration,
)
from instep.engines.processes.controller.shared_parameters import pack_offsets
from instep.engines.processes.lifecycle.exit_monitor import call_at_exit_of
from instep.engines.processes.lifecycle.launch import modules_from_cwd, script_environment, worker_import_path
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import (
    HANDOFF_SECONDS,
    POLL_SECONDS,
    PendingReply,
    ReplyWatchdog,
)
from instep.engines.processes.messages import (
    AttributesRequest,
    BackwardRequest,
    DeviceRequest,
    ForwardRequest,
    ModuleRequest,
    PreparedForwardRequest,
    TensorTableRequest,
)
from instep.engines.processes.serialization.exceptions import unpack_exception
from instep.engines.processes.serialization.module_globals import ModuleGlobals
from instep.engines.processes.serialization.registry import PickledValue
from instep.engines.processes.transport.channel import SOURCE, Channel, TensorTag, tag_by_value
from instep.engines.processes.transport.connection import ConnectionClosed, Message, ProtocolError
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.engines.processes.transport.cuda_ipc import FLAG_COUNT, CudaIpcChannel, allocate_shared
from instep.engines.processes.transport.device_rows import DeviceRowMemory, RowCall
from instep.engines.processes.transport.doorbell import gradient_chunks, make_doorbell, ready_list_bytes
from instep.engines.processes.transport.row_memory import RowMemory
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.engines.processes.transport.stream_flags import StreamFlags
from instep.engines.processes.worker.ambient import (
    RETURNED_BYTE,
    SENT_BYTE,
    TEST_BYTES,
    describe_device,
    holds_byte,
)
from instep.engines.processes.worker.module import gradient_slot
from instep.errors import EngineError, LostExchange, WorkerFailure
from instep.replicas.names import module_names
from instep.runtime.ambient import EncodedAmbientState
from instep.runtime.locks import ForkSafeLock

request_ids = itertools.count(1)
_RESULT_SECONDS = 60.0
"""Seconds to wait for results of a worker that is to be stopped."""
ABANDONED = error_result("the call was abandoned.")
"""The result of a collective in an abandoned call."""


class WorkerGroup(Protocol):
    """An NCCL group with a worker (`nccl_manager.ControllerGroup`)."""

    def on_worker_exit(self) -> None:
        """Called when a worker of the group has ended."""
        ...


class WorkerClient:
    """Sends requests to one worker and receives its replies; records what the worker has.

    Several threads may wait for replies. One of them receives for all and passes messages on by request id.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.channel = Channel(worker.connection, is_parent=True)
        worker.connection.open_mailboxes()
        self.lock = threading.RLock()
        """Held while sending or receiving."""
        self._pending: weakref.WeakValueDictionary[int, PendingReply] = weakref.WeakValueDictionary()
        """Requests without a reply yet, by id."""
        self._device_ready = False
        self._ipc_refusals: dict[torch.device, str] = {}
        """By device: why memory on it cannot be used to send tensors; empty if it can."""
        self.groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        """The NCCL groups of the worker."""
        self._opened_memory: dict[int, list[DeviceMemory]] = {}
        """By module id: device memory that the worker has opened."""
        self._released_memory: list[DeviceMemory] = []
        """Device memory of released modules, kept until the worker has closed it."""
        self.gradient_memory: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()
        """Device memory that the worker writes gradients to."""
        self._release_lock = threading.Lock()
        """Held while waits are released, by the thread that notices the worker's exit."""
        self.lost_results = False
        """Whether the worker ended before results that were already returned were complete."""
        self._row_memories: weakref.WeakSet[RowMemory] = weakref.WeakSet()
        """Memory for collectives that the worker has."""
        self._device_row_calls: weakref.WeakKeyDictionary[DeviceRowMemory, tuple[int, RowCall]] = (
            weakref.WeakKeyDictionary()
        )
        """For each memory for rows on a device: the worker's replica, and its part in the last call."""
        self._script_environment: Any = None
        """The working directory, import path, environment and module count that the worker was sent."""
        self.timeout = math.inf
        """Seconds without a message after which the worker counts as stuck."""
        self._last_ambient: EncodedAmbientState | None = None
        """The ambient state of the last forward, if it can be reused."""
        self.last_request_id = 0
        """The id of the last request."""
        self._last_received_id = 0
        """The id of the latest request that a message has arrived for."""
        self.last_error_id = 0
        """`id()` of the last error that the worker replied with."""
        self.released: deque[tuple[str, int]] = deque()
        """Calls and modules that the worker can drop. Finalizers append to it."""

    def prepare_device(self, device: torch.device, memory_device: torch.device | None) -> None:
        """Make the worker select its device, before its first request.

        With a `memory_device`, which may be another one, also test whether the worker can open memory on it, and use
        such memory for the next requests if it can.
        """
        if device.type == "cpu":
            return
        if not self._device_ready:
            self._send_device(describe_device(device))
            self._device_ready = True
        if memory_device is not None and memory_device not in self._ipc_refusals:
            self._ipc_refusals[memory_device] = self._connect_ipc(device, memory_device)
        if self.channel.cuda_ipc is not None:
            self.channel.cuda_ipc.enabled = self.refusal_for(memory_device) == ""

    def refusal_for(self, memory_device: torch.device | None) -> str | None:
        """Why tensors are not sent through memory on a device; empty if they are, None if that was not asked for."""
        return None if memory_device is None else self._ipc_refusals.get(memory_device)

    def _connect_ipc(self, device: torch.device, memory_device: torch.device) -> str:
        """Test CUDA IPC, and create the channel if it works; otherwise returns why it does not."""
        if self.channel.cuda_ipc is not None:
            return f"the worker of {self.worker.name} uses memory of {self.channel.cuda_ipc.device} for another wrapper"
        try:
            memory, flags = allocate_shared(TEST_BYTES, memory_device), StreamFlags.create(FLAG_COUNT, memory_device)
            memory.fill(SENT_BYTE)
            refusal = self._send_device(describe_device(device, memory.handle), [flags.fd])
            if refusal is None and not holds_byte(memory, RETURNED_BYTE):
                refusal = f"what {device} writes to memory of {memory_device} does not arrive"
        except DriverError as error:
            refusal = str(error)
        if not refusal and not call_at_exit_of(self.worker, self.release_waits):
            refusal = "the kernel does not report the exit of processes (pidfd_open)"
        if refusal:
            return refusal
        self.channel.cuda_ipc = CudaIpcChannel(memory_device, flags, is_parent=True)
        reference = weakref.WeakMethod(self.wait_for_results)
        self.worker.before_stop = lambda: None if (wait := reference()) is None else wait()
        return ""

    def disable_ipc(self, reason: str) -> None:
        """Send tensors through host memory from now on."""
        assert self.channel.cuda_ipc is not None
        self._ipc_refusals[self.channel.cuda_ipc.device] = reason

    def wait_for_results(self) -> None:
        """Wait until the results that the worker has announced are complete, before it is stopped."""
        deadline, ipc = time.monotonic() + _RESULT_SECONDS, self.channel.cuda_ipc
        while ipc is not None and ipc.awaits_peer() and self.worker.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)

    def release_waits(self) -> None:
        """After the worker's exit: release all that waits for it on a device. May be called again."""
        ipc = self.channel.cuda_ipc
        with self._release_lock:
            results_lost = ipc is not None and ipc.awaits_peer()
            for rows, (index, row_call) in list(self._device_row_calls.items()):
                rows.release_request(index, row_call, results_lost=results_lost)
            if ipc is not None and ipc.release_waits(list(self.gradient_memory)):
                self.lost_results = True
        for group in list(self.groups):  # afterwards: an abort may wait for the device
            group.on_worker_exit()

    def _late_error(self) -> BaseException | None:
        """The error that the worker reported before it ended, after its last reply."""
        acquired = self.lock.acquire(blocking=not acts_for_caller())
        try:
            while (message := self._receive(0)) is not None:
                if message.kind == messages.FAILED:
                    error = unpack_exception(PickledValue(message.body, message.tensors), self.channel.registry)
                    return add_replica_note(self.worker.name, error)
        except ConnectionClosed:
            pass
        finally:
            if acquired:
                self.lock.release()
        return None

    def raise_lost_results(self) -> None:
        """Raise if the worker ended before results that were already returned were complete."""
        if self.lost_results:
            self.lost_results = False
            raise self._late_error() or WorkerFailure(
                f"the worker of {self.worker.name} ended before its last results were complete: "
                f"{self.worker.exit_reason()}\n"
                f"Outputs and gradients of that call are NaN, or incomplete sums. Restore the weights if the optimizer "
                f"has used them."
            )

    def _send_device(self, request: DeviceRequest, fds: Sequence[int] = ()) -> str | None:
        """Why the worker cannot open the memory of `ipc_handle`; None if it can."""
        pending = self.new_pending()
        self.channel.send(messages.DEVICE, pending.request_id, request, fds=fds)
        refusal, _ = self.channel.decode(self.wait_reply(pending, None))
        return None if refusal is None else str(refusal)

    @property
    def uses_ipc(self) -> bool:
        """Whether tensors of the current call are sent by CUDA IPC."""
        return self.channel.cuda_ipc is not None and self.channel.cuda_ipc.enabled

    def sync_module(self, replica: RemoteReplica) -> RemoteModuleState:
        """Send what the worker lacks of a module before it runs one of its methods."""
        environment = script_environment()
        if environment != self._script_environment:
            cwd, path, variables, module_count = environment
            self._script_environment = cwd, list(path), dict(variables), module_count
            request = cwd, worker_import_path(path, cwd), modules_from_cwd(path, cwd), dict(os.environ)
            self.channel.send(messages.ENVIRONMENT, 0, request)
        module_state: RemoteModuleState | None = replica.worker_states.get(self)
        self.channel.send_changed_globals(None if module_state is None else module_state.module_globals)
        if module_state is None:
            weakref.finalize(replica, self.released.append, ("module", replica.module_id))
        if (
            module_state is None
            or replica.needs_full_sync
            or module_state.used_ipc != self.uses_ipc
            or module_state.has_changed()
        ):
            module_state = replica.worker_states[self] = self._send_module(replica)
        elif replica.pending_attributes:
            self._send_attributes(replica, module_state)
        replica.needs_full_sync, replica.pending_attributes = False, []
        return module_state

    def _send_attributes(self, replica: RemoteReplica, module_state: RemoteModuleState) -> None:
        """Send attributes that were set since the module was sent."""
        sent = set(map(id, module_state.generators))
        generators = [source for source, _ in replica.cloner.generators if id(source) not in sent]
        modules = replica.source_modules
        names = module_names(modules[0], modules)
        values: dict[str, Any] = {}
        for change in replica.pending_attributes:
            prefix = names[change.module_index]
            name = f"{prefix}.{change.name}" if prefix else change.name
            values[f"{name} ({len(values)})" if name in values else name] = change.new
        targets = [(change.module_index, change.name) for change in replica.pending_attributes]
        request = AttributesRequest(targets, values, generators)
        self.channel.send(messages.ATTRIBUTES, replica.module_id, request, module_globals=module_state.module_globals)
        module_state.generators += generators

    def take_released(self) -> tuple[list[int], list[int]]:
        """Take the ids of calls and modules that the worker can drop."""
        calls: list[int] = []
        modules: list[int] = []
        while self.released:
            kind, number = self.released.popleft()
            (calls if kind == "call" else modules).append(number)
        self._released_memory += [memory for number in modules for memory in self._opened_memory.pop(number, [])]
        return calls, modules

    def _send_module(self, replica: RemoteReplica) -> RemoteModuleState:
        """Send the whole module: its tensor table, then its objects."""
        pairs = [*replica.tensors.trainable, *replica.tensors.state]
        tensors = [source for source, _ in pairs]
        table = TensorTableBuilder(tensors, replica, self._shares_memory(replica))
        with_slot = [number for number, tensor in enumerate(tensors) if tensor.requires_grad and tensor.numel()]
        offsets, nbytes = pack_offsets([tensors[n].numel() * tensors[n].element_size() for n in with_slot])
        slot_offsets = dict(zip(with_slot, offsets, strict=True))
        on_cpu = replica.source_device.type == replica.worker_device.type == "cpu"
        chunks = gradient_chunks((n, tensors[n]) for n in with_slot) if on_cpu else []
        nbytes += ready_list_bytes(chunks)
        memory = self._gradient_memory(replica, nbytes)
        request = TensorTableRequest(
            replica.module_id,
            replica.worker_device,
            table.specs,
            table.storages,
            [(number, block.nbytes) for number, block in table.blocks.items()],
            (nbytes, list(slot_offsets.items())),
            [(number, block.nbytes, block.handle) for number, block in table.ipc_blocks.items()],
        )
        self._released_memory += self._opened_memory.get(replica.module_id, [])
        self._opened_memory[replica.module_id] = list(table.ipc_blocks.values())
        fds = [block.fd for block in table.blocks.values()]
        doorbell = None
        if isinstance(memory, SharedMemory):
            if chunks:
                doorbell, request.has_doorbell = make_doorbell(memory, chunks), True
                fds.append(doorbell.fd)
            fds.append(memory.fd)
        else:
            request.gradient_slots_handle = memory.handle
            self._opened_memory[replica.module_id].append(memory)
        self.channel.send(messages.TENSOR_TABLE, replica.module_id, request, fds=fds)
        module_globals = ModuleGlobals(self.channel.registry.sent_module_values)
        generators = self._send_objects(replica, tensors, module_globals)
        module_state = RemoteModuleState(
            [source if source.is_leaf else copy for source, copy in pairs],  # a graph leads to earlier calls
            [copy for _, copy in pairs],
            {number: gradient_slot(memory, offset, tensors[number]) for number, offset in slot_offsets.items()},
            table.unshared,
            memory,
            slot_offsets,
            table.staging,
            replica.may_use_ipc,
            self.uses_ipc,
            generators,
            self.channel.registry.closure_cells,
            doorbell,
            module_globals,
        )
        module_state.staged_offsets = table.staged_offsets
        return module_state

    def _send_objects(
        self, replica: RemoteReplica, tensors: Sequence[Tensor], module_globals: ModuleGlobals
    ) -> list[torch.Generator]:
        """Send the module; its tensors refer to the tensor table. Returns the generators that it holds."""
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

        def describe(tensor: Tensor) -> TensorTag:
            return (SOURCE, numbers[id(tensor)]) if id(tensor) in numbers else tag_by_value(tensor.detach())

        generators = [source for source, _ in replica.cloner.generators]
        request = ModuleRequest(
            replica.module_id,
            replica.source_modules[0],
            replica.source_device,
            replica.sync_batchnorm,
            replica.private_container_paths,
            generators,
        )
        self.channel.send(
            messages.MODULE, replica.module_id, request, describe, label="the module", module_globals=module_globals
        )
        return generators

    def _shares_memory(self, replica: RemoteReplica) -> bool:
        """Whether the worker uses the source's memory on their common device."""
        return replica.same_device and self.uses_ipc

    def _gradient_memory(self, replica: RemoteReplica, nbytes: int) -> SharedMemory | DeviceMemory:
        """The memory for a replica's gradients: the one that it has, if it fits."""
        memory, on_device = replica.gradient_memory, self._shares_memory(replica)
        if memory is None or memory.nbytes != nbytes or isinstance(memory, DeviceMemory) != on_device:
            memory = replica.gradient_memory = self._allocate_slots(nbytes, replica)
        return memory

    def _allocate_slots(self, nbytes: int, replica: RemoteReplica) -> SharedMemory | DeviceMemory:
        """Memory for gradients: on a common device with CUDA IPC if possible, else in shared host memory."""
        if self._shares_memory(replica):
            try:
                memory = allocate_shared(nbytes, replica.worker_device)
            except DriverError:
                pass
            else:
                self.gradient_memory.add(memory)
                return memory
        return SharedMemory.create(nbytes, "the memory for the gradients of a replica")

    def share_rows(
        self,
        request: ForwardRequest | BackwardRequest,
        group: ControllerRendezvous,
        replica_index: int,
        pending: PendingReply,
    ) -> None:
        """Let a request's replica exchange rows through the group's memory, after those that it replays."""
        memory = group.row_memory
        if memory is not None and memory.device_rows is not None:
            memory.device_rows.set_request(replica_index, pending.request_id)
        if memory is not None and memory not in self._row_memories:
            value: list[Any] = [memory.capacity, memory.memory.nbytes, None]
            fds = [memory.memory.fd]
            if memory.device_rows is not None:
                value[2] = memory.device_rows.device_memory.handle
                fds += memory.device_rows.fds
                self._opened_memory[memory.memory_id] = [memory.device_rows.device_memory]
            self.channel.send(messages.ROW_MEMORY, memory.memory_id, value, fds=fds)
            weakref.finalize(memory, self.released.append, ("module", memory.memory_id))
            self._row_memories.add(memory)
        request.rows, request.gathered_rows = group.row_request(), group.rows_to_replay()

    def confirm_rows(self, group: ControllerRendezvous, replica_index: int, pending: PendingReply) -> None:
        """Record that a request was sent whose replica may exchange rows on its device."""
        memory = group.row_memory
        if memory is not None and memory.device_rows is not None:
            row_call = memory.device_rows.confirm_request(replica_index, pending.request_id)
            self._device_row_calls[memory.device_rows] = replica_index, row_call
            if not self.worker.is_alive():  # it may have ended before
                self.release_waits()

    def send_forward(
        self, request: ForwardRequest, module_state: RemoteModuleState, pending: PendingReply
    ) -> list[Tensor]:
        """Send a forward; returns the tensors of its arguments, in the order of their indices."""
        ambient = request.ambient
        request.released = self.take_released()
        if ambient is None or ambient.context_vars or ambient.saved_tensor_hooks is not None:
            self._last_ambient = None  # objects of the user are sent again, and not compared
        elif ambient == self._last_ambient and len(self._pending) == 1:  # another request may fail before it is applied
            request.ambient = None
        try:
            tensors = self.channel.send(
                messages.FORWARD,
                pending.request_id,
                request,
                label="arguments",
                module_globals=module_state.module_globals,
            )
        except BaseException:
            self.requeue_released(request)
            raise
        finally:
            request.ambient = ambient
        self._last_ambient = ambient
        return tensors

    def requeue_released(self, request: ForwardRequest | PreparedForwardRequest) -> None:
        """Release the same calls and modules again with the next forward: the worker may not have done it."""
        self.released.extend(
            [*(("call", n) for n in request.released[0]), *(("module", n) for n in request.released[1])]
        )

    def send_backward(self, request: BackwardRequest, module_state: RemoteModuleState, pending: PendingReply) -> None:
        """Send a backward, with the current values of globals."""
        self.channel.send_changed_globals(module_state.module_globals)
        if module_state.doorbell is not None:
            module_state.doorbell.expect(pending.request_id, self._last_received_id)
        self.channel.send(messages.BACKWARD, pending.request_id, request)

    def send(self, kind: str, value: Any, fds: Sequence[int] = ()) -> PendingReply:
        """Send a request of any other kind."""
        with self.lock:
            pending = self.new_pending()
            self.channel.send(kind, pending.request_id, value, fds=fds)
        return pending

    def new_pending(self) -> PendingReply:
        """The entry for the reply of the next request."""
        pending = PendingReply(next(request_ids))
        self._pending[pending.request_id] = pending
        self.last_request_id = pending.request_id
        return pending

    def has_failed(self, pending: PendingReply) -> bool:
        """Whether a reply has arrived, and is an error."""
        try:
            message = self._receive_for(pending, 0) if messages.FAILED not in pending.received_kinds else None
        except ConnectionClosed:  # the thread that waits for the reply handles it
            return False
        if message is not None:
            pending.put(message)
        return messages.FAILED in pending.received_kinds

    def _receive_for(self, pending: PendingReply, seconds: float = POLL_SECONDS) -> Message | None:
        """The next message for a request, if one arrives soon; messages for others are passed on."""
        acquired = self.lock.acquire(blocking=False)
        if not acquired and not (pending.holds_lock and acts_for_caller()):  # another thread sends or receives
            return pending.get(min(seconds, HANDOFF_SECONDS))
        try:
            message = pending.get(0)
            if message is None:
                message = self._receive(seconds)
            if message is not None:
                self._last_received_id = max(self._last_received_id, message.call_id)
            if message is None or message.call_id == pending.request_id:
                return message
            other = self._pending.get(message.call_id)
            if other is not None:
                other.put(message)
            elif message.kind == messages.COLLECTIVE:
                self.channel.send_flat(messages.COLLECTIVE_RESULT, message.call_id, ABANDONED)
            return None
        finally:
            if acquired:
                self.lock.release()

    def _receive(self, seconds: float) -> Message | None:
        try:
            return self.worker.connection.receive(seconds)
        except ProtocolError as error:
            self.worker.kill(f"it was killed because it sent a malformed message: {error}")
            raise ConnectionClosed(f"{self.worker.name} was killed") from error

    def abandon(self, pending: PendingReply) -> None:
        """Ignore the reply to a request. The worker's collectives in it fail."""
        if self._pending.pop(pending.request_id, None) is not None:
            self._last_ambient = None  # the worker may not apply it
            self.released.append(("call", pending.request_id))  # the worker drops the graph, if it was a forward
            with suppress(ConnectionClosed):
                self.channel.send_flat(messages.COLLECTIVE_RESULT, pending.request_id, ABANDONED)

    def abandon_since(self, request_id: int) -> None:
        """Abandon all requests after one."""
        for pending in [pending for pending in self._pending.values() if pending.request_id > request_id]:
            self.abandon(pending)

    def wait_reply(self, pending: PendingReply, collectives: CollectiveLog | None) -> Message:
        """Wait for a reply in this thread."""
        return run_to_end(self.receive_reply(pending, collectives))

    def receive_reply(self, pending: PendingReply, collectives: CollectiveLog | None) -> ReplyGenerator[Message]:
        """Wait for a reply, taking part in the worker's collectives meanwhile."""
        try:
            return (yield from self._receive_reply(pending, collectives))
        except BaseException:
            self.abandon(pending)
            raise

    def _receive_reply(self, pending: PendingReply, collectives: CollectiveLog | None) -> ReplyGenerator[Message]:
        if collectives is not None:
            collectives.rewind()
        watchdog, progress = ReplyWatchdog(self.worker, self.timeout), 0
        while True:
            is_polling = collectives is not None and collectives.is_polling()
            message = self._receive_for(pending, 0 if is_polling else POLL_SECONDS)
            if message is None:
                if collectives is not None and collectives.progress() != progress:
                    watchdog, progress = ReplyWatchdog(self.worker, self.timeout), collectives.progress()
                watchdog.check()
                if is_polling:
                    yield RUNNING
                    continue
                on_host = self.channel.cuda_ipc is None and self.worker.connection.receiver is None
                # The failed replica may be this one: another thread may just have received its reply.
                if on_host and collectives is not None and collectives.any_failed() and not pending.has_message():
                    raise PeerFailure("another replica failed, so this one was not awaited.")
                continue
            if message.kind == messages.COLLECTIVE and collectives is not None:
                (index, label, payload), tensors = self.channel.decode_flat(message)
                result = yield from collectives.exchange(index, label, payload, tensors)
                self.channel.send_flat(messages.COLLECTIVE_RESULT, message.call_id, result)
                yield RUNNING
                watchdog = ReplyWatchdog(self.worker, self.timeout)
            elif message.kind == messages.COLLECTIVE:
                raise LostExchange("a replica called a collective in a call that was prepared without one.")
            elif message.kind == messages.FAILED:
                pending.received_kinds.add(message.kind)
                self._pending.pop(pending.request_id, None)
                self._last_ambient = None  # the worker may not have applied it
                error = unpack_exception(PickledValue(message.body, message.tensors), self.channel.registry)
                self.last_error_id = id(error)
                if isinstance(error, (EngineError, MemoryError)):
                    self.channel.registry.mark_all_unsent()  # the worker may not have decoded the request
                raise wrap_stop_iteration(error)
            elif message.kind == messages.DONE:
                self._pending.pop(pending.request_id, None)  # graphs may keep it alive
                self._released_memory.clear()  # the worker has handled all earlier messages
                return message
            else:
                raise EngineError(f"{self.worker.name} replied to a request with {message.kind!r}.")


_clients: weakref.WeakKeyDictionary[WorkerProcess, WorkerClient] = weakref.WeakKeyDictionary()
_clients_lock = ForkSafeLock()


def client_for(worker: WorkerProcess) -> WorkerClient:
    """The client of a worker. All engines share it; it is created once, also by concurrent threads."""
    client = _clients.get(worker)
    if client is not None:
        return client
    with _clients_lock:
        if worker not in _clients:
            drop_dead_clients()
            _clients[worker] = WorkerClient(worker)
        return _clients[worker]


def drop_dead_clients() -> None:
    """Drop the clients of dead workers, which may hold device memory."""
    for worker in [reference() for reference in _clients.keyrefs()]:
        if worker is not None and not (worker.is_owned() and worker.is_alive()):
            _clients.pop(worker, None)
