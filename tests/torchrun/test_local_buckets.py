"""Sums of gradients of the ranks of one machine, through memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from instep.engines.torchrun.channel import RankChannel
from instep.engines.torchrun.local_buckets import LocalBuckets
from instep.engines.torchrun.local_memory import machine_identity, share_memory
from instep.engines.torchrun.local_slots import ExchangeFailed, LocalSlots

pytestmark = pytest.mark.skipif(not machine_identity(), reason="needs memfd_create and pidfd_open")

PLACES = [(torch.float32, 5), (torch.float64, 0), (torch.float64, 3000)]


class Channel:
    """What `LocalBuckets` uses of a `RankChannel`, for ranks that are threads."""

    def __init__(self, slots: LocalSlots, rank: int, count: int) -> None:
        self.rank, self.count, self._slots, self.device = rank, count, slots, torch.device("cpu")

    def fence(self) -> None:
        self._slots.fence()

    def wait(self, _: str, has_arrived: Callable[[int], bool]) -> None:
        self._slots.wait(has_arrived)


def open_buckets(
    count: int, timeout: float = 30.0, pids: Sequence[int] = (), places: Sequence[tuple[torch.dtype, int]] = PLACES
) -> list[LocalBuckets]:
    slots_memory = mmap.mmap(-1, LocalSlots.nbytes(count))
    memory = mmap.mmap(-1, LocalBuckets.nbytes(count, places))
    found = []
    for rank in range(count):
        slots = LocalSlots(slots_memory, rank, count, pids or [os.getpid()] * count, timeout)
        found.append(LocalBuckets(memory, cast(RankChannel, Channel(slots, rank, count)), places))
    return found


def gradients(rank: int, reduction: int, bucket: int) -> Tensor:
    dtype, numel = PLACES[bucket]
    return torch.arange(numel, dtype=dtype) * (rank + 1) + reduction


def pack(buckets: LocalBuckets, rank: int, reduction: int) -> list[Tensor]:
    buckets.begin()
    packed = []
    for bucket in range(len(PLACES)):
        value, place = gradients(rank, reduction, bucket), buckets.place(bucket)
        if place is not None:
            value = place.copy_(value)
            buckets.publish(bucket)
        packed.append(value)
    return packed


def check_sums(buckets: LocalBuckets, packed: Sequence[Tensor], count: int, reduction: int) -> None:
    for bucket, own in enumerate(packed):
        buckets.complete(bucket, own)
    for bucket, own in enumerate(packed):
        expected = torch.stack([gradients(rank, reduction, bucket) for rank in range(count)]).sum(0)
        torch.testing.assert_close(buckets.sum(bucket, own), expected, rtol=0, atol=0)
    buckets.end()


def run_in_threads(count: int, run: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


@pytest.mark.parametrize("count", [2, 3])
def test_sums(count: int) -> None:
    """Also if a rank packs while another one still reads the last sums."""
    ranks = open_buckets(count)

    def run(rank: int) -> None:
        for reduction in range(200):
            if reduction % 37 == rank:
                time.sleep(0.002)
            packed = pack(ranks[rank], rank, reduction)
            if reduction % 41 == rank:
                time.sleep(0.002)
            check_sums(ranks[rank], packed, count, reduction)

    run_in_threads(count, run)


class Parts:
    """Divides buckets in two parts."""

    def views(self, flat: Tensor, number: int) -> list[Tensor]:
        return [flat[:2], flat[2:].view(1, -1)]


@pytest.mark.parametrize("count", [2, 3])
def test_sums_of_parts(count: int) -> None:
    """They do not change with the next reduction."""
    ranks, plan = open_buckets(count), Parts()

    def run(rank: int) -> None:
        kept: list[list[Tensor]] = []
        for reduction in range(50):
            for bucket, packed in enumerate(pack(ranks[rank], rank, reduction)):
                ranks[rank].complete(bucket, packed)
            assert torch.equal(
                torch.cat([part.view(-1) for part in ranks[rank].own_parts(2, plan)]), gradients(rank, reduction, 2)
            )
            kept.append(ranks[rank].sum_parts(2, plan))
            ranks[rank].end()
        for reduction, (first, second) in enumerate(kept):
            expected = torch.stack([gradients(other, reduction, 2) for other in range(count)]).sum(0)
            torch.testing.assert_close(first, expected[:2], rtol=0, atol=0)
            torch.testing.assert_close(second, expected[2:].view(1, -1), rtol=0, atol=0)

    run_in_threads(count, run)


def test_nothing_is_packed_where_another_rank_still_reads() -> None:
    first, second = open_buckets(2)
    packed = [pack(rank, index, 0) for index, rank in enumerate((first, second))]
    check_sums(first, packed[0], 2, 0)
    later = pack(first, 0, 1)
    assert first.place(0) is None
    check_sums(second, packed[1], 2, 0)
    assert first.place(1) is None, "the buckets before it are not published yet"
    run_in_threads(
        2, lambda rank: check_sums(first, later, 2, 1) if rank == 0 else check_sums(second, pack(second, 1, 1), 2, 1)
    )


def test_a_reduction_that_all_ranks_give_up() -> None:
    """A rank has failed in the backward: nobody takes the sums."""
    ranks = open_buckets(2)
    for rank, buckets in enumerate(ranks):
        pack(buckets, rank, 0)
    run_in_threads(2, lambda rank: check_sums(ranks[rank], pack(ranks[rank], rank, 1), 2, 1))


def test_a_rank_that_dies_before_it_has_packed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        first, _ = open_buckets(2, pids=[os.getpid(), process.pid])
        packed = pack(first, 0, 0)
        threading.Timer(0.1, process.kill).start()
        start = time.monotonic()
        with pytest.raises(ExchangeFailed, match="rank 1 has ended"):
            first.sum(0, packed[0])
        assert time.monotonic() - start < 10


def test_memory_that_a_rank_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank uses it then, and its descriptor is closed."""
    before = len(os.listdir("/proc/self/fd"))
    values: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        values.append(value)
        return [value, value] if isinstance(value, str) else [value, False]

    assert share_memory(4096, 0, exchange) is None
    assert values[0].startswith(f"/proc/{os.getpid()}/fd/")
    assert values[1] is True
    assert share_memory(4096, 1, lambda value: ["/proc/0/fd/0", ""] if value == "" else [True, value]) is None
    monkeypatch.setattr(os, "memfd_create", _fail)
    assert share_memory(4096, 0, lambda value: [value, value]) is None
    assert len(os.listdir("/proc/self/fd")) == before


def _fail(*_: Any) -> int:
    raise OSError("not supported")
