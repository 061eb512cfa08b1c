"""The line between this process and one worker: whole messages or none, tensors by shared memory.

A message is one frame of a `SOCK_SEQPACKET` socket, which the kernel hands over whole or not at all. The frame holds a
header and a payload (what the tensors look like, the body, the data of small tensors); the data of larger tensors lie
in the sender's ring, and so does the payload where it is too long for a frame.

An interruption (Ctrl-C) of a `send` means that the message was sent whole or was not sent. An interruption of a
`receive` loses at most the one message that it was about to return, and none while it was only waiting. Nothing that
comes later is touched by either; whoever was interrupted tells by the call ids what belongs to what.
"""

from __future__ import annotations

import array
import ctypes
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.arena import ALIGNMENT, NOWHERE, Inbox, Outbox, Place, aligned
from instep.engines.processes.shore import Shore, wait_for
from instep.errors import EngineError

_MAGIC, _VERSION = b"inst", 1
_HEADER = struct.Struct("<4sBBH16sq9Q8x")
_ELSEWHERE, _RING_COMES = 1, 2
"""Flags: the payload lies in the ring as well; the first descriptor is the ring's."""

FRAME = 64 * 1024
"""The longest payload that travels in the frame itself."""
SMALL = 4096
"""Tensors of up to so many bytes travel in the payload."""
_WAITING = 4 << 20
"""Bytes of frames that may wait in the socket, where the kernel allows so many."""
_FDS = 250
"""The kernel passes 253 descriptors with a message."""
_FDS_ROOM = socket.CMSG_SPACE((_FDS + 1) * array.array("i").itemsize)
_GRAIN = 16
"""What small tensors are aligned to in the payload, and the payload in the frame: complex numbers must be."""
_ALONE = 4 << 20
"""Up to so many bytes this thread copies by itself: torch's threads would take longer to wake up."""

_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES: dict[int, torch.dtype] = {n: getattr(torch, name) for n, name in enumerate(_NAMES) if hasattr(torch, name)}
_NOTHING = memoryview(bytearray())
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_AFAR = 0x80  # in the code of a tensor that lies on an accelerator


class Message(NamedTuple):
    """What came over a line. Tensors are in memory of their own; descriptors belong to whoever received them."""

    kind: str
    call: int
    body: bytes
    tensors: list[Tensor]
    fds: list[int]


class Gone(Exception):
    """The other side closed the line or died."""


class Garbled(Exception):
    """A frame came that is none of ours."""


class _Header(NamedTuple):
    """The numbers at the beginning of a frame."""

    flags: int
    fds: int
    kind: str
    call: int
    tensors: int
    looks: int
    """Bytes that say what the tensors look like."""
    body: int
    payload: int
    used: int
    """Bytes in the ring."""
    place: Place

    def pack(self) -> bytes:
        flags, fds, kind, *numbers, place = self
        return _HEADER.pack(_MAGIC, _VERSION, flags, fds, kind.encode("ascii"), *numbers, *place)

    @classmethod
    def unpack(cls, frame: bytearray, length: int, fds: int) -> _Header:
        if length < _HEADER.size:
            raise ValueError("it is too short")
        magic, version, flags, count, kind, call, tensors, looks, body, payload, used, *place = _HEADER.unpack_from(
            frame
        )
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError("it does not begin like one")
        here, there = (0, payload) if flags & _ELSEWHERE else (payload, 0)
        if length != _HEADER.size + here or there > used or looks + body > payload:
            raise ValueError("its lengths do not fit")
        if fds != count or (flags & _RING_COMES and not fds):
            raise ValueError("descriptors are missing")
        word = kind.rstrip(b"\0").decode("ascii")
        return cls(flags, count, word, call, tensors, looks, body, payload, used, Place(*place))


