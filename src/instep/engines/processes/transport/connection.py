"""Framed, atomic messages over a SOCK_SEQPACKET socket; large tensors go through shared memory."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from instep.engines.processes.transport.copy_streams import DeviceReceiver, synchronize_stream
from instep.engines.processes.transport.shared_memory import (
    ALIGNMENT,
    NO_LOCATION,
    RingLocation,
    RingReader,
    RingWriter,
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

_MAGIC, _VERSION = b"inst", 1
_HEADER = struct.Struct("<4sBBH16sq9Qq")
_PAYLOAD_IN_RING, _HAS_RING_FD = 1, 2
"""Flags: the payload lies in the ring as well; the first descriptor is the ring's."""

MAX_FRAME_PAYLOAD = 64 * 1024
"""The longest payload that travels in the frame itself."""
MAX_INLINE_TENSOR = 4096
"""Tensors of up to so many bytes travel in the payload."""
_SEND_BUFFER_BYTES = 4 << 20
"""Bytes of frames that may wait in the socket, where the kernel allows so many."""
_MAX_FDS = 250
"""The kernel passes 253 descriptors with a message."""
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
    """The header of a frame."""

    flags: int
    fds: int
    kind: str
    call_id: int
    tensors: int
    metadata: int
    """Bytes of tensor metadata."""
    body: int
    payload: int
    ring_bytes: int
    """Bytes in the ring buffer."""
    location: RingLocation
    core: int

    @classmethod
    def unpack(cls, frame: bytearray, length: int, fds: int) -> _Header:
        if length < _HEADER.size:
            raise ValueError("it is too short")
        magic, version, flags, count, kind, call, *numbers, core = _HEADER.unpack_from(frame)
        tensors, looks, body, payload, used, *place = numbers
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError("it does not begin like one")
        here, there = (0, payload) if flags & _PAYLOAD_IN_RING else (payload, 0)
        if length != _HEADER.size + here or there > used or looks + body > payload:
            raise ValueError("its lengths do not fit")
        if fds != count or (flags & _HAS_RING_FD and not fds):
            raise ValueError("descriptors are missing")
        word = kind.rstrip(b"\0").decode("ascii")
        return cls(flags, count, word, call, tensors, looks, body, payload, used, RingLocation(*place), core)


