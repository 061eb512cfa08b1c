"""Tests of `Connection`: messages between two processes arrive complete, in order and unchanged."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
from torch import Tensor

from instep.engines.processes.transport import connection, shared_memory, tensor_codec
from instep.engines.processes.transport.connection import MAX_FRAME_PAYLOAD, Connection, ConnectionClosed, ProtocolError
from instep.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_core")

Pair = tuple[Connection, Connection]


def make_pair() -> Pair:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Connection(left), Connection(right)


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = make_pair()
    yield left, right
    left.close()
    right.close()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def transfer(pair: Pair, *tensors: Tensor) -> list[Tensor]:
    pair[0].send("try", 1, tensors=tensors)
    message = pair[1].receive(10)
    assert message is not None
    return message.tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", tensor_codec.DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_are_received_unchanged(pair: Pair, dtype: torch.dtype) -> None:
    for count in (0, 1, 7, 5000):
        tensor = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        [back] = transfer(pair, tensor)
        assert same(back, tensor)


def test_strided_conjugate_and_negated_tensors(pair: Pair) -> None:
    base = torch.randn(60, 70)
    waves = torch.randn(40, 50, dtype=torch.complex64)
    tensors = [
        torch.tensor(3.5),
        torch.empty(0, 4),
        base.t(),
        base[::2, ::3],
        base[0].expand(100, 70),
        waves.conj(),
        waves[:2, :2].conj(),
        waves.conj().imag,
        torch.nn.Parameter(base),
        base.requires_grad_() * 2,
    ]
    back = transfer(pair, *tensors)
    assert all(same(a, b) for a, b in zip(back, tensors, strict=True))
    assert not any(a.requires_grad or a.is_conj() or a.is_neg() for a in back)
    assert [t.untyped_storage().nbytes() for t in back] == [t.nbytes for t in tensors]


def test_large_bodies_and_many_tensors(pair: Pair) -> None:
    many = [torch.full((3,), n) for n in range(5000)]
    for body in (b"", b"x", b"y" * MAX_FRAME_PAYLOAD, os.urandom(3_000_000)):
        for tensors in ([], many, [torch.arange(10_000)]):
            pair[0].send("mixed", 2**40, body, tensors)
            message = pair[1].receive(10)
            assert message is not None
            assert (message.kind, message.call_id, message.body) == ("mixed", 2**40, body)
            assert all(same(a, b) for a, b in zip(message.tensors, tensors, strict=True))


def test_a_received_tensor_owns_its_memory(pair: Pair) -> None:
    [first] = transfer(pair, torch.zeros(10_000))
    for _ in range(5):
        transfer(pair, torch.ones(10_000))
    assert not first.any()


def test_unread_messages_are_not_overwritten(pair: Pair) -> None:
    draw = random.Random(0)
    sent: list[Tensor] = []
    for turn in range(400):
        if draw.random() < 0.55 and len(sent) < 40:
            sent.append(torch.full((draw.choice([5, 2000, 30_000, 200_000]),), turn))
            pair[0].send("one", turn, tensors=[sent[-1]])
        elif sent:
            message = pair[1].receive(0)
            assert message is not None
            assert same(message.tensors[0], sent.pop(0))


def test_ring_memory_is_reused(pair: Pair) -> None:
    for _ in range(50):
        for call in range(2):  # two at a time, so that the ring is never found empty by the second
            pair[0].send("twice", call, tensors=[torch.ones(50_000)])
        assert pair[1].receive(0) is not None
        assert pair[1].receive(0) is not None
    assert pair[0]._ring_writer._ring is not None
    assert pair[0]._ring_writer._ring.generation == 1


def test_out_of_shared_memory_is_an_error_and_nothing_is_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 3 << 20)
    with pytest.raises(EngineError, match=r"needs 10\.0 MiB of shared memory, but only 3\.0 MiB are available"):
        pair[0].send("large", tensors=[torch.zeros(2 << 20)])
    assert pair[1].receive(0) is None
    assert same(transfer(pair, torch.ones(2000))[0], torch.ones(2000))


def test_received_file_descriptors_are_not_inheritable(pair: Pair) -> None:
    read, write = os.pipe()
    pair[0].send("pipe", fds=[write], tensors=[torch.ones(2000)])
    os.close(write)
    message = pair[1].receive(1)
    assert message is not None
    [there] = message.fds
    assert not os.get_inheritable(there)
    os.write(there, b"hello")
    os.close(there)
    assert os.read(read, 10) == b"hello"
    os.close(read)


def test_file_descriptors_do_not_leak() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        left, right = make_pair()
        for size in (3000, 400_000, 900_000):
            assert transfer((left, right), torch.ones(size))[0].all()
            left.send("unread", tensors=[torch.ones(size)])
        left.close()
        right.close()
        del left, right
    assert count() == before


def test_close_is_noticed_after_pending_messages(pair: Pair) -> None:
    left, right = pair
    assert right.receive(0.01) is None
    right.send("never read")
    left.send("last", 7, tensors=[torch.arange(5000)])
    left.close()
    message = right.receive(1)
    assert message is not None
    assert (message.call_id, message.tensors[0].sum()) == (7, 5000 * 4999 // 2)
    with pytest.raises(ConnectionClosed):
        right.receive(1)
    with pytest.raises(ConnectionClosed):
        right.send("nobody there")
    with pytest.raises(ConnectionClosed, match="this process"):
        left.receive(1)


def test_exit_is_noticed_even_if_a_child_holds_the_socket() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()  # stands for the pidfd of the other process
    receiver = Connection(left, peer_pidfd=read)
    Connection(right).send("before", 1)
    os.close(write)
    assert receiver.receive(1) is not None
    with pytest.raises(ConnectionClosed, match="exited"):
        receiver.receive(1)
    left.close(), right.close(), os.close(read)


def test_sending_to_a_full_socket_times_out(pair: Pair) -> None:
    sent = 0

    def fill() -> None:
        nonlocal sent
        for _ in range(10_000):
            pair[0].send("more", sent, b"x" * 1000, timeout=0.05)
            sent += 1

    with pytest.raises(TimeoutError):
        fill()
    for call in range(sent):
        message = pair[1].receive(1)
        assert message is not None
        assert message.call_id == call
    assert pair[1].receive(0) is None


def packed(header: connection._Header) -> bytes:
    flags, fds, kind, *numbers, location, cpu, before = header
    return connection._HEADER.pack(connection._MAGIC, flags, fds, kind.encode(), *numbers, *location, cpu, before)


def frames() -> Iterator[tuple[str, bytes]]:
    plain = connection._Header(0, 0, "bad", 1, 0, 0, 0, 0, 0, shared_memory.NO_LOCATION, -1, 0)

    def header(**change: object) -> bytes:
        return packed(plain._replace(**change))  # type: ignore[arg-type]

    yield "no header", b"hello"
    yield "other magic", b"other" + header()[5:]
    yield "longer than its header says", header() + b"x"
    yield "shorter than its header says", header(payload=10, body=10)
    yield "body longer than the payload", header(payload=2, body=10) + b"xx"
    yield (
        "longer than the buffer",
        header(payload=MAX_FRAME_PAYLOAD + 100, body=MAX_FRAME_PAYLOAD + 100) + b"x" * (MAX_FRAME_PAYLOAD + 100),
    )
    yield (
        "a ring that was not attached",
        header(ring_bytes=64, location=shared_memory.RingLocation(3, 1 << 20, 4096, 64)),
    )
    yield (
        "a ring without its descriptor",
        header(flags=2, ring_bytes=64, location=shared_memory.RingLocation(3, 1 << 20, 4096, 64)),
    )
    yield "an unknown dtype", header(payload=2, metadata=2, tensors=1) + bytes([99, 0])
    yield "truncated metadata", header(payload=2, metadata=2, tensors=1) + bytes([1, 4])
    yield "a negative size", header(payload=10, metadata=10, tensors=1) + struct.pack("<BBq", 1, 1, -1)
    yield "a tensor without data", header(payload=10, metadata=10, tensors=1) + struct.pack("<BBq", 1, 1, 1 << 40)


@pytest.mark.parametrize("frame", [pytest.param(data, id=name) for name, data in frames()])
def test_invalid_frames_are_rejected(pair: Pair, frame: bytes) -> None:
    pair[0]._sock.send(frame)
    with pytest.raises(ProtocolError):
        pair[1].receive(1)
    assert same(transfer(pair, torch.ones(3000))[0], torch.ones(3000))


def test_a_ring_of_the_wrong_size_is_rejected(pair: Pair) -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 100)
    place = shared_memory.RingLocation(1, 1 << 20, 4096, 64)
    head = packed(connection._Header(2, 1, "bad", 1, 0, 0, 0, 0, 64, place, -1, 0))
    socket.send_fds(pair[0]._sock, [head], [fd])
    os.close(fd)
    with pytest.raises(ProtocolError):
        pair[1].receive(1)


class Interruption(BaseException):
    """Stands for KeyboardInterrupt."""


def test_interruptions_do_not_corrupt_messages(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer interrupts sends and receives at any point; what arrives is whole and in order."""
    # Python would warn about files of /proc that an interruption left open.
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 1 << 30)

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in (Connection.send.__code__, Connection.receive.__code__):
                raise Interruption
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, interrupt)
    arrived: list[int] = []
    interrupted = torn = 0
    try:
        for call in range(1500):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-4))
            try:
                pair[0].send("call", call, b"%d" % call, [torch.full((2000,), call), torch.tensor(call)])
                while (message := pair[1].receive(0)) is not None:
                    arrived.append(message.call_id)
                    whole = message.body == b"%d" % message.call_id and bool(
                        (message.tensors[0] == message.call_id).all()
                    )
                    torn += not whole or int(message.tensors[1]) != message.call_id
            except Interruption:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 50
    assert not torn
    assert arrived == sorted(set(arrived))
    assert len(arrived) > 500
    while pair[1].receive(0) is not None:
        pass
    assert same(transfer(pair, torch.ones(3000))[0], torch.ones(3000))


def test_concurrent_traffic_in_both_directions() -> None:
    left, right = make_pair()
    rounds, failures = 200, []

    def work(end: Connection, factor: int) -> None:
        def sending() -> None:
            for call in range(rounds):
                end.send("x", call, tensors=[torch.full((call * 37 % 9000,), call * factor)])

        sender = threading.Thread(target=sending)
        sender.start()
        for call in range(rounds):
            message = end.receive(20)
            if message is None or message.call_id != call or (message.tensors[0] != call * (3 - factor)).any():
                failures.append(call)
        sender.join()

    threads = [threading.Thread(target=work, args=(end, factor)) for end, factor in ((left, 1), (right, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left.close()
    right.close()
    assert not failures


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_cannot_use_or_close_the_connection(pair: Pair) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            for use in (lambda: pair[0].send("stray"), lambda: pair[1].receive(0)):
                with pytest.raises(EngineError, match="forked"):
                    use()
            pair[0].close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert same(transfer(pair, torch.ones(3000))[0], torch.ones(3000))
