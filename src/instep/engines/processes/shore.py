"""Where tensors of an accelerator leave this process and where they land in it.

A worker has one stream and is asked for one thing at a time. In the process that asks, each worker's desk works beside
the caller's stream, on a stream of its own: what is sent waits for what the caller had queued when the call began, and
not for what the first replica queues meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_here = threading.local()


def wait_for(device: torch.device | None) -> None:
    """Wait until an accelerator has done what this thread has queued there."""
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


class Shore:
    """Where tensors land that were sent from an accelerator."""

    def __init__(self, device: torch.device, users: Any = None) -> None:
        self.device = device
        self._users = users
        """The stream that uses what lands here, if it is another than the one that brings it."""
        self.trouble: Exception | None = None
        """Why something could not land."""

    def land(self, sent: Tensor) -> Tensor:
        """A tensor of its own; the copy may still be on its way (see `wait_for`).

        Where there is no memory for it a message is taken all the same, and whoever reads it is told.
        """
        try:
            return self.bring(sent)
        except torch.OutOfMemoryError as error:
            self.trouble = error
            return sent.clone()

    def bring(self, sent: Tensor) -> Tensor:
        """The same, and no memory is an error at once."""
        landed = torch.empty_like(sent, device=self.device).copy_(sent, non_blocking=True)
        if self._users is not None:
            landed.record_stream(self._users)
        return landed

    def check(self) -> None:
        """Raise what went wrong with the last message."""
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble


class Passage:
    """How one call's tensors pass between the caller's accelerator and workers."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """To be made in the caller's thread, when what is to be sent has been queued; the first device is its own."""
        self.device = devices[0]
        self.sharing: Any = None
        """How the values of the module's tensors come to all workers at once, if they do."""
        self._stream: Any = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
            self._queued = self._stream.record_event()
        elif torch.cuda.is_initialized():  # arguments may lie on devices of workers
            for device in {device for device in devices if device.type == "cuda"}:
                torch.cuda.current_stream(device).synchronize()

    @property
    def is_afar(self) -> bool:
        """Whether the caller's own tensors lie on an accelerator."""
        return self._stream is not None

    def shore(self) -> Shore | None:
        """Where answers land."""
        return None if self._stream is None else Shore(self.device, self._stream)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Let a thread work beside the caller's stream, which waits for it in its turn."""
        if self._stream is None:
            yield
            return
        side = _side_stream(self.device)
        side.wait_event(self._queued)
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            try:
                yield
            finally:
                self._stream.wait_stream(side)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that were made inside `enter` are used by the caller's stream from now on."""
        if self._stream is None:
            return
        afar = (tensor for tensor in tensors if tensor.device.type != "cpu")
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in afar}.values():
            tensor.record_stream(self._stream)

    def catch_up(self) -> None:
        """Wait for what the caller's stream has been given since: another replica has something to say."""
        if self._stream is not None:
            _side_stream(self.device).wait_stream(self._stream)


def _side_stream(device: torch.device) -> Any:
    """This thread's own stream for copies."""
    streams: dict[torch.device, Any] = _here.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]
