"""The controller's end of the connection to one worker: sends requests and receives replies."""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from instep.collectives.group import PeerFailure
from instep.engines.processes import messages
from instep.engines.processes.controller.remote_module import RemoteModuleState, TensorTableBuilder
from instep.engines.processes.controller.remote_replica import RemoteReplica
from instep.engines.processes.controller.rendezvous import CollectiveLog, error_result
from instep.engines.processes.controller.replies import RUNNING, ReplyGenerator, run_to_end, wrap_stop_iteration
from instep.engines.processes.controller.shared_parameters import pack_offsets
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
    TensorTableRequest,
)
from instep.engines.processes.serialization.exceptions import unpack_exception
from instep.engines.processes.serialization.module_globals import ModuleGlobals
from instep.engines.processes.serialization.registry import Payload
from instep.engines.processes.transport.channel import SOURCE, Channel, TensorTag, tag_by_value
from instep.engines.processes.transport.connection import ConnectionClosed, Message, ProtocolError
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.engines.processes.transport.cuda_ipc import CudaIpcChannel, allocate_shared
from instep.engines.processes.transport.doorbell import gradient_chunks, make_doorbell, ready_list_bytes
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.engines.processes.worker.ambient import describe_device
from instep.engines.processes.worker.module import gradient_slot
from instep.errors import EngineError
from instep.replicas.names import module_names
from instep.runtime.ambient import EncodedAmbientState
from instep.runtime.locks import ForkSafeLock

request_ids = itertools.count(1)
ABANDONED = error_result("the call was given up.")
"""The result of a collective in an abandoned call."""


