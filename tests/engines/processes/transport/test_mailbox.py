"""Tests of `Mailbox`, and of connections that use both mailboxes and sockets."""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from instep.engines.processes.transport.connection import Connection, ConnectionClosed, Message
from instep.engines.processes.transport.mailbox import Mailbox
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.runtime.affinity import set_spin_wait

pytestmark = pytest.mark.usefixtures("one_core")

Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection with mailboxes."""
    left, right = map(Connection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    left.open_mailboxes()
    assert right.receive(0) is None
    yield left, right
    left.close()
    right.close()


def received(connection: Connection, timeout: float | None = 10) -> Message:
    message = connection.receive(timeout)
    assert message is not None
    return message


def test_a_mailbox_holds_one_message() -> None:
    memory = SharedMemory.create(2 * 4096)
    sender, receiver = Mailbox(memory, 4096, 4096), Mailbox(memory, 4096, 4096)
    buffer = memoryview(bytearray(4096))
    assert not receiver.has_message()
    for text in (b"one", b"", b"three"):
        assert sender.put([text, b"!"])
        assert not sender.put([b"the last one was not received"])
        assert receiver.has_message()
        assert buffer[: receiver.take(buffer)] == text + b"!"
        assert not receiver.has_message()
    assert not sender.put([bytes(4096)])
    assert sender.num_sent == receiver.num_received == 3
    for _ in range(2):  # two threads
        receiver.begin_sleep()
        assert sender.is_receiver_asleep()
    for is_asleep in (True, False):
        receiver.end_sleep()
        assert sender.is_receiver_asleep() is is_asleep


def uses_socket(connection: Connection) -> bool:
    """Whether a message waits in the socket."""
    try:
        connection._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def test_small_messages_do_not_use_the_socket(pair: Pair) -> None:
    for sender, receiver in (pair, pair[::-1]):
        sender.send("first", 1, b"body", [torch.arange(6.0).view(2, 3).t()])
        assert not uses_socket(receiver)
        message = received(receiver)
        assert (message.kind, message.call_id, message.body) == ("first", 1, b"body")
        assert torch.equal(message.tensors[0], torch.arange(6.0).view(2, 3).t())
        sender.send("second")
        assert received(receiver).kind == "second"


def test_large_messages_and_descriptors_use_the_socket(pair: Pair) -> None:
    left, right = pair
    left.send("large", 1, bytes(100_000))
    left.send("large", 2, tensors=[torch.ones(100_000)])
    read, write = os.pipe()
    left.send("descriptor", 3, fds=[write])
    assert len(received(right).body) == 100_000
    assert received(right).tensors[0].sum() == 100_000
    os.write(received(right).fds[0], b"x")
    assert os.read(read, 1) == b"x"


@pytest.mark.parametrize("seed", range(8))
def test_messages_arrive_in_order(pair: Pair, seed: int) -> None:
    """Messages of all kinds, in both directions at once; both sides also pause, poll and spin."""
    count = 300

    def send(connection: Connection, rng: random.Random) -> None:
        for number in range(count):
            kind = rng.randrange(5)
            body, tensors = bytes(rng.randrange(40)), [torch.full((rng.randrange(1, 90),), float(number))]
            if kind == 0:
                body = bytes(70_000)
            elif kind == 1:
                tensors.append(torch.full((2_000,), float(number)))
            connection.send("numbered", number, body, tensors, [1] if kind == 2 else [])
            if rng.random() < 0.1:
                time.sleep(rng.random() / 1000)

    def receive(connection: Connection, rng: random.Random) -> None:
        set_spin_wait(rng.randrange(2))
        for number in range(count):
            while (message := connection.receive(rng.choice([None, 0, 0.001, 1]))) is None:
                pass
            assert message.call_id == number
            assert all((tensor == number).all() for tensor in message.tensors)
            for fd in message.fds:
                os.close(fd)
            if rng.random() < 0.1:
                time.sleep(rng.random() / 1000)

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(send, end, random.Random(seed + i)) for i, end in enumerate(pair)]
        tasks += [pool.submit(receive, end, random.Random(seed + 9 + i)) for i, end in enumerate(pair)]
        for task in tasks:
            task.result(60)


def test_a_sleeping_receiver_is_woken(pair: Pair) -> None:
    left, right = pair
    with ThreadPoolExecutor(1) as pool:
        for number in range(3):
            task = pool.submit(right.receive, 30)
            time.sleep(0.05)
            start = time.monotonic()
            left.send("wake up", number)
            message = task.result(30)
            assert message is not None
            assert message.call_id == number
            assert time.monotonic() - start < 5


def test_messages_of_a_peer_that_has_exited(pair: Pair) -> None:
    left, right = pair
    left.send("in the mailbox", 1)
    left.send("in the socket", 2)
    left.close()
    assert [received(right).call_id for _ in range(2)] == [1, 2]
    with pytest.raises(ConnectionClosed):
        right.receive(1)


def test_a_message_that_an_interruption_has_lost(pair: Pair) -> None:
    """Later messages arrive, whether the lost one was received or not sent."""
    left, right = pair
    left.send("lost", 1, bytes(100_000))
    right._receive_frame()
    left.send("small", 2)
    assert received(right).call_id == 2
    left._frames_sent += 1
    left.send("small", 3)
    left.send("large", 4, bytes(100_000))
    assert [received(right).call_id for _ in range(2)] == [3, 4]


def test_messages_around_one_that_was_not_sent(pair: Pair) -> None:
    """The receiver looks into the mailbox while it waits for the message in the socket."""
    left, right = pair
    left._frames_sent += 1
    left.send("small", 1)
    assert right._next_in_memory() is None
    left.send("small", 2)
    left.send("large", 3, bytes(100_000))
    left.send("large", 4, bytes(100_000))
    assert [received(right).call_id for _ in range(4)] == [1, 2, 3, 4]


def test_a_message_that_is_sent_while_the_receiver_looks_into_the_socket(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    receive_frame = right._receive_frame

    def send_and_close() -> Any:
        left.send("last", 1)
        left.close()
        return receive_frame()

    monkeypatch.setattr(right, "_receive_frame", send_and_close)
    assert received(right).call_id == 1


def test_wake_ups_while_another_thread_receives(pair: Pair) -> None:
    left, right = pair
    right.begin_wake_ups()
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(right.receive, 30)
        left.send("one", 1)
        assert task.result() is not None
    left.send("two", 2)
    assert select.select([right], [], [], 10)[0]
    right.end_wake_ups()
    assert received(right).call_id == 2


def test_mailboxes_are_opened_once(pair: Pair) -> None:
    left, right = pair
    left.open_mailboxes()
    right.open_mailboxes()
    assert not uses_socket(left)
    assert not uses_socket(right)


def test_messages_sent_before_the_mailboxes_were_opened() -> None:
    left, right = map(Connection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    left.send("before", 1)
    left.open_mailboxes()
    left.send("after", 2)
    assert [received(right).call_id for _ in range(2)] == [1, 2]
    left.close()
    right.close()
