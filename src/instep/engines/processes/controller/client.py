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
from instep.engines.processes.lifecycle.launch import modules_from_cwd, worker_import_path
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import (
    HANDOFF_SECONDS,
    POLL_SECONDS,
    PendingReply,
    ReplyWatchdog,
    script_environment,
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
from instep.engines.processes.serialization.registry import Payload
from instep.engines.processes.transport.channel import SOURCE, Channel, TensorTag, tag_by_value
from instep.engines.processes.transport.connection import ConnectionClosed, Message, ProtocolError
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.engines.processes.transport.cuda_ipc import CudaIpcChannel, allocate_shared
from instep.engines.processes.transport.doorbell import Doorbell, gradient_chunks, make_doorbell, ready_list_bytes
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.engines.processes.worker.ambient import describe_device
from instep.engines.processes.worker.module import gradient_slot
from instep.errors import EngineError
from instep.replicas.names import module_names
from instep.runtime.ambient import EncodedAmbientState
from instep.runtime.locks import ForkSafeLock

request_ids = itertools.count(1)
ABANDONED = error_result("the call was given up.")
"""What comes of a meeting in a call whose answer nobody waits for."""


class WorkerClient:
    """What one worker knows, and the conversation with it.

    Several threads may ask it at a time. One of them listens for all; each message finds its question by its number.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.channel = Channel(worker.connection, is_parent=True)
        self.lock = threading.RLock()
        """Held by whoever speaks or listens."""
        self._pending: weakref.WeakValueDictionary[int, PendingReply] = weakref.WeakValueDictionary()
        """Of questions that have no answer yet."""
        self._device_ready = False
        self.ipc_refusal: str | None = None
        """Why tensors cannot stay on the device that both sides work on; empty if they can, None before it is known."""
        self._opened_memory: dict[int, list[DeviceMemory]] = {}
        """By the number of a stand-in: memory that the worker has opened."""
        self._released_memory: list[DeviceMemory] = []
        """The same, of stand-ins that it was told to forget."""
        self._script_environment: Any = None
        """The folder, the import path, the environment and the number of modules when the worker was told of them."""
        self.timeout = math.inf
        """Seconds without a word from the worker, after which it is given up."""
        self._last_ambient: EncodedAmbientState | None = None
        """Those of the last forward."""
        self.last_request_id = 0
        """The number of the last question."""
        self._last_received_id = 0
        """The number of what the worker was last heard to work on."""
        self.last_error_id = 0
        """The id of the error that was heard last."""
        self.released: deque[tuple[str, int]] = deque()
        """Calls and stand-ins that nobody needs any longer; finalizers only put them here."""

    def prepare_device(self, device: torch.device, near: bool) -> None:
        """Have the worker take its device, the first time that it is asked for something.

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
        """From now on tensors leave the device to cross."""
        self.ipc_refusal = why

    def _send_device(self, order: DeviceRequest) -> str | None:
        """Why the worker cannot open memory of its device that it was given a handle of; None if it can."""
        box = self._new_pending()
        self.channel.send(messages.DEVICE, box.request_id, order)
        refusal, _ = self.channel.decode(self.wait_reply(box, None))
        return None if refusal is None else str(refusal)

    @property
    def same_device(self) -> bool:
        """Whether tensors of the call at hand stay on the device that both sides work on."""
        return self.channel.cuda_ipc is not None and self.channel.cuda_ipc.enabled

    def sync_module(self, shadow: RemoteReplica) -> RemoteModuleState:
        """Tell the worker what it does not know yet of a module, of which it is to run a method."""
        place = script_environment()
        if place != self._script_environment:
            folder, path, variables, modules = place
            self._script_environment = folder, list(path), dict(variables), modules
            said = folder, worker_import_path(path, folder), modules_from_cwd(path, folder), dict(os.environ)
            self.channel.send(messages.ENVIRONMENT, 0, said)
        self.channel.send_changed_globals()
        told: RemoteModuleState | None = shadow.worker_states.get(self)
        if told is None:
            weakref.finalize(shadow, self.released.append, ("module", shadow.module_id))
        if told is None or shadow.needs_full_sync or told.used_ipc != self.same_device or told.has_changed():
            told = shadow.worker_states[self] = self._send_module(shadow)
        elif shadow.pending_attributes:
            self._send_attributes(shadow, told)
        shadow.needs_full_sync, shadow.pending_attributes = False, []
        return told

    def _send_attributes(self, shadow: RemoteReplica, told: RemoteModuleState) -> None:
        """Tell the worker of attributes that were set, and of nothing else."""
        known = set(map(id, told.generators))
        more = [source for source, _ in shadow.cloner.generators if id(source) not in known]
        modules = shadow.source_modules
        names = module_names(modules[0], modules)
        values: dict[str, Any] = {}
        for change in shadow.pending_attributes:
            prefix = names[change.module_index]
            name = f"{prefix}.{change.name}" if prefix else change.name
            values[f"{name} ({len(values)})" if name in values else name] = change.new
        news: Any = AttributesRequest(
            [(change.module_index, change.name) for change in shadow.pending_attributes], values, more
        )
        self.channel.send(messages.ATTRIBUTES, shadow.module_id, news)
        told.generators += more

    def _take_released(self) -> tuple[list[int], list[int]]:
        """Calls and modules that the worker may forget."""
        ended: list[int] = []
        modules: list[int] = []
        while self.released:
            kind, number = self.released.popleft()
            (ended if kind == "call" else modules).append(number)
        self._released_memory += [memory for number in modules for memory in self._opened_memory.pop(number, [])]
        return ended, modules

    def _send_module(self, shadow: RemoteReplica) -> RemoteModuleState:
        pairs = [*shadow.tensors.trainable, *shadow.tensors.state]
        tensors = [source for source, _ in pairs]
        listed = TensorTableBuilder(tensors, shadow, self.same_device)
        blocks = listed.blocks
        wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad and tensor.numel()]
        offsets, total = pack_offsets([tensors[n].numel() * tensors[n].element_size() for n in wanted])
        cut = (
            gradient_chunks((n, tensors[n]) for n in wanted)
            if shadow.source_device.type == shadow.worker_device.type == "cpu"
            else []
        )
        total += ready_list_bytes(cut)
        if (
            shadow.gradient_memory is None
            or shadow.gradient_memory.nbytes != total
            or isinstance(shadow.gradient_memory, DeviceMemory) != self.same_device
        ):
            shadow.gradient_memory = self._allocate_slots(total, shadow.worker_device)
        places = list(zip(wanted, offsets, strict=True))
        known_blocks = [(number, memory.nbytes) for number, memory in blocks.items()]
        order: Any = TensorTableRequest(
            shadow.module_id, shadow.worker_device, listed.specs, listed.storages, known_blocks, (total, places)
        )
        order.ipc_handles = [(number, memory.nbytes, memory.handle) for number, memory in listed.ipc_blocks.items()]
        self._released_memory += self._opened_memory.get(shadow.module_id, [])
        self._opened_memory[shadow.module_id] = list(listed.ipc_blocks.values())
        fds = [memory.fd for memory in blocks.values()]
        bell = None
        if isinstance(shadow.gradient_memory, SharedMemory):
            if cut:
                bell, order.has_doorbell = make_doorbell(shadow.gradient_memory, cut), True
                fds.append(bell.fd)
            fds.append(shadow.gradient_memory.fd)
        else:
            order.gradient_slots_handle = shadow.gradient_memory.handle
            self._opened_memory[shadow.module_id].append(shadow.gradient_memory)
        self.channel.send(messages.TENSOR_TABLE, shadow.module_id, order, fds=fds)
        known = {id(tensor): number for number, tensor in enumerate(tensors)}

        def describe(tensor: Tensor) -> TensorTag:
            return (SOURCE, known[id(tensor)]) if id(tensor) in known else tag_by_value(tensor.detach())

        source, _ = shadow.cloner.modules[0]
        generators = [held for held, _ in shadow.cloner.generators]
        order = ModuleRequest(
            shadow.module_id, source, shadow.source_device, shadow.sync_batchnorm, shadow.private_containers, generators
        )
        self.channel.send(messages.MODULE, shadow.module_id, order, describe, label="the module")
        variables = self.channel.registry.closure_cells
        slots = {number: gradient_slot(shadow.gradient_memory, offset, tensors[number]) for number, offset in places}
        table = [source if source.is_leaf else made for source, made in pairs]  # graphs lead to earlier calls
        made = [made for _, made in pairs]
        memory, at, near = shadow.gradient_memory, dict(places), shadow.same_device
        image, loose = listed.staging, listed.unshared
        told = RemoteModuleState(
            table, made, slots, loose, memory, at, image, near, self.same_device, generators, variables, bell
        )
        told.staged_offsets = listed.staged_offsets
        return told

    def _allocate_slots(self, nbytes: int, device: torch.device) -> SharedMemory | DeviceMemory:
        """Memory for gradients: of the device, where both sides work on it and it has some to give."""
        if self.same_device:
            try:
                return allocate_shared(nbytes, device)
            except DriverError:
                pass
        return SharedMemory.create(nbytes, "the memory for the gradients of a replica")

    def send_forward(self, run: ForwardRequest) -> tuple[PendingReply, list[Tensor]]:
        """Ask for one replica's part of a forward; returns the tensors of its arguments too, as they are numbered."""
        box, around = self._new_pending(), run.ambient
        run.released = self._take_released()
        if around is None or around.context_vars or around.saved_tensor_hooks is not None:
            self._last_ambient = None  # values of the user's are sent again, and not compared
        elif (
            around == self._last_ambient and len(self._pending) == 1
        ):  # another call may fail before it has set them up
            run.ambient = None
        try:
            tensors = self.channel.send(messages.FORWARD, box.request_id, run, label="arguments")
        except BaseException:
            self.requeue_released(run)
            raise
        finally:
            run.ambient = around
        self._last_ambient = around
        return box, tensors

    def requeue_released(self, run: ForwardRequest) -> None:
        """What a worker was to forget with a forward that failed goes with the next: it may not have heard it."""
        self.released.extend([*(("call", n) for n in run.released[0]), *(("module", n) for n in run.released[1])])

    def send_backward(self, back: BackwardRequest, bell: Doorbell | None = None) -> PendingReply:
        """Ask for one replica's part of a backward, which sees the globals as they are by then."""
        self.channel.send_changed_globals()
        box = self._new_pending()
        if bell is not None:
            bell.expect(box.request_id, self._last_received_id)
        self.channel.send(messages.BACKWARD, box.request_id, back)
        return box

    def send_reachability(self, call: int, outputs: list[int], spent: list[list[int]]) -> PendingReply:
        """Ask where a backward from some outputs of a call, by their numbers, would meet the other replicas."""
        box = self._new_pending()
        self.channel.send(messages.REACHABILITY, box.request_id, (call, outputs, spent))
        return box

    def send(self, kind: str, value: Any, fds: Sequence[int] = ()) -> PendingReply:
        """Ask for something that has no way of its own."""
        with self.lock:
            box = self._new_pending()
            self.channel.send(kind, box.request_id, value, fds=fds)
        return box

    def _new_pending(self) -> PendingReply:
        box = PendingReply(next(request_ids))
        self._pending[box.request_id] = box
        self.last_request_id = box.request_id
        return box

    def has_failed(self, box: PendingReply) -> bool:
        """Whether the answer to a question is there, and says that it failed."""
        try:
            message = self._receive_for(box, 0) if messages.FAILED not in box.received_kinds else None
        except ConnectionClosed:  # whoever hears it sees to that
            return False
        if message is not None:
            box.put(message)
        return messages.FAILED in box.received_kinds

    def _receive_for(self, box: PendingReply, seconds: float = POLL_SECONDS) -> Message | None:
        """The next message for a box, if one comes soon; what comes for others is put into theirs."""
        if not self.lock.acquire(blocking=False):  # another thread listens, or asks
            return box.get(min(seconds, HANDOFF_SECONDS))
        try:
            message = box.get(0)
            if message is None:
                message = self._receive(seconds)
            if message is not None:
                self._last_received_id = max(self._last_received_id, message.call_id)
            if message is None or message.call_id == box.request_id:
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

    def abandon(self, box: PendingReply) -> None:
        """Nobody hears the answer to a question: a worker that comes to meet the others in it finds nobody."""
        if self._pending.pop(box.request_id, None) is not None:
            self._last_ambient = None  # the worker may not come to that
            with suppress(ConnectionClosed):
                self.channel.send_flat(messages.COLLECTIVE_RESULT, box.request_id, ABANDONED)

    def abandon_since(self, number: int) -> None:
        """The same for all questions after one."""
        for box in [box for box in self._pending.values() if box.request_id > number]:
            self.abandon(box)

    def wait_reply(self, box: PendingReply, met: CollectiveLog | None) -> Message:
        """What a worker answers, in a thread that waits for it."""
        return run_to_end(self.receive_reply(box, met))

    def receive_reply(self, box: PendingReply, met: CollectiveLog | None) -> ReplyGenerator[Message]:
        """What a worker answers; until it does, it may ask to meet the other replicas."""
        try:
            return (yield from self._receive_reply(box, met))
        except BaseException:
            self.abandon(box)
            raise

    def _receive_reply(self, box: PendingReply, met: CollectiveLog | None) -> ReplyGenerator[Message]:
        if met is not None:
            met.rewind()
        wait = ReplyWatchdog(self.worker, self.timeout)
        while True:
            message = self._receive_for(box)
            if message is None:
                wait.check()
                if met is not None:
                    met.warn_if_slow()
                on_host = self.channel.cuda_ipc is None and self.worker.connection.receiver is None
                # That may have been this one, whose answer another thread has heard just now.
                if on_host and met is not None and met.any_failed() and not box.has_message():
                    raise PeerFailure("another replica failed, and this one was not waited for.")
                continue
            if message.kind == messages.COLLECTIVE and met is not None:
                (index, label, bare), tensors = self.channel.decode_flat(message)
                self.channel.send_flat(
                    messages.COLLECTIVE_RESULT, message.call_id, (yield from met.exchange(index, label, bare, tensors))
                )
                yield RUNNING
                wait = ReplyWatchdog(self.worker, self.timeout)
            elif message.kind == messages.FAILED:
                box.received_kinds.add(message.kind)
                self._pending.pop(box.request_id, None)
                self._last_ambient = None  # it may not have come to that
                error = unpack_exception(Payload(message.body, message.tensors), self.channel.registry)
                self.last_error_id = id(error)
                if isinstance(error, (EngineError, MemoryError)):
                    self.channel.registry.mark_all_unsent()  # it may not have what was sent with it
                raise wrap_stop_iteration(error)
            elif message.kind == messages.DONE:
                self._pending.pop(box.request_id, None)  # graphs may hold it for long
                self._released_memory.clear()  # it has read all that was said before
                return message
            else:
                raise EngineError(f"{self.worker.name} answered {message.kind!r} to a call.")


_clients: weakref.WeakKeyDictionary[WorkerProcess, WorkerClient] = weakref.WeakKeyDictionary()
_clients_lock = ForkSafeLock()


def client_for(worker: WorkerProcess) -> WorkerClient:
    """The desk of a worker, which all engines share, and which threads that come at once are not to open twice."""
    desk = _clients.get(worker)
    if desk is not None:
        return desk
    with _clients_lock:
        if worker not in _clients:
            drop_dead_clients()
            _clients[worker] = WorkerClient(worker)
        return _clients[worker]


def drop_dead_clients() -> None:
    """Forget what workers knew that have ended: memory of a device may hang on it."""
    for worker in [reference() for reference in _clients.keyrefs()]:
        if worker is not None and not (worker.is_owned() and worker.is_alive()):
            _clients.pop(worker, None)