class WorkerClient:
    """Sends requests to one worker and receives its replies; records what the worker has.

    Several threads may ask it at a time. One of them listens for all; each message finds its question by its number.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.channel = Channel(worker.connection, is_parent=True)
        self.lock = threading.RLock()
        """Held while sending or receiving."""
        self._pending: weakref.WeakValueDictionary[int, PendingReply] = weakref.WeakValueDictionary()
        """Requests without a reply yet, by id."""
        self._device_ready = False
        self.ipc_refusal: str | None = None
        """Why CUDA IPC cannot be used; empty if it can, None if not tried yet."""
        self._opened_memory: dict[int, list[DeviceMemory]] = {}
        """By module id: device memory that the worker has opened."""
        self._released_memory: list[DeviceMemory] = []
        """Device memory of released modules, kept until the worker has closed it."""
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

    def prepare_device(self, device: torch.device, near: bool) -> None:
        """Have the worker select its device, before its first request.

        If its tensors are `near`, on the very device that the caller's are on, see whether they can cross without
        leaving it.
        """
        if device.type == "cpu":
            return
        if not self._device_ready:
            self._send_device(describe_device(device))
            self._device_ready = True
        near = near and not self.ipc_refusal
        if near and self.ipc_refusal is None:
            try:
                trial = allocate_shared(1, device)
                refusal = self._send_device(describe_device(device, trial.handle))
            except DriverError as refused:
                refusal = str(refused)
            self.ipc_refusal = refusal or ""
            self.channel.cuda_ipc = None if refusal else CudaIpcChannel(device, is_parent=True)
        if self.channel.cuda_ipc is not None:
            self.channel.cuda_ipc.enabled = near

    def disable_ipc(self, why: str) -> None:
        """Send tensors through host memory from now on."""
        self.ipc_refusal = why

    def _send_device(self, order: DeviceRequest) -> str | None:
        """Why the worker cannot open the memory of `ipc_handle`; None if it can."""
        pending = self._new_pending()
        self.channel.send(messages.DEVICE, pending.request_id, order)
        refusal, _ = self.channel.decode(self.wait_reply(pending, None))
        return None if refusal is None else str(refusal)

    @property
    def same_device(self) -> bool:
        """Whether tensors of the current call are sent by CUDA IPC."""
        return self.channel.cuda_ipc is not None and self.channel.cuda_ipc.enabled

    def sync_module(self, replica: RemoteReplica) -> RemoteModuleState:
        """Send what the worker lacks of a module before it runs one of its methods."""
        place = script_environment()
        if place != self._script_environment:
            folder, path, variables, modules = place
            self._script_environment = folder, list(path), dict(variables), modules
            said = folder, worker_import_path(path, folder), modules_from_cwd(path, folder), dict(os.environ)
            self.channel.send(messages.ENVIRONMENT, 0, said)
        module_state: RemoteModuleState | None = replica.worker_states.get(self)
        self.channel.send_changed_globals(None if module_state is None else module_state.module_globals)
        if module_state is None:
            weakref.finalize(replica, self.released.append, ("module", replica.module_id))
        if (
            module_state is None
            or replica.needs_full_sync
            or module_state.used_ipc != self.same_device
            or module_state.has_changed()
        ):
            module_state = replica.worker_states[self] = self._send_module(replica)
        elif replica.pending_attributes:
            self._send_attributes(replica, module_state)
        replica.needs_full_sync, replica.pending_attributes = False, []
        return module_state

    def _send_attributes(self, replica: RemoteReplica, module_state: RemoteModuleState) -> None:
        """Send attributes that were set since."""
        known = set(map(id, module_state.generators))
        more = [source for source, _ in replica.cloner.generators if id(source) not in known]
        modules = replica.source_modules
        names = module_names(modules[0], modules)
        values: dict[str, Any] = {}
        for change in replica.pending_attributes:
            prefix = names[change.module_index]
            name = f"{prefix}.{change.name}" if prefix else change.name
            values[f"{name} ({len(values)})" if name in values else name] = change.new
        news: Any = AttributesRequest(
            [(change.module_index, change.name) for change in replica.pending_attributes], values, more
        )
        self.channel.send(messages.ATTRIBUTES, replica.module_id, news, module_globals=module_state.module_globals)
        module_state.generators += more

    def _take_released(self) -> tuple[list[int], list[int]]:
        """Take the ids of calls and modules that the worker can drop."""
        ended: list[int] = []
        modules: list[int] = []
        while self.released:
            kind, number = self.released.popleft()
            (ended if kind == "call" else modules).append(number)
        self._released_memory += [memory for number in modules for memory in self._opened_memory.pop(number, [])]
        return ended, modules

    def _send_module(self, replica: RemoteReplica) -> RemoteModuleState:
        pairs = [*replica.tensors.trainable, *replica.tensors.state]
        tensors = [source for source, _ in pairs]
        listed = TensorTableBuilder(tensors, replica, self.same_device)
        blocks = listed.blocks
        wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad and tensor.numel()]
        offsets, total = pack_offsets([tensors[n].numel() * tensors[n].element_size() for n in wanted])
        cut = (
            gradient_chunks((n, tensors[n]) for n in wanted)
            if replica.source_device.type == replica.worker_device.type == "cpu"
            else []
        )
        total += ready_list_bytes(cut)
        if (
            replica.gradient_memory is None
            or replica.gradient_memory.nbytes != total
            or isinstance(replica.gradient_memory, DeviceMemory) != self.same_device
        ):
            replica.gradient_memory = self._allocate_slots(total, replica.worker_device)
        places = list(zip(wanted, offsets, strict=True))
        known_blocks = [(number, memory.nbytes) for number, memory in blocks.items()]
        order: Any = TensorTableRequest(
            replica.module_id, replica.worker_device, listed.specs, listed.storages, known_blocks, (total, places)
        )
        order.ipc_handles = [(number, memory.nbytes, memory.handle) for number, memory in listed.ipc_blocks.items()]
        self._released_memory += self._opened_memory.get(replica.module_id, [])
        self._opened_memory[replica.module_id] = list(listed.ipc_blocks.values())
        fds = [memory.fd for memory in blocks.values()]
        doorbell = None
        if isinstance(replica.gradient_memory, SharedMemory):
            if cut:
                doorbell, order.has_doorbell = make_doorbell(replica.gradient_memory, cut), True
                fds.append(doorbell.fd)
            fds.append(replica.gradient_memory.fd)
        else:
            order.gradient_slots_handle = replica.gradient_memory.handle
            self._opened_memory[replica.module_id].append(replica.gradient_memory)
        self.channel.send(messages.TENSOR_TABLE, replica.module_id, order, fds=fds)
        known = {id(tensor): number for number, tensor in enumerate(tensors)}

        def describe(tensor: Tensor) -> TensorTag:
            return (SOURCE, known[id(tensor)]) if id(tensor) in known else tag_by_value(tensor.detach())

        source, _ = replica.cloner.modules[0]
        generators = [held for held, _ in replica.cloner.generators]
        order = ModuleRequest(
            replica.module_id,
            source,
            replica.source_device,
            replica.sync_batchnorm,
            replica.private_container_paths,
            generators,
        )
        module_globals = ModuleGlobals(self.channel.registry.sent_module_values)
        self.channel.send(
            *(messages.MODULE, replica.module_id, order, describe), label="the module", module_globals=module_globals
        )
        variables = self.channel.registry.closure_cells
        slots = {number: gradient_slot(replica.gradient_memory, offset, tensors[number]) for number, offset in places}
        table = [source if source.is_leaf else made for source, made in pairs]  # graphs lead to earlier calls
        made = [made for _, made in pairs]
        memory, at, near = replica.gradient_memory, dict(places), replica.same_device
        staging, loose = listed.staging, listed.unshared
        module_state = RemoteModuleState(
            table,
            made,
            slots,
            loose,
            memory,
            at,
            staging,
            near,
            self.same_device,
            generators,
            variables,
            doorbell,
            module_globals,
        )
        module_state.staged_offsets = listed.staged_offsets
        return module_state

    def _allocate_slots(self, nbytes: int, device: torch.device) -> SharedMemory | DeviceMemory:
        """Memory for gradients: on the device with CUDA IPC if possible, else in shared host memory."""
        if self.same_device:
            try:
                return allocate_shared(nbytes, device)
            except DriverError:
                pass
        return SharedMemory.create(nbytes, "the memory for the gradients of a replica")

    def send_forward(
        self, request: ForwardRequest, module_state: RemoteModuleState
    ) -> tuple[PendingReply, list[Tensor]]:
        """Send a forward; also returns the tensors of its arguments, in the order of their indices."""
        pending, ambient = self._new_pending(), request.ambient
        request.released = self._take_released()
        if ambient is None or ambient.context_vars or ambient.saved_tensor_hooks is not None:
            self._last_ambient = None  # values of the user's are sent again, and not compared
        elif (
            ambient == self._last_ambient and len(self._pending) == 1
        ):  # another call may fail before it has set them up
            request.ambient = None
        try:
            tensors = self.channel.send(
                *(messages.FORWARD, pending.request_id, request),
                label="arguments",
                module_globals=module_state.module_globals,
            )
        except BaseException:
            self.requeue_released(request)
            raise
        finally:
            request.ambient = ambient
        self._last_ambient = ambient
        return pending, tensors

    def requeue_released(self, request: ForwardRequest) -> None:
        """Release the same calls and modules again with the next forward: the worker may not have done it."""
        self.released.extend(
            [*(("call", n) for n in request.released[0]), *(("module", n) for n in request.released[1])]
        )

    def send_backward(self, request: BackwardRequest, module_state: RemoteModuleState) -> PendingReply:
        """Send a backward, with the current values of globals."""
        self.channel.send_changed_globals(module_state.module_globals)
        pending = self._new_pending()
        if module_state.doorbell is not None:
            module_state.doorbell.expect(pending.request_id, self._last_received_id)
        self.channel.send(messages.BACKWARD, pending.request_id, request)
        return pending

    def send_reachability(self, call: int, outputs: list[int], spent: list[list[int]]) -> PendingReply:
        """Ask which collectives a backward from some outputs of a call would reach."""
        pending = self._new_pending()
        self.channel.send(messages.REACHABILITY, pending.request_id, (call, outputs, spent))
        return pending

    def send(self, kind: str, value: Any, fds: Sequence[int] = ()) -> PendingReply:
        """Send a request of any other kind."""
        with self.lock:
            pending = self._new_pending()
            self.channel.send(kind, pending.request_id, value, fds=fds)
        return pending

    def _new_pending(self) -> PendingReply:
        pending = PendingReply(next(request_ids))
        self._pending[pending.request_id] = pending
        self.last_request_id = pending.request_id
        return pending

    def has_failed(self, pending: PendingReply) -> bool:
        """Whether a reply has arrived, and is an error."""
        try:
            message = self._receive_for(pending, 0) if messages.FAILED not in pending.received_kinds else None
        except ConnectionClosed:  # whoever hears it sees to that
            return False
        if message is not None:
            pending.put(message)
        return messages.FAILED in pending.received_kinds

    def _receive_for(self, pending: PendingReply, seconds: float = POLL_SECONDS) -> Message | None:
        """The next message for a request, if one arrives soon; messages for others are passed on."""
        if not self.lock.acquire(blocking=False):  # another thread listens, or asks
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
            self.lock.release()

    def _receive(self, seconds: float) -> Message | None:
        try:
            return self.worker.connection.receive(seconds)
        except ProtocolError as error:  # nothing that it says can be relied on
            self.worker.kill(f"it was ended, for what it sent is none of ours: {error}")
            raise ConnectionClosed(f"{self.worker.name} was ended") from error

    def abandon(self, pending: PendingReply) -> None:
        """Ignore the reply to a request. The worker's collectives in it fail."""
        if self._pending.pop(pending.request_id, None) is not None:
            self._last_ambient = None  # the worker may not come to that
            with suppress(ConnectionClosed):
                self.channel.send_flat(messages.COLLECTIVE_RESULT, pending.request_id, ABANDONED)

    def abandon_since(self, number: int) -> None:
        """Abandon all requests after one."""
        for pending in [pending for pending in self._pending.values() if pending.request_id > number]:
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
        wait = ReplyWatchdog(self.worker, self.timeout)
        while True:
            message = self._receive_for(pending)
            if message is None:
                wait.check()
                if collectives is not None:
                    collectives.warn_if_slow()
                on_host = self.channel.cuda_ipc is None and self.worker.connection.receiver is None
                # That may have been this one, whose answer another thread has heard just now.
                if on_host and collectives is not None and collectives.any_failed() and not pending.has_message():
                    raise PeerFailure("another replica failed, and this one was not waited for.")
                continue
            if message.kind == messages.COLLECTIVE and collectives is not None:
                (index, label, bare), tensors = self.channel.decode_flat(message)
                self.channel.send_flat(
                    messages.COLLECTIVE_RESULT,
                    message.call_id,
                    (yield from collectives.exchange(index, label, bare, tensors)),
                )
                yield RUNNING
                wait = ReplyWatchdog(self.worker, self.timeout)
            elif message.kind == messages.FAILED:
                pending.received_kinds.add(message.kind)
                self._pending.pop(pending.request_id, None)
                self._last_ambient = None  # it may not have come to that
                error = unpack_exception(Payload(message.body, message.tensors), self.channel.registry)
                self.last_error_id = id(error)
                if isinstance(error, (EngineError, MemoryError)):
                    self.channel.registry.mark_all_unsent()  # it may not have what was sent with it
                raise wrap_stop_iteration(error)
            elif message.kind == messages.DONE:
                self._pending.pop(pending.request_id, None)  # graphs may hold it for long
                self._released_memory.clear()  # it has read all that was said before
                return message
            else:
                raise EngineError(f"{self.worker.name} answered {message.kind!r} to a call.")


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
