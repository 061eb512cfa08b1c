"""Framed, atomic messages over a SOCK_SEQPACKET socket; large tensors go through shared memory.

With a `Mailbox`, small messages go through shared memory too. The socket then wakes a receiver that sleeps.
"""

from __future__ import annotations

import array
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from instep.engines.processes.transport.copy_streams import DeviceReceiver, synchronize_stream
from instep.engines.processes.transport.mailbox import Mailbox
from instep.engines.processes.transport.shared_memory import (
    ALIGNMENT,
    NO_LOCATION,
    RingLocation,
    RingReader,
    RingWriter,
    SharedMemory,
    align,
)
from instep.engines.processes.transport.tensor_codec import (
    INLINE_ALIGNMENT,
    address_of,
    decode_metadata,
    encode_metadata,
    read_tensor,
    tensor_bytes,
    write_tensors,
)
from instep.errors import EngineError
from instep.runtime.affinity import SPIN_SECONDS, SenderCpuAvoidance, current_cpu, spin_poll

_MAGIC = b"ins1"
_HEADER = struct.Struct("<4sHH16sq9QqQ")
_PAYLOAD_IN_RING, _HAS_RING_FD = 1, 2
"""Flags: the payload is in the ring buffer too; the first file descriptor is that of the ring buffer."""
_WAKE_UP = b"!"
"""The frame that wakes a receiver. It is no message."""
_MAILBOX = "mailbox"
"""The kind of the message that brings the memory of the mailboxes. `receive` does not return it."""

MAX_FRAME_PAYLOAD = 64 * 1024
"""Maximum size of a payload in the frame."""
MAX_INLINE_TENSOR = 4096
"""Maximum size in bytes of a tensor in the payload."""
_MAILBOX_BYTES = 80 * 1024
"""Size of the memory for messages in one direction. A frame fits into it."""
_SEND_BUFFER_BYTES = 4 << 20
"""Requested size of the socket's send buffer, so that senders rarely have to wait."""
_MAX_FDS = 250
"""The kernel allows 253 file descriptors per message."""
_FDS_BUFFER_BYTES = socket.CMSG_SPACE((_MAX_FDS + 1) * array.array("i").itemsize)

_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECV_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED_FLAGS = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)

_EMPTY = memoryview(bytearray())


class Message(NamedTuple):
    """A received message. Its tensors own their memory; the receiver owns the file descriptors."""

    kind: str
    call_id: int
    body: bytes
    tensors: list[Tensor]
    fds: list[int]


class ConnectionClosed(Exception):
    """The peer closed the connection or died."""


class ProtocolError(Exception):
    """A received frame is not a valid message."""


class _Header(NamedTuple):
    """The header of a frame.

    The payload follows it: tensor metadata, body, and small tensors. Large tensors are in the ring buffer.
    """

    flags: int
    fds: int
    """Number of file descriptors."""
    kind: str
    call_id: int
    tensors: int
    """Number of tensors."""
    metadata: int
    """Size of the tensor metadata in bytes."""
    body: int
    """Size of the body in bytes."""
    payload: int
    """Size of the payload in bytes."""
    ring_bytes: int
    """Size of the data in the ring buffer."""
    location: RingLocation
    cpu: int
    """The CPU that the sender runs on."""
    others_before: int
    """The number of messages that the sender has sent before by the other way: through the mailbox or the socket."""

    @classmethod
    def unpack(cls, frame: bytearray, length: int, num_fds: int) -> _Header:
        """Decode and check a header. Raises `ValueError` if it is invalid."""
        if length < _HEADER.size:
            raise ValueError("shorter than a header")
        magic, flags, fds, kind, call_id, *numbers, cpu, others_before = _HEADER.unpack_from(frame)
        tensors, metadata, body, payload, ring_bytes, *location = numbers
        if magic != _MAGIC:
            raise ValueError("not a frame of instep")
        in_frame, in_ring = (0, payload) if flags & _PAYLOAD_IN_RING else (payload, 0)
        if length != _HEADER.size + in_frame or in_ring > ring_bytes or metadata + body > payload:
            raise ValueError("inconsistent lengths")
        if num_fds != fds or (flags & _HAS_RING_FD and not fds):
            raise ValueError("missing file descriptors")
        return cls(
            flags,
            fds,
            _decode_kind(kind),
            call_id,
            tensors,
            metadata,
            body,
            payload,
            ring_bytes,
            RingLocation(*location) if ring_bytes else NO_LOCATION,
            cpu,
            others_before,
        )


