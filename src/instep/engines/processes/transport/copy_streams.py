"""Copies tensors between host and device on side streams, ordered with the caller's stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.devices import BUCKET_BYTES
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.runtime.modes import set_inference_mode

_thread_state = threading.local()


def synchronize_stream(device: torch.device | None) -> None:
    """Block until the current stream of a device is idle. Does nothing for the CPU."""
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


class DeviceReceiver:
    """Copies received tensors to a device."""

    def __init__(self, device: torch.device, consumer_stream: Any = None) -> None:
        """`consumer_stream` is the stream that uses the tensors, if it differs from the one that copies them."""
        self.device = device
        self._consumer_stream = consumer_stream
        self._deferred_error: Exception | None = None

    def copy_to_device(self, received: Tensor) -> Tensor:
        """Copy a tensor to the device, asynchronously.

        If the device is out of memory, a copy on the host is returned, so that the whole message can be received;
        `raise_deferred` raises the error.
        """
        try:
            return self.copy_strict(received)
        except torch.OutOfMemoryError as error:
            self._deferred_error = error
            return received.clone()

    def copy_strict(self, received: Tensor) -> Tensor:
        """Like `copy_to_device`, but raises at once if the device is out of memory."""
        copied = torch.empty_like(received, device=self.device).copy_(received, non_blocking=True)
        if self._consumer_stream is not None:
            copied.record_stream(self._consumer_stream)
        return copied

    def raise_deferred(self) -> None:
        """Raise the out-of-memory error of the last message, if there was one."""
        error, self._deferred_error = self._deferred_error, None
        if error is not None:
            raise error


class CallStreams:
    """Orders the copies of one call with the caller's stream."""

    def __init__(self, devices: Sequence[torch.device], *, in_caller: bool = False) -> None:
        """Create it in the caller's thread, after the work that produces the arguments was queued.

        The first device is the caller's. With `in_caller`, the calling thread makes all copies, on its own stream.
        """
        self.device = devices[0]
        self.in_caller = in_caller
        """Whether the calling thread makes all copies."""
        self._caller_stream: Any = None
        if self.device.type == "cuda":
            stream = self._caller_stream = torch.cuda.current_stream(self.device)
            last = _last_calls.get(self.device)
            if last is not None and last[0] != stream:  # workers reuse memory that the last call may still read
                stream.wait_event(last[1])
            if not in_caller:
                self._queued_event = stream.record_event()
        elif torch.cuda.is_initialized():  # arguments may be on the workers' devices
            for device in {device for device in devices if device.type == "cuda"}:
                torch.cuda.current_stream(device).synchronize()

    @property
    def on_accelerator(self) -> bool:
        """Whether the caller's device is an accelerator."""
        return self._caller_stream is not None

    def receiver(self) -> DeviceReceiver | None:
        """The receiver for replies; None if they stay on the host."""
        if self._caller_stream is None:
            return None
        return DeviceReceiver(self.device, None if self.in_caller else self._caller_stream)

    def finish(self) -> None:
        """End a call that the calling thread has made alone: later calls on other streams wait for its work."""
        if self.in_caller and self._caller_stream is not None:
            last = _last_calls.get(self.device)
            event = torch.cuda.Event() if last is None else last[1]
            event.record(self._caller_stream)
            _last_calls[self.device] = self._caller_stream, event

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run on this thread's side stream, after the queued work of the caller's stream, which waits for the end."""
        if self._caller_stream is None:
            yield
            return
        side = _side_stream(self.device)
        side.wait_event(self._queued_event)
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            try:
                yield
            finally:
                self._caller_stream.wait_stream(side)

    def record_stream(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that the caller's stream uses tensors that were created on a side stream."""
        if self._caller_stream is None or self.in_caller:
            return
        on_device = (tensor for tensor in tensors if tensor.device.type != "cpu")
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in on_device}.values():
            tensor.record_stream(self._caller_stream)

    def wait_for_caller(self) -> None:
        """Make the side stream wait for the caller's stream, which has produced data for a collective."""
        if self._caller_stream is not None and not self.in_caller:
            _side_stream(self.device).wait_stream(self._caller_stream)


