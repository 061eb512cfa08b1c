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

from instep.engines.processes.arena import ALIGNMENT, NOWHERE, Inbox, Outbox, Place, aligned
from instep.engines.processes.cores import AWAKE, Elsewhere, stay_awake, this_core
from instep.engines.processes.looks import GRAIN, address, data_of, look, pack, read_looks, unpack
from instep.engines.processes.shore import Shore, wait_for
from instep.errors import EngineError

_MAGIC, _VERSION = b"inst", 1
_HEADER = struct.Struct("<4sBBH16sq9Qq")
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

_SENDING = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_TAKING = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_CUT_OFF = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)

_NOTHING = memoryview(bytearray())


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
    core: int

    @classmethod
    def unpack(cls, frame: bytearray, length: int, fds: int) -> _Header:
        if length < _HEADER.size:
            raise ValueError("it is too short")
        magic, version, flags, count, kind, call, *numbers, core = _HEADER.unpack_from(frame)
        tensors, looks, body, payload, used, *place = numbers
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError("it does not begin like one")
        here, there = (0, payload) if flags & _ELSEWHERE else (payload, 0)
        if length != _HEADER.size + here or there > used or looks + body > payload:
            raise ValueError("its lengths do not fit")
        if fds != count or (flags & _RING_COMES and not fds):
            raise ValueError("descriptors are missing")
        word = kind.rstrip(b"\0").decode("ascii")
        return cls(flags, count, word, call, tensors, looks, body, payload, used, Place(*place), core)


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
        self.moved = 0
        """Bytes of messages that have passed here, either way, with what lies in rings."""
        self._view = memoryview(self._buffer)
        self._base = address(self._view)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if peer is not None:
            self._poll.register(peer, select.POLLIN)
        self.elsewhere: Elsewhere | None = None
        """Keeps whoever waits here off the other side's core."""
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
        looks = b"".join(map(look, tensors))
        text = looks + body
        page, large = [text, bytes(-len(text) % GRAIN)], []
        used, afar = 0, None
        for tensor in tensors:
            nbytes = tensor.nbytes
            if nbytes <= SMALL:
                page.append(data_of(tensor, nbytes))
            else:
                large.append((tensor, nbytes))
                used += aligned(nbytes)
            if afar is None and tensor.device.type != "cpu":
                afar = tensor.device
        payload = sum(map(len, page))
        flags = _ELSEWHERE if payload > FRAME else 0
        place, length = NOWHERE, 0
        if used or flags:
            length = used + (payload if flags else 0)
            place, block = self._outbox.reserve(length, afar)
            pack(block, large, ALIGNMENT)
            if flags:
                block[used:], page = b"".join(page), []
        wait_for(afar)
        # Only a frame that says where it lies may bring the ring.
        if place is not NOWHERE and (ring := self._outbox.to_announce()) is not None:
            flags, fds = flags | _RING_COMES, [ring, *fds]
        lengths = len(tensors), len(looks), len(body), payload, length
        header = _HEADER.pack(
            *(_MAGIC, _VERSION, flags, len(fds), _kind(kind), call, *lengths, *place, this_core()),
        )
        self._post([header, *page], fds, timeout)
        self.moved += _HEADER.size + used + payload

    def _post(self, frame: Sequence[bytes], fds: Sequence[int], timeout: float | None) -> None:
        if len(fds) > _FDS + 1:
            raise EngineError(f"{len(fds)} file descriptors cannot be sent in one message; {_FDS} can.")
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = _deadline(timeout)
        while True:
            try:
                self._sock.sendmsg(frame, extra, _SENDING)
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
                events = self._wait(deadline)
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

    def _wait(self, deadline: float | None) -> list[tuple[int, int]]:
        left = _left(deadline)
        if (left is None or left > 1000 * AWAKE) and (found := stay_awake(self._poll)):
            return found
        if self.elsewhere is None:
            return self._poll.poll(left)
        try:
            self.elsewhere.rest()
            return self._poll.poll(left)
        finally:
            self.elsewhere.rise()

    def _take(self) -> tuple[int, list[int], int]:
        length, extra, flags, _ = self._sock.recvmsg_into([self._buffer], _FDS_ROOM, _TAKING)
        if not extra:
            return length, [], flags
        fds = array.array("i")
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return length, list(fds), flags

    def _open(self, length: int, fds: list[int], flags: int) -> Message:
        try:
            if flags & _CUT_OFF:
                raise ValueError("it was cut off")
            header = _Header.unpack(self._buffer, length, len(fds))
            if self.elsewhere is not None:
                self.elsewhere.came_from(header.core)
            if header.flags & _RING_COMES:
                self._inbox.attach(header.place, fds.pop(0))
            body, tensors = self._read(header)
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, (ValueError, struct.error, OSError)):
                raise Garbled(f"a frame of {length} bytes is no message: {error}") from error
            raise
        self.moved += length + header.used
        return Message(header.kind, header.call, body, tensors, fds)

    def _read(self, header: _Header) -> tuple[bytes, list[Tensor]]:
        """The body and the tensors, copied out of the frame and of the ring, which may be written over from then on."""
        block = self._inbox.block(header.place, header.used) if header.used else _NOTHING
        if header.flags & _ELSEWHERE:
            large = header.used - header.payload
            block, page = block[:large], block[large:]
            page_base = address(page)
        else:
            page, page_base = self._view[_HEADER.size : _HEADER.size + header.payload], self._base + _HEADER.size
        end = header.looks + header.body
        text = bytes(page[:end])
        tensors: list[Tensor] = []
        in_page, in_block, block_base = aligned(end, GRAIN), 0, address(block)
        looks = read_looks(text[: header.looks], header.tensors)
        shore = self.shore if any(afar for *_, afar in looks) else None
        if shore is not None:
            self._inbox.pin(shore.device)
        for dtype, shape, nbytes, afar in looks:
            land = shore if afar else None
            if nbytes <= SMALL:
                tensors.append(unpack(page, page_base, in_page, nbytes, dtype, shape, land))
                in_page += aligned(nbytes, GRAIN)
            else:
                tensors.append(unpack(block, block_base, in_block, nbytes, dtype, shape, land))
                in_block += aligned(nbytes)
        wait_for(None if shore is None else shore.device)
        if header.used:
            self._inbox.release(header.place)
        return text[header.looks :], tensors

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


@lru_cache(maxsize=64)
def _kind(word: str) -> bytes:
    if not 0 < len(word) <= 16:
        raise EngineError(f"{word!r} is no kind of message: give a word of 1 to 16 letters.")
    return word.encode("ascii")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    """Milliseconds until then, as poll counts."""
    return None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