class Connection:
    """One end of the connection between the parent and a worker. Only the process that made it may use it."""

    def __init__(self, sock: socket.socket, peer_pidfd: int | None = None) -> None:
        """`peer` is a descriptor that becomes readable when the other process has ended (a pidfd).

        Without it the end is seen only when nobody holds the socket any longer, and what the other process forked may.
        """
        sock.setblocking(True)
        # As many messages as the kernel lets wait: whoever sends should rarely have to.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._sock = sock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ring_writer, self._ring_reader = RingWriter(), RingReader()
        self._buffer = bytearray(_HEADER.size + MAX_FRAME_PAYLOAD)
        self.bytes_transferred = 0
        """Bytes of messages that have passed here, either way, with what lies in rings."""
        self._view = memoryview(self._buffer)
        self._buffer_address = address_of(self._view)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if peer_pidfd is not None:
            self._poll.register(peer_pidfd, select.POLLIN)
        self.affinity: SenderCpuAvoidance | None = None
        """Keeps whoever waits here off the other side's core."""
        self.before_send: Callable[[], object] | None = None
        """Called in the sending thread before each message."""
        self.receiver: DeviceReceiver | None = None
        """Receives tensors that were sent from an accelerator; without one they arrive on the host."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end. In a forked child this closes the child's copy, and the line stays."""
        self._sock.close()
        self._ring_writer, self._ring_reader = RingWriter(), RingReader()  # their memory is not held longer

    def send(
        self,
        kind: str,
        call_id: int = 0,
        body: bytes = b"",
        tensors: Sequence[Tensor] = (),
        fds: Sequence[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Send a message. The data are copied before this returns, and the descriptors stay the caller's.

        Waits only where the socket is full of messages that the other side has not taken, and with a `timeout` no
        longer than that (`TimeoutError`, nothing was sent).
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
            raise TimeoutError("another message has been on its way for too long")

    def _send(
        self, kind: str, call: int, body: bytes, tensors: Sequence[Tensor], fds: Sequence[int], timeout: float | None
    ) -> None:
        looks = b"".join(map(encode_metadata, tensors))
        text = looks + body
        page, large = [text, bytes(-len(text) % INLINE_ALIGNMENT)], []
        used, afar = 0, None
        for tensor in tensors:
            nbytes = tensor.nbytes
            if nbytes <= MAX_INLINE_TENSOR:
                page.append(tensor_bytes(tensor, nbytes))
            else:
                large.append((tensor, nbytes))
                used += align(nbytes)
            if afar is None and tensor.device.type != "cpu":
                afar = tensor.device
        payload = sum(map(len, page))
        flags = _PAYLOAD_IN_RING if payload > MAX_FRAME_PAYLOAD else 0
        place, length = NO_LOCATION, 0
        if used or flags:
            length = used + (payload if flags else 0)
            place, block = self._ring_writer.reserve(length, afar)
            write_tensors(block, large, ALIGNMENT)
            if flags:
                block[used:], page = b"".join(page), []
        synchronize_stream(afar)
        # Only a frame that says where it lies may bring the ring.
        if place is not NO_LOCATION and (ring := self._ring_writer.fd_to_send()) is not None:
            flags, fds = flags | _HAS_RING_FD, [ring, *fds]
        lengths = len(tensors), len(looks), len(body), payload, length
        header = _HEADER.pack(
            *(_MAGIC, _VERSION, flags, len(fds), _encode_kind(kind), call, *lengths, *place, current_cpu()),
        )
        self._send_frame([header, *page], fds, timeout)
        self.bytes_transferred += _HEADER.size + used + payload

    def _send_frame(self, frame: Sequence[bytes], fds: Sequence[int], timeout: float | None) -> None:
        if len(fds) > _MAX_FDS + 1:
            raise EngineError(f"{len(fds)} file descriptors cannot be sent in one message; {_MAX_FDS} can.")
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = _deadline(timeout)
        while True:
            try:
                self._sock.sendmsg(frame, extra, _SEND_FLAGS)
                return
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self._sock, select.POLLOUT)
                if not waiting.poll(_remaining_ms(deadline)):
                    raise TimeoutError("the other side takes no more messages") from None
            except OSError as error:
                raise self._closed_error(error) from None

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None where none came within `timeout` seconds. What was sent before an end still comes."""
        self._check_process()
        deadline = _deadline(timeout)
        ended = False
        while True:
            try:
                length, fds, flags = self._receive_frame()
            except BlockingIOError:
                if ended:
                    raise ConnectionClosed("the other process ended") from None
                events = self._wait(deadline)
                if not events:
                    return None
                ended = all(fd != self._sock.fileno() for fd, _ in events)
            except ConnectionResetError:
                continue  # the other side left without reading all that was sent; what it sent itself is still here
            except OSError as error:
                raise self._closed_error(error) from None
            else:
                if not length:
                    raise ConnectionClosed("the other side closed the line")
                return self._decode(length, fds, flags)

    def _wait(self, deadline: float | None) -> list[tuple[int, int]]:
        left = _remaining_ms(deadline)
        if (left is None or left > 1000 * SPIN_SECONDS) and (found := spin_poll(self._poll)):
            return found
        if self.affinity is None:
            return self._poll.poll(left)
        try:
            self.affinity.before_wait()
            return self._poll.poll(left)
        finally:
            self.affinity.after_wait()

    def _receive_frame(self) -> tuple[int, list[int], int]:
        length, extra, flags, _ = self._sock.recvmsg_into([self._buffer], _FDS_BUFFER_BYTES, _RECV_FLAGS)
        if not extra:
            return length, [], flags
        fds = array.array("i")
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return length, list(fds), flags

    def _decode(self, length: int, fds: list[int], flags: int) -> Message:
        try:
            if flags & _TRUNCATED_FLAGS:
                raise ValueError("it was cut off")
            header = _Header.unpack(self._buffer, length, len(fds))
            if self.affinity is not None:
                self.affinity.record_sender(header.core)
            if header.flags & _HAS_RING_FD:
                self._ring_reader.attach(header.location, fds.pop(0))
            body, tensors = self._read_payload(header)
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, (ValueError, struct.error, OSError)):
                raise ProtocolError(f"a frame of {length} bytes is no message: {error}") from error
            raise
        self.bytes_transferred += length + header.ring_bytes
        return Message(header.kind, header.call_id, body, tensors, fds)

    def _read_payload(self, header: _Header) -> tuple[bytes, list[Tensor]]:
        """The body and the tensors, copied out of the frame and of the ring, which may be written over from then on."""
        block = self._ring_reader.block(header.location, header.ring_bytes) if header.ring_bytes else _EMPTY
        if header.flags & _PAYLOAD_IN_RING:
            large = header.ring_bytes - header.payload
            block, page = block[:large], block[large:]
            page_base = address_of(page)
        else:
            page, page_base = (
                self._view[_HEADER.size : _HEADER.size + header.payload],
                self._buffer_address + _HEADER.size,
            )
        end = header.metadata + header.body
        text = bytes(page[:end])
        tensors: list[Tensor] = []
        in_page, in_block, block_base = align(end, INLINE_ALIGNMENT), 0, address_of(block)
        looks = decode_metadata(text[: header.metadata], header.tensors)
        receiver = self.receiver if any(afar for *_, afar in looks) else None
        if receiver is not None:
            self._ring_reader.pin(receiver.device)
        for dtype, shape, nbytes, afar in looks:
            land = receiver if afar else None
            if nbytes <= MAX_INLINE_TENSOR:
                tensors.append(read_tensor(page, page_base, in_page, nbytes, dtype, shape, land))
                in_page += align(nbytes, INLINE_ALIGNMENT)
            else:
                tensors.append(read_tensor(block, block_base, in_block, nbytes, dtype, shape, land))
                in_block += align(nbytes)
        synchronize_stream(None if receiver is None else receiver.device)
        if header.ring_bytes:
            self._ring_reader.release(header.location)
        return text[header.metadata :], tensors

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise EngineError(
                "this line to a worker process belongs to the process that this one was forked from; "
                "make a new wrapper here."
            )

    def _closed_error(self, error: OSError) -> Exception:
        if self._sock.fileno() < 0:
            return ConnectionClosed("this side closed the line")
        return ConnectionClosed("the other side closed the line") if isinstance(error, ConnectionError) else error


@lru_cache(maxsize=64)
def _encode_kind(word: str) -> bytes:
    if not 0 < len(word) <= 16:
        raise EngineError(f"{word!r} is no kind of message: give a word of 1 to 16 letters.")
    return word.encode("ascii")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _remaining_ms(deadline: float | None) -> float | None:
    """Milliseconds until the deadline, for `poll`."""
    return None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
