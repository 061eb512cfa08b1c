"""Messages between the ranks of one machine, through memory."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from instep.engines.torchrun.local_memory import machine_identity
from instep.engines.torchrun.local_slots import SLOT_BYTES, ExchangeFailed, LocalSlots

pytestmark = pytest.mark.skipif(not machine_identity(), reason="needs memfd_create and pidfd_open")


def open_slots(count: int, timeout: float = 30.0, pids: dict[int, int] | None = None) -> list[LocalSlots]:
    """The slots of ranks that are threads of this process, except those in `pids`."""
    memory = mmap.mmap(-1, LocalSlots.nbytes(count))
    processes = [(pids or {}).get(rank, os.getpid()) for rank in range(count)]
    return [LocalSlots(memory, rank, count, processes, timeout) for rank in range(count)]


def message(rank: int, number: int) -> bytes:
    return bytes([(rank + number) % 251]) * (1 + (7 * rank + number) % SLOT_BYTES)


def test_every_rank_gets_every_message() -> None:
    """Also if a rank is much faster than another one."""
    count, exchanges = 3, 400
    ranks = open_slots(count)

    def run(rank: int) -> None:
        for number in range(exchanges):
            if number % 97 == rank:
                time.sleep(0.003)
            slots = ranks[rank].gather(message(rank, number))
            for peer in range(count):
                expected = message(peer, number)
                assert slots[peer][: len(expected)] == expected

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def test_a_rank_that_does_not_arrive() -> None:
    first, second = open_slots(2, timeout=0.1)
    with pytest.raises(ExchangeFailed, match=r"rank 1 has ended, or did not arrive within 0\.1 s"):
        first.gather(message(0, 0))
    for slots in (first, second):
        with pytest.raises(ExchangeFailed, match="has given up"):
            slots.gather(message(1, 0))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        yield other
        other.kill()


def test_a_rank_that_dies(process: subprocess.Popen[bytes]) -> None:
    """It is noticed at once, and before its parent has waited for it."""
    first, _ = open_slots(2, pids={1: process.pid})
    threading.Timer(0.1, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(ExchangeFailed, match="rank 1 has ended"):
        first.gather(message(0, 0))
    assert time.monotonic() - start < 10


def test_a_rank_that_arrives_and_dies(process: subprocess.Popen[bytes]) -> None:
    first, second, third = open_slots(3, pids={1: process.pid})
    arrived = threading.Thread(target=second.gather, args=(message(1, 0),))
    arrived.start()
    late = threading.Timer(0.2, third.gather, args=(message(2, 0),))
    late.start()
    process.kill()
    slots = first.gather(message(0, 0))
    assert slots[2][0] == message(2, 0)[0]
    arrived.join()
    late.join()
