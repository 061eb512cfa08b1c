"""Tests of `SharedMemory`: lifetime, access from other processes and forked children, memory limits."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instep.engines.processes.transport import shared_memory
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.errors import EngineError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

PAGE = 4096


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:instep")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_tensor_has_its_own_storage_and_keeps_the_memory_alive() -> None:
    before = mappings(), descriptors()
    memory = SharedMemory.create(1 << 20)
    weight = memory.tensor(64, 40).view(torch.float32)
    weight.copy_(torch.arange(10.0))
    assert weight.untyped_storage().nbytes() == 40
    saved = io.BytesIO()
    torch.save(weight, saved)
    assert len(saved.getvalue()) < 4000
    assert memory.tensor(0, 0).numel() == 0
    del memory
    assert weight.tolist() == list(range(10))
    assert mappings() == before[0] + 1
    view = weight[3:]
    del weight
    assert view[0] == 3
    del view
    gc.collect()  # torch.save of torch 2.8 leaves a cycle
    assert (mappings(), descriptors()) == before


def test_out_of_range_access_is_an_error() -> None:
    memory = SharedMemory.create(PAGE)
    with pytest.raises(ValueError, match="buffer length"):
        memory.tensor(PAGE - 8, 16)
    with pytest.raises(ValueError, match="length"):
        SharedMemory.attach(os.dup(memory.fd), 2 * PAGE, writable=True)


ATTACH = """
import sys
from instep.engines.processes.transport.shared_memory import SharedMemory
fds, nbytes = map(int, sys.argv[1:3]), int(sys.argv[3])
private, shared = [SharedMemory.attach(fd, nbytes, bool(n)).tensor(0, nbytes) for n, fd in enumerate(fds)]
for _ in range(2):
    print(*(int(tensor[place]) for tensor in (private, shared) for place in (0, 4096)), flush=True)
    private[0] = shared[0] = 77
    input()
"""


def test_private_and_shared_mappings_in_another_process() -> None:
    memories = [SharedMemory.create(2 * PAGE) for _ in range(2)]
    private, shared = (memory.tensor(0, 2 * PAGE) for memory in memories)
    private[0], private[PAGE], shared[0], shared[PAGE] = 1, 2, 3, 4
    fds = [memory.fd for memory in memories]
    words = [sys.executable, "-c", ATTACH, *map(str, fds), str(2 * PAGE)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True, pass_fds=fds, env=environment) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline().split() == ["1", "2", "3", "4"]
        private[PAGE], shared[PAGE] = 5, 6
        other.stdin.write("\n\n")
        other.stdin.flush()
        # Private pages show later writes of the owner until they are written here.
        assert other.stdout.readline().split() == ["77", "5", "77", "6"]
    assert (private[0], shared[0]) == (1, 77)


def forked(work: Callable[[], bool]) -> bool:
    """Whether a function returns True in a forked child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_does_not_write_to_its_parents_memory() -> None:
    memory = SharedMemory.create(8 * PAGE)
    weight = memory.tensor(0, 8 * PAGE).view(torch.float32)
    weight.fill_(1)
    other = SharedMemory.attach(os.dup(memory.fd), 8 * PAGE, writable=True).tensor(0, 8 * PAGE).view(torch.float32)

    def work() -> bool:
        seen = bool((weight == 1).all() and (other == 1).all())
        weight.fill_(-9)
        other[5] = -8
        return seen and bool(weight[5] == -9 and other[5] == -8 and other[6] == 1)

    assert forked(work)
    assert bool((weight == 1).all())
    weight.fill_(4)  # the parent's memory is still shared
    assert bool((other == 4).all())


def test_share_in_a_forked_child_uses_new_memory() -> None:
    memory = SharedMemory.create(2 * PAGE)
    weight = memory.tensor(0, 2 * PAGE)
    weight.fill_(1)
    (parent_reads, child_writes), (child_reads, parent_writes) = os.pipe(), os.pipe()

    def mapped() -> torch.Tensor:
        return SharedMemory.attach(os.dup(memory.fd), 2 * PAGE, writable=False).tensor(0, 2 * PAGE)

    def work() -> bool:
        address = weight.data_ptr()
        weight[0] = 2
        for _ in range(2):
            memory.share()
        seen = mapped().tolist() == weight.tolist()
        os.write(child_writes, b"shared")
        os.read(child_reads, 1)  # the parent has written since
        weight[1] = 3
        seen = seen and mapped().tolist() == weight.tolist() == [2, 3, *[1] * (2 * PAGE - 2)]

        def work_again() -> bool:
            weight[2] = 4
            memory.share()
            return mapped().tolist() == weight.tolist() == [2, 3, 4, *[1] * (2 * PAGE - 3)]

        return seen and forked(work_again) and weight[2] == 1 and weight.data_ptr() == address

    def write() -> None:
        os.read(parent_reads, 6)
        weight.fill_(7)
        os.write(parent_writes, b".")

    parent = threading.Thread(target=write)
    parent.start()
    before = descriptors()
    try:
        assert forked(work)
    finally:
        os.write(child_writes, b"ended.")
        parent.join()
        for fd in (parent_reads, child_writes, child_reads, parent_writes):
            os.close(fd)
    assert descriptors() == before - 4
    assert bool((weight == 7).all())
    memory.share()
    assert mapped().tolist() == weight.tolist()


def test_available_memory_is_checked_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with pytest.raises(EngineError, match=r"needs 4096\.0 GiB of shared memory, but only .* are available"):
        SharedMemory.create(1 << 42)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 100)
    with pytest.raises(EngineError, match=r"needs 101 bytes .* but only 100 bytes are available"):
        SharedMemory.create(101)
    assert SharedMemory.create(100).nbytes == 100
    assert descriptors() == before


@pytest.mark.parametrize("version", [1, 2])
def test_available_memory_respects_cgroup_limits(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    idle = "total_inactive_file" if version == 1 else "inactive_file"
    root = tmp_path / "memory" if version == 1 else tmp_path
    outer, inner = root / "pod", root / "pod" / "box"
    inner.mkdir(parents=True)
    (outer / limit).write_text("5000000\n")
    (outer / used).write_text("4000000\n")
    (outer / "memory.stat").write_text(f"cache 7\n{idle} 500000\n")
    (inner / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    (inner / used).write_text("10\n")
    groups = tmp_path / "cgroup"
    groups.write_text("4:cpu:/x\n9:memory:/pod/box\n" if version == 1 else "0::/pod/box\n")
    monkeypatch.setattr(shared_memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(shared_memory, "_SELF_CGROUP", groups)
    assert shared_memory.available_memory() == 1_500_000
    (outer / limit).unlink()
    assert shared_memory.available_memory() > 1_500_000
