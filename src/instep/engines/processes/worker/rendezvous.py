"""Collectives of a worker's replica with the others, through the parent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.collectives.exchange import all_gather_by_exchange, decode_payload, encode_payload, stage_on_host
from instep.collectives.group import PeerFailure, describe_row
from instep.engines.processes import messages
from instep.engines.processes.transport.channel import Channel, FlatValue
from instep.engines.processes.transport.connection import Connection, Message
from instep.engines.processes.transport.device_rows import DeviceRowExchange, fits_device_row
from instep.engines.processes.transport.row_memory import RowExchange, fits_slot
from instep.errors import EngineError
from instep.runtime.modes import set_inference_mode


class Inbox:
    """Messages to a worker. Those that arrive while its replica waits in a collective are deferred."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deferred: deque[Message] = deque()

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None if none arrives within `timeout` seconds."""
        return self._deferred.popleft() if self._deferred else self._connection.receive(timeout)

    def receive_collective_result(self, call_id: int) -> Message:
        """Wait for the result of a collective; defer other messages."""
        for position, message in enumerate(self._deferred):
            if message.kind == messages.COLLECTIVE_RESULT and message.call_id == call_id:
                del self._deferred[position]
                return message
            if message.kind == messages.STOP:
                raise PeerFailure("the worker was stopped.")
        with set_inference_mode(False):  # messages of other calls are decoded outside of this call's mode
            while (received := self._connection.receive()) is not None:
                if received.kind == messages.COLLECTIVE_RESULT and received.call_id == call_id:
                    return received
                self._deferred.append(received)
                if received.kind == messages.STOP:
                    break
        raise PeerFailure("the worker was stopped.")

    def is_stopped(self, call_id: int) -> bool:
        """Whether the parent has stopped the worker or abandoned a call. Receives messages without waiting."""
        with set_inference_mode(False):
            while (received := self._connection.receive(0)) is not None:
                self._deferred.append(received)
        return any(
            message.kind == messages.STOP or (message.kind == messages.COLLECTIVE_RESULT and message.call_id == call_id)
            for message in self._deferred
        )


class WorkerRendezvous:
    """The `Group` of a worker's replica. The parent runs the exchange; rows may be exchanged through shared memory.

    Args:
        rows: The replica's part of the exchange through shared memory, if the call has one.
        gathered_rows: Results of `all_gather` that are replayed.
        device_rows: The replica's part of the exchange on its device, if the call has one.
    """

    joint_graph = False

    def __init__(
        self,
        channel: Channel,
        inbox: Inbox,
        call_id: int,
        count: int,
        rows: RowExchange | None = None,
        gathered_rows: Sequence[Tensor] = (),
        device_rows: DeviceRowExchange | None = None,
    ) -> None:
        self._channel, self._inbox = channel, inbox
        self._call = call_id
        self._count = count
        """The number of replicas."""
        self._rows, self._gathered_rows = rows, deque(gathered_rows)
        self._device_rows = device_rows
        self._replay_device = next((rows.device for rows in gathered_rows if rows.device.type == "cuda"), None)
        """The device on which the replayed rows were exchanged."""

    def enter(self, index: int) -> None:
        """Nothing to do: the parent decides when this replica runs."""

    def leave(self, index: int, error: BaseException | None = None) -> None:  # noqa: ARG002
        """End the replica's part. The reply tells the parent."""
        if self._rows is not None:
            self._rows.leave()
            self._rows = None
        if self._device_rows is not None:
            self._device_rows.leave(error is not None)
            self._device_rows = None

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        if self._rows is not None:
            self._rows.begin(label)
        return self._exchange(index, label, payload)

    def _exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        tensors: list[Tensor] = []
        encoded = encode_payload(stage_on_host(payload), tensors)
        self._channel.send_flat(
            messages.COLLECTIVE, self._call, FlatValue((index, label, encoded), tensors, [payload.metadata])
        )
        (encoded_payloads, error), received = self._channel.decode_flat(
            self._inbox.receive_collective_result(self._call)
        )
        if error is not None:
            raise PeerFailure(error) if isinstance(error, str) else error
        return [decode_payload(encoded, received) for encoded in encoded_payloads]

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:
        rows, row, label = self._rows, row.detach(), describe_row(label, row)
        device = row.device if row.device.type == "cuda" else None
        if self._gathered_rows and (fits_slot(row) or (device is not None and fits_device_row(row.nbytes))):
            if rows is not None:
                rows.skip()
            return self._gathered_rows.popleft()
        if self._device_rows is not None and self._device_rows.accepts(row):
            gathered = self._device_rows.gather(label, row)
            if gathered is not None:
                return gathered
        if rows is None or not fits_slot(row):
            return all_gather_by_exchange(self.exchange, index, self._count, label, row)
        rows.put(label, row)
        gathered = rows.wait(self._is_stopped)
        if gathered is None:  # the parent knows why, and answers with an error
            all_gather_by_exchange(self._exchange, index, self._count, label, row)
            raise EngineError(f"{label} was not completed.")
        return gathered

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        nbytes = numel * dtype.itemsize
        if device == self._replay_device and fits_device_row(nbytes):
            return torch.empty(numel, dtype=dtype, device=device)
        return None if self._device_rows is None else self._device_rows.row_buffer(numel, dtype, device)

    def _is_stopped(self) -> bool:
        return self._inbox.is_stopped(self._call)
