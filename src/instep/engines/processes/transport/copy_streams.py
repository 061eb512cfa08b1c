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

    def __init__(self, device: torch.device, users: Any = None) -> None:
        self.device = device
        self._consumer_stream = users
        """The stream that uses what lands here, if it is another than the one that brings it."""
        self.error: Exception | None = None
        """Out-of-memory error of a copy, raised by `raise_deferred`."""

    def copy_to_device(self, sent: Tensor) -> Tensor:
        """A tensor of its own; the copy may still be on its way (see `wait_for`).

        Where there is no memory for it a message is taken all the same, and whoever reads it is told.
        """
        try:
            return self.copy_strict(sent)
        except torch.OutOfMemoryError as error:
            self.error = error
            return sent.clone()

    def copy_strict(self, sent: Tensor) -> Tensor:
        """Like `copy_to_device`, but raises at once if the device is out of memory."""
        landed = torch.empty_like(sent, device=self.device).copy_(sent, non_blocking=True)
        if self._consumer_stream is not None:
            landed.record_stream(self._consumer_stream)
        return landed

    def raise_deferred(self) -> None:
        """Raise the error of the last message, if there was one."""
        trouble, self.error = self.error, None
        if trouble is not None:
            raise trouble


class CallStreams:
    """Orders the copies of one call with the caller's stream."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """To be made in the caller's thread, when what is to be sent has been queued; the first device is its own."""
        self.device = devices[0]
        self._caller_stream: Any = None
        if self.device.type == "cuda":
            self._caller_stream = torch.cuda.current_stream(self.device)
            self._queued_event = self._caller_stream.record_event()
        elif torch.cuda.is_initialized():  # arguments may lie on devices of workers
            for device in {device for device in devices if device.type == "cuda"}:
                torch.cuda.current_stream(device).synchronize()

    @property
    def on_accelerator(self) -> bool:
        """Whether the caller's own tensors lie on an accelerator."""
        return self._caller_stream is not None

    def receiver(self) -> DeviceReceiver | None:
        """The receiver for replies."""
        return None if self._caller_stream is None else DeviceReceiver(self.device, self._caller_stream)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Let a thread work beside the caller's stream, which waits for it in its turn."""
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
        """Tensors that were made inside `enter` are used by the caller's stream from now on."""
        if self._caller_stream is None:
            return
        afar = (tensor for tensor in tensors if tensor.device.type != "cpu")
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in afar}.values():
            tensor.record_stream(self._caller_stream)

    def wait_for_caller(self) -> None:
        """Wait for what the caller's stream has been given since: another replica has something to say."""
        if self._caller_stream is not None:
            _side_stream(self.device).wait_stream(self._caller_stream)


def _side_stream(device: torch.device) -> Any:
    """This thread's own stream for copies."""
    streams: dict[torch.device, Any] = _thread_state.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


_MAX_GAP = 64
"""Bytes at most between neighbours."""


class StagedTensor(NamedTuple):
    """A tensor of a device, and where in shared memory its values are kept."""

    offset: int
    tensor: Tensor

    @property
    def end(self) -> int:
        return self.offset + self.tensor.nbytes


def copy_all_to_host(memory: SharedMemory, pieces: Sequence[StagedTensor]) -> None:
    """Write tensors' values into shared memory; they are there when this returns."""
    if not pieces:
        return
    device = pieces[0].tensor.device
    memory.pin(device)
    with torch.no_grad(), set_inference_mode(False):
        for run in contiguous_runs(pieces):
            first, last = run[0], run[-1]
            there = memory.tensor(first.offset, last.end - first.offset)
            if len(run) == 1:
                view_like(there, 0, first.tensor).copy_(first.tensor.detach(), non_blocking=True)
                continue
            flat = torch.empty(there.numel(), dtype=torch.uint8, device=device)
            tensors = [piece.tensor.detach() for piece in run]
            torch._foreach_copy_([view_like(flat, p.offset - first.offset, p.tensor) for p in run], tensors)
            there.copy_(flat, non_blocking=True)
    synchronize_stream(device)


def copy_all_to_device(memory: SharedMemory, pieces: Sequence[StagedTensor]) -> None:
    """Write what shared memory holds into tensors of a device; it has been read when this returns."""
    if not pieces:
        return
    device = pieces[0].tensor.device
    memory.pin(device)
    with torch.no_grad(), set_inference_mode(False):
        for run in contiguous_runs(pieces):
            first, last = run[0], run[-1]
            there = memory.tensor(first.offset, last.end - first.offset)
            if len(run) == 1:
                first.tensor.detach().copy_(view_like(there, 0, first.tensor), non_blocking=True)
                continue
            flat = there.to(device, non_blocking=True)
            tensors = [piece.tensor.detach() for piece in run]
            torch._foreach_copy_(tensors, [view_like(flat, p.offset - first.offset, p.tensor) for p in run])
    synchronize_stream(device)


def fetch_to_device(memory: SharedMemory, places: Sequence[tuple[int, Tensor]], device: torch.device) -> list[Tensor]:
    """New tensors on a device with what lies at places of shared memory, each in the shape of a tensor there."""
    found: dict[int, Tensor] = {}
    memory.pin(device)
    for run in contiguous_runs([StagedTensor(offset, like) for offset, like in places]):
        first, last = run[0], run[-1]
        flat = memory.tensor(first.offset, last.end - first.offset).to(device, non_blocking=True)
        found.update((p.offset, view_like(flat, p.offset - first.offset, p.tensor)) for p in run)
    synchronize_stream(device)
    return [found[offset] if like.numel() else torch.empty_like(like, device=device) for offset, like in places]


def view_like(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """A part of some bytes, as a tensor like another."""
    return flat.narrow(0, offset, like.nbytes).view(like.dtype).view(like.shape)


def contiguous_runs(pieces: Sequence[StagedTensor]) -> Iterator[list[StagedTensor]]:
    """Neighbours in memory that travel together, up to a size; those without numbers stay at home."""
    run: list[StagedTensor] = []
    for piece in sorted((p for p in pieces if p.tensor.numel()), key=lambda p: p.offset):
        if run and (piece.offset - run[-1].end > _MAX_GAP or piece.end - run[0].offset > BUCKET_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