_last_calls: dict[torch.device, tuple[Any, torch.cuda.Event]] = {}
"""By device: the stream of the last call that its thread has made alone, and an event at its end."""


def _side_stream(device: torch.device) -> Any:
    """This thread's stream for copies."""
    streams: dict[torch.device, Any] = _thread_state.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


_MAX_GAP = 64
"""Maximum number of unused bytes between two tensors of a run."""


class StagedTensor(NamedTuple):
    """A tensor on a device, and the offset of its values in shared memory."""

    offset: int
    tensor: Tensor

    @property
    def end(self) -> int:
        return self.offset + self.tensor.nbytes


def copy_all_to_host(memory: SharedMemory, staged: Sequence[StagedTensor]) -> None:
    """Copy tensors from their device to shared memory. Blocks until the copies are complete."""
    _copy_all(memory, staged, to_host=True)


def copy_all_to_device(memory: SharedMemory, staged: Sequence[StagedTensor]) -> None:
    """Copy tensors from shared memory to their device. Blocks until the copies are complete."""
    _copy_all(memory, staged, to_host=False)


def _copy_all(memory: SharedMemory, staged: Sequence[StagedTensor], *, to_host: bool) -> None:
    """Copy each run of neighbouring tensors as one block, through a flat tensor on the device."""
    if not staged:
        return
    device = staged[0].tensor.device
    memory.pin(device)
    with torch.no_grad(), set_inference_mode(False):
        for run in contiguous_runs(staged):
            start = run[0].offset
            host = memory.tensor(start, run[-1].end - start)
            tensors = [item.tensor.detach() for item in run]
            if len(run) == 1:
                on_host = view_like(host, 0, tensors[0])
                target, source = (on_host, tensors[0]) if to_host else (tensors[0], on_host)
                target.copy_(source, non_blocking=True)
                continue
            flat = torch.empty_like(host, device=device) if to_host else host.to(device, non_blocking=True)
            parts = [view_like(flat, item.offset - start, item.tensor) for item in run]
            if to_host:
                torch._foreach_copy_(parts, tensors)
                host.copy_(flat, non_blocking=True)
            else:
                torch._foreach_copy_(tensors, parts)
    synchronize_stream(device)


def fetch_to_device(memory: SharedMemory, slots: Sequence[tuple[int, Tensor]], device: torch.device) -> list[Tensor]:
    """Copy values from shared memory to new tensors on a device. Blocks until the copies are complete.

    Each slot is an offset and a tensor with the shape and dtype of the values.
    """
    fetched: dict[int, Tensor] = {}
    memory.pin(device)
    for run in contiguous_runs([StagedTensor(offset, like) for offset, like in slots]):
        start = run[0].offset
        flat = memory.tensor(start, run[-1].end - start).to(device, non_blocking=True)
        fetched.update((item.offset, view_like(flat, item.offset - start, item.tensor)) for item in run)
    synchronize_stream(device)
    return [fetched[offset] if like.numel() else torch.empty_like(like, device=device) for offset, like in slots]


def view_like(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """A part of a byte tensor, viewed with the dtype and shape of another tensor."""
    return flat.narrow(0, offset, like.nbytes).view(like.dtype).view(like.shape)


def contiguous_runs(staged: Sequence[StagedTensor]) -> Iterator[list[StagedTensor]]:
    """Runs of neighbours in memory, of at most `BUCKET_BYTES`. Empty tensors are left out."""
    run: list[StagedTensor] = []
    for item in sorted((item for item in staged if item.tensor.numel()), key=lambda item: item.offset):
        if run and (item.offset - run[-1].end > _MAX_GAP or item.end - run[0].offset > BUCKET_BYTES):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