class Connection:
    """One end of the connection between the parent and a worker. Only the process that created it may use it."""

    def __init__(self, sock: socket.socket, peer_pidfd: int | None = None) -> None:
        """`peer_pidfd` becomes readable when the peer exits.

        Without it, the exit is noticed only when every copy of the peer's socket is closed, including those of
        processes that the peer forked.
        """
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._sock = sock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ring_writer, self._ring_reader = RingWriter(), RingReader()
        self._buffer = bytearray(_HEADER.size + MAX_FRAME_PAYLOAD)
        self._view = memoryview(self._buffer)
        self._buffer_address = address_of(self._view)
        self._outbox: Mailbox | None = None
        self._inbox: Mailbox | None = None
        self._frames_sent = self._frames_received = 0
        """Messages through the socket."""
        self._held: deque[Message] = deque()
        """Messages that were received before others that were sent earlier, in the order of sending."""
        self._frames_before_held = 0
        """The number of messages through the socket that were sent before the first of them."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if peer_pidfd is not None:
            self._poll.register(peer_pidfd, select.POLLIN)
        self.bytes_transferred = 0
        """Bytes sent and received, including those in ring buffers."""
        self.affinity: SenderCpuAvoidance | None = None
        """Keeps the receiving thread off the sender's CPU."""
        self.before_send: Callable[[], object] | None = None
        """Called in the sending thread before each message."""
        self.receiver: DeviceReceiver | None = None
        """Receives tensors that were sent from an accelerator. Without one they are received on the CPU."""

    def fileno(self) -> int:
        """The socket's descriptor. Between `begin_wake_ups` and `end_wake_ups` all new messages make it readable."""
        return self._sock.fileno()

    def begin_wake_ups(self) -> None:
        """Let messages in the mailbox make the socket readable, unless another thread receives them first."""
        if self._inbox is not None:
            self._inbox.begin_sleep()

    def end_wake_ups(self) -> None:
        """End what `begin_wake_ups` began."""
        if self._inbox is not None:
            self._inbox.end_sleep()

    def has_mail(self) -> bool:
        """Whether a message was received already or is in the mailbox."""
        return bool(self._held) or (self._inbox is not None and self._inbox.has_message())

    def close(self) -> None:
        """Close this end. In a forked child this closes the child's copy only."""
        self._sock.close()
        self._outbox = self._inbox = None
        self._ring_writer, self._ring_reader = RingWriter(), RingReader()  # free the memory of the rings

    def open_mailboxes(self) -> None:
        """Send small messages through shared memory from now on, in both directions. For one of the two ends."""
        with self._lock:
            if self._outbox is None:
                memory = SharedMemory.create(2 * _MAILBOX_BYTES, "messages to and from a worker")
                self._send(_MAILBOX, 0, b"", (), (memory.fd,), None)
                self._use_mailboxes(memory, 0)

    def _use_mailboxes(self, memory: SharedMemory, first: int) -> None:
        """Send through the first or second mailbox in a memory, and receive from the other."""
        boxes = [Mailbox(memory, i * _MAILBOX_BYTES, _MAILBOX_BYTES) for i in range(2)]
        self._outbox, self._inbox = boxes[first], boxes[1 - first]

    def send(
        self,
        kind: str,
        call_id: int = 0,
        body: bytes = b"",
        tensors: Sequence[Tensor] = (),
        fds: Sequence[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Send a message. The data is copied before this returns; the caller keeps the file descriptors.

        Waits only while the socket's buffer is full. Raises `TimeoutError` after `timeout` seconds; then nothing was
        sent.
        """
        self._check_process()
        if self.before_send is not None:
            self.before_send()
        if timeout is None:
            with self._lock:
                self._send(kind, call_id, body, tensors, fds, None)
        elif self._lock.acquire(timeout=timeout):
            try:
                self._send(kind, call_id, body, tensors, fds, timeout)
            finally:
                self._lock.release()
        else:
            raise TimeoutError("another thread is still sending")

    def _send(
        self, kind: str, call_id: int, body: bytes, tensors: Sequence[Tensor], fds: Sequence[int], timeout: float | None
    ) -> None:
        metadata = b"".join(map(encode_metadata, tensors))
        text = metadata + body
        parts, large = [text, bytes(-len(text) % INLINE_ALIGNMENT)], []
        large_bytes, device = 0, None
        for tensor in tensors:
            nbytes = tensor.nbytes
            if nbytes <= MAX_INLINE_TENSOR:
                parts.append(tensor_bytes(tensor, nbytes))
            else:
                large.append((tensor, nbytes))
                large_bytes += align(nbytes)
            if device is None and tensor.device.type != "cpu":
                device = tensor.device
        payload = sum(map(len, parts))
        flags = _PAYLOAD_IN_RING if payload > MAX_FRAME_PAYLOAD else 0
        location, ring_bytes = NO_LOCATION, 0
        if large_bytes or flags:
            ring_bytes = large_bytes + (payload if flags else 0)
            location, block = self._ring_writer.reserve(ring_bytes, device)
            write_tensors(block, large, ALIGNMENT)
            if flags:
                block[large_bytes:], parts = b"".join(parts), []
        if device is not None:
            synchronize_stream(device)
        # The receiver attaches the ring by the location in the same frame.
        if location is not NO_LOCATION and (ring_fd := self._ring_writer.fd_to_send()) is not None:
            flags, fds = flags | _HAS_RING_FD, [ring_fd, *fds]
        lengths = len(tensors), len(metadata), len(body), payload, ring_bytes
        fields = _MAGIC, flags, len(fds), _encode_kind(kind), call_id, *lengths, *location, current_cpu()
        # Data in a ring is read in the order of the frames in the socket, which a mailbox may overtake.
        in_ring = location is not NO_LOCATION
        if fds or in_ring or not self._put_frame([_HEADER.pack(*fields, self._frames_sent), *parts]):
            self._frames_sent += 1  # first: too large a number does no harm after an interruption
            puts_before = 0 if self._outbox is None else self._outbox.num_sent
            self._send_frame([_HEADER.pack(*fields, puts_before), *parts], fds, timeout)
        self.bytes_transferred += _HEADER.size + large_bytes + payload

    def _put_frame(self, frame: Sequence[bytes]) -> bool:
        """Send a frame through the mailbox. Returns False if that is not possible."""
        if self._outbox is None or not self._outbox.put(frame):
            return False
        if self._outbox.is_receiver_asleep():
            with suppress(TimeoutError):  # the frames that fill the socket's buffer wake it
                self._send_frame([_WAKE_UP], (), 0)
        return True

    def _send_frame(self, frame: Sequence[bytes], fds: Sequence[int], timeout: float | None) -> None:
        if len(fds) > _MAX_FDS + 1:
            raise EngineError(f"cannot send {len(fds)} file descriptors in one message: the maximum is {_MAX_FDS}.")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = _deadline(timeout)
        while True:
            try:
                self._sock.sendmsg(frame, ancillary, _SEND_FLAGS)
                return
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._sock, select.POLLOUT)
                if not writable.poll(_remaining_ms(deadline)):
                    raise TimeoutError("the socket's buffer is full") from None
            except OSError as error:
                raise self._closed_error(error) from None

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None if none arrives within `timeout` seconds.

        Messages that were sent before the peer exited are received first; then this raises `ConnectionClosed`.
        """
        self._check_process()
        deadline = _deadline(timeout)
        peer_exited = False
        while True:
            if (found := self._next_in_memory()) is not None:
                return found
            try:
                length, fds, flags = self._receive_frame()
            except BlockingIOError:
                if self._held:  # those before were lost in an interruption, or not sent
                    self._frames_received = self._frames_before_held
                    continue
                if peer_exited:
                    raise ConnectionClosed("the peer exited") from None
                events = self._wait(deadline)
                if events is None:
                    return None
                peer_exited = bool(events) and all(fd != self._sock.fileno() for fd, _ in events)
            except ConnectionResetError:
                continue  # the peer closed without reading everything; what it sent can still be received
            except OSError as error:
                raise self._closed_error(error) from None
            else:
                if not length and self.has_mail():
                    self._frames_received = max(self._frames_received, self._frames_before_held)
                    continue
                if not length:
                    raise ConnectionClosed("the peer closed the connection")
                if length != len(_WAKE_UP) or self._buffer[:length] != _WAKE_UP:
                    message = self._receive_message(length, fds, flags)
                    if message is not None:
                        return message

    def _next_in_memory(self) -> Message | None:
        """The next message, if it was received already or is in the mailbox."""
        held, inbox = self._held, self._inbox
        if not held and inbox is not None and inbox.has_message():
            message, self._frames_before_held = self._decode(inbox.take(self._view), [], 0)
            held.append(message)
        return held.popleft() if held and self._frames_before_held <= self._frames_received else None

    def _receive_message(self, length: int, fds: list[int], flags: int) -> Message | None:
        """The message in a frame; None if the connection itself is the receiver."""
        message, puts_before = self._decode(length, fds, flags)
        self._frames_received += 1
        if message.kind == _MAILBOX:
            memory = SharedMemory.attach(message.fds[0], 2 * _MAILBOX_BYTES, writable=True)
            self._use_mailboxes(memory, 1)
            return None
        held, inbox = self._held, self._inbox  # all that are held are from the mailbox
        if inbox is None:
            return message
        if puts_before > inbox.num_received:
            held.append(self._decode(inbox.take(self._view), [], 0)[0])
        num_earlier = puts_before - (inbox.num_received - len(held))
        if num_earlier <= 0:
            return message
        held.insert(num_earlier, message)
        self._frames_before_held = self._frames_received
        return held.popleft()

    def _wait(self, deadline: float | None) -> list[tuple[int, int]] | None:
        """Wait for a message. Returns the events of the socket and of the peer's exit, or None if there is nothing."""
        remaining, inbox = _remaining_ms(deadline), self._inbox
        if remaining is None or remaining > 1000 * SPIN_SECONDS:
            limit = math.inf if remaining is None else remaining / 1000
            found = spin_poll(self._poll, limit, None if inbox is None else inbox.has_message)
            if found is not None:
                return found
            remaining = _remaining_ms(deadline)
        if inbox is None:
            return self._sleep(remaining)
        inbox.begin_sleep()
        try:
            return [] if inbox.has_message() else self._sleep(remaining)
        finally:
            inbox.end_sleep()

    def _sleep(self, milliseconds: float | None) -> list[tuple[int, int]] | None:
        if self.affinity is None:
            return self._poll.poll(milliseconds) or None
        try:
            self.affinity.before_wait()
            return self._poll.poll(milliseconds) or None
        finally:
            self.affinity.after_wait()

    def _receive_frame(self) -> tuple[int, list[int], int]:
        length, ancillary, flags, _ = self._sock.recvmsg_into([self._buffer], _FDS_BUFFER_BYTES, _RECV_FLAGS)
        if not ancillary:
            return length, [], flags
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return length, list(fds), flags

    def _decode(self, length: int, fds: list[int], flags: int) -> tuple[Message, int]:
        """The message in the buffer, and the number of those that were sent before it by the other way."""
        try:
            if flags & _TRUNCATED_FLAGS:
                raise ValueError("truncated")
            header = _Header.unpack(self._buffer, length, len(fds))
            if self.affinity is not None:
                self.affinity.record_sender(header.cpu)
            if header.flags & _HAS_RING_FD:
                self._ring_reader.attach(header.location, fds.pop(0))
            body, tensors = self._read_payload(header)
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, (ValueError, struct.error, OSError)):
                raise ProtocolError(f"received an invalid frame of {length} bytes: {error}") from error
            raise
        self.bytes_transferred += length + header.ring_bytes
        return Message(header.kind, header.call_id, body, tensors, fds), header.others_before

    def _read_payload(self, header: _Header) -> tuple[bytes, list[Tensor]]:
        """Copy the body and the tensors out of the frame and the ring buffer, and release the ring's memory."""
        text_end = header.metadata + header.body
        if not header.tensors and not header.ring_bytes:  # a body alone
            return bytes(self._view[_HEADER.size : _HEADER.size + text_end]), []
        block = self._ring_reader.block(header.location, header.ring_bytes) if header.ring_bytes else _EMPTY
        if header.flags & _PAYLOAD_IN_RING:
            large_bytes = header.ring_bytes - header.payload
            block, payload = block[:large_bytes], block[large_bytes:]
            payload_address = address_of(payload)
        else:
            payload = self._view[_HEADER.size : _HEADER.size + header.payload]
            payload_address = self._buffer_address + _HEADER.size
        text = bytes(payload[:text_end])
        tensors: list[Tensor] = []
        inline_offset, block_offset, block_address = align(text_end, INLINE_ALIGNMENT), 0, address_of(block)
        decoded = decode_metadata(text[: header.metadata], header.tensors)
        device_receiver = self.receiver
        if device_receiver is not None:
            if any(metadata.on_accelerator for metadata in decoded):
                self._ring_reader.pin(device_receiver.device)
            else:
                device_receiver = None
        for metadata in decoded:
            receiver = device_receiver if metadata.on_accelerator else None
            if metadata.nbytes <= MAX_INLINE_TENSOR:
                tensors.append(read_tensor(payload, payload_address, inline_offset, metadata, receiver))
                inline_offset += align(metadata.nbytes, INLINE_ALIGNMENT)
            else:
                tensors.append(read_tensor(block, block_address, block_offset, metadata, receiver))
                block_offset += align(metadata.nbytes)
        if device_receiver is not None:
            synchronize_stream(device_receiver.device)
        if header.ring_bytes:
            self._ring_reader.release(header.location)
        return text[header.metadata :], tensors

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise EngineError(
                "this connection to a worker belongs to the process that this one was forked from. "
                "Create a new wrapper here."
            )

    def _closed_error(self, error: OSError) -> Exception:
        if self._sock.fileno() < 0:
            return ConnectionClosed("this process closed the connection")
        return ConnectionClosed("the peer closed the connection") if isinstance(error, ConnectionError) else error


@lru_cache(maxsize=64)
def _encode_kind(kind: str) -> bytes:
    if not 0 < len(kind) <= 16:
        raise EngineError(f"message kind {kind!r} does not have 1 to 16 characters.")
    return kind.encode("ascii")


@lru_cache(maxsize=64)
def _decode_kind(kind: bytes) -> str:
    return kind.rstrip(b"\0").decode("ascii")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _remaining_ms(deadline: float | None) -> float | None:
    """Milliseconds until the deadline, for `poll`."""
    return None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