class Line:
    """One end of the line between the process and one worker. It belongs to the process that made it."""

    def __init__(self, sock: socket.socket, peer: int | None = None) -> None:
        """`peer` is a descriptor that becomes readable when the other process has ended (a pidfd).

        Without it the end is seen only when nobody holds the socket any longer, and what the other process forked may.
        """
        sock.setblocking(True)
        # As many messages as the kernel lets wait: whoever sends should rarely have to.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING)
        self._sock = sock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._outbox, self._inbox = Outbox(), Inbox()
        self._buffer = bytearray(_HEADER.size + FRAME)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if peer is not None:
            self._poll.register(peer, select.POLLIN)
        self.before_send: Callable[[], object] | None = None
        """Called before a message is sent, by whoever sends it."""
        self.shore: Shore | None = None
        """Where tensors land that were sent from an accelerator; on the host without one."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end. In a forked child this closes the child's copy, and the line stays."""
        self._sock.close()
        self._outbox, self._inbox = Outbox(), Inbox()  # their memory is not held longer

    def send(
        self,
        kind: str,
        call: int = 0,
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
                self._send(kind, call, body, tensors, fds, None)
        elif self._lock.acquire(timeout=timeout):
            try:
                self._send(kind, call, body, tensors, fds, timeout)
            finally:
                self._lock.release()
        else:
            raise TimeoutError("another message has been on its way for too long")

    def _send(
        self, kind: str, call: int, body: bytes, tensors: Sequence[Tensor], fds: Sequence[int], timeout: float | None
    ) -> None:
        looks = b"".join(map(_look, tensors))
        sized = [(tensor, tensor.nbytes) for tensor in tensors]
        small = [pair for pair in sized if pair[1] <= SMALL]
        large = [pair for pair in sized if pair[1] > SMALL]
        text = aligned(len(looks) + len(body), _GRAIN)
        payload = text + sum(aligned(nbytes, _GRAIN) for _, nbytes in small)
        used = sum(aligned(nbytes) for _, nbytes in large)
        flags = _ELSEWHERE if payload > FRAME else 0
        place, block = NOWHERE, _NOTHING
        afar = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if used or flags:
            place, block = self._outbox.reserve(used + (payload if flags else 0), afar)
            _pack(block, 0, large, ALIGNMENT)
        page = block[used:] if flags else memoryview(bytearray(payload))
        page[: len(looks)] = looks
        page[len(looks) : len(looks) + len(body)] = body
        _pack(page, text, small, _GRAIN)
        wait_for(afar)
        frame = [] if flags else [page]
        # Only a frame that says where it lies may bring the ring.
        if place is not NOWHERE and (ring := self._outbox.to_announce()) is not None:
            flags, fds = flags | _RING_COMES, [ring, *fds]
        header = _Header(
            *(flags, len(fds), _kind(kind), call, len(tensors), len(looks), len(body), payload, len(block), place)
        )
        self._post([header.pack(), *frame], fds, timeout)

    def _post(self, frame: Sequence[bytes | memoryview], fds: Sequence[int], timeout: float | None) -> None:
        if len(fds) > _FDS + 1:
            raise EngineError(f"{len(fds)} file descriptors cannot be sent in one message; {_FDS} can.")
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = _deadline(timeout)
        while True:
            try:
                self._sock.sendmsg(frame, extra, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self._sock, select.POLLOUT)
                if not waiting.poll(_left(deadline)):
                    raise TimeoutError("the other side takes no more messages") from None
            except OSError as error:
                raise self._gone(error) from None

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None where none came within `timeout` seconds. What was sent before an end still comes."""
        self._check_process()
        deadline = _deadline(timeout)
        ended = False
        while True:
            try:
                length, fds, flags = self._take()
            except BlockingIOError:
                if ended:
                    raise Gone("the other process ended") from None
                events = self._poll.poll(_left(deadline))
                if not events:
                    return None
                ended = all(fd != self._sock.fileno() for fd, _ in events)
            except ConnectionResetError:
                continue  # the other side left without reading all that was sent; what it sent itself is still here
            except OSError as error:
                raise self._gone(error) from None
            else:
                if not length:
                    raise Gone("the other side closed the line")
                return self._open(length, fds, flags)

    def _take(self) -> tuple[int, list[int], int]:
        fds = array.array("i")
        how = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        length, extra, flags, _ = self._sock.recvmsg_into([self._buffer], _FDS_ROOM, how)
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return length, list(fds), flags

    def _open(self, length: int, fds: list[int], flags: int) -> Message:
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("it was cut off")
            header = _Header.unpack(self._buffer, length, len(fds))
            if header.flags & _RING_COMES:
                self._inbox.attach(header.place, fds.pop(0))
            body, tensors = self._read(header)
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, (ValueError, struct.error, OSError)):
                raise Garbled(f"a frame of {length} bytes is no message: {error}") from error
            raise
        return Message(header.kind, header.call, body, tensors, fds)

    def _read(self, header: _Header) -> tuple[bytes, list[Tensor]]:
        """The body and the tensors, copied out of the frame and of the ring, which may be written over from then on."""
        block = self._inbox.block(header.place, header.used) if header.used else _NOTHING
        if header.flags & _ELSEWHERE:
            large = header.used - header.payload
            block, page = block[:large], block[large:]
        else:
            page = memoryview(self._buffer)[_HEADER.size : _HEADER.size + header.payload]
        end = header.looks + header.body
        looks = _read_looks(bytes(page[: header.looks]), header.tensors)
        tensors: list[Tensor] = []
        in_page, in_block = aligned(end, _GRAIN), 0
        page_base, block_base = _address(page), _address(block)
        shore = self.shore if any(afar for *_, afar in looks) else None
        if shore is not None:
            self._inbox.pin(shore.device)
        for dtype, shape, nbytes, afar in looks:
            if nbytes <= SMALL:
                tensors.append(_unpack(page, page_base, in_page, nbytes, dtype, shape, shore if afar else None))
                in_page += aligned(nbytes, _GRAIN)
            else:
                tensors.append(_unpack(block, block_base, in_block, nbytes, dtype, shape, shore if afar else None))
                in_block += aligned(nbytes)
        wait_for(None if shore is None else shore.device)
        body = bytes(page[header.looks : end])
        if header.used:
            self._inbox.release(header.place)
        return body, tensors

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise EngineError(
                "this line to a worker process belongs to the process that this one was forked from; "
                "make a new wrapper here."
            )

    def _gone(self, error: OSError) -> Exception:
        if self._sock.fileno() < 0:
            return Gone("this side closed the line")
        return Gone("the other side closed the line") if isinstance(error, ConnectionError) else error


def _kind(word: str) -> str:
    if not 0 < len(word) <= 16:
        raise EngineError(f"{word!r} is no kind of message: give a word of 1 to 16 letters.")
    return word


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    """Milliseconds until then, as poll counts."""
    return None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)


def _look(tensor: Tensor) -> bytes:
    """What is to be known of a tensor before its data are read."""
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.layout != torch.strided or tensor.is_meta:
        raise EngineError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent as it is.")
    shape = tensor.shape
    return struct.pack(f"<BB{len(shape)}q", code | _AFAR * (tensor.device.type != "cpu"), len(shape), *shape)


def _read_looks(data: bytes, count: int) -> list[tuple[torch.dtype, tuple[int, ...], int, bool]]:
    looks, at = [], 0
    for _ in range(count):
        code, dim = struct.unpack_from("<BB", data, at)
        shape = struct.unpack_from(f"<{dim}q", data, at + 2)
        afar, code = bool(code & _AFAR), code & ~_AFAR
        if code not in _DTYPES or any(size < 0 for size in shape):
            raise ValueError("it describes no tensor")
        looks.append((_DTYPES[code], shape, math.prod(shape, start=_DTYPES[code].itemsize), afar))
        at += 2 + 8 * dim
    if at != len(data):
        raise ValueError("its tensors are not all described")
    return looks


def _pack(page: memoryview, offset: int, tensors: Sequence[tuple[Tensor, int]], alignment: int) -> None:
    """Copy tensors into memory, one after the other, whatever their strides and lazy bits."""
    base = _address(page)
    for tensor, nbytes in tensors:
        here = tensor.device.type == "cpu"
        plain = here and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if plain and nbytes <= _ALONE:
            ctypes.memmove(base + offset, tensor.data_ptr(), nbytes)
        elif nbytes:
            with torch.no_grad():
                _tensor(page, offset, tensor.dtype, tensor.shape).copy_(tensor.detach(), non_blocking=not here)
        offset += aligned(nbytes, alignment)


def _unpack(
    page: memoryview,
    base: int,
    offset: int,
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    shore: Shore | None,
) -> Tensor:
    if offset + nbytes > len(page):
        raise ValueError("its tensors are longer than it is")
    if shore is not None and nbytes:
        return shore.land(_tensor(page, offset, dtype, shape))
    tensor = torch.empty(shape, dtype=dtype, device="cpu" if shore is None else shore.device)
    if nbytes <= _ALONE:
        ctypes.memmove(tensor.data_ptr(), base + offset, nbytes)
    else:
        tensor.copy_(_tensor(page, offset, dtype, shape))
    return tensor


def _address(page: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page)) if len(page) else 0


def _tensor(page: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Memory as a tensor, which must have elements."""
    return torch.frombuffer(page, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
