"""The memory of a step is there for the next one: counted in page faults, in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from instep.runtime.allocator import retain_freed_memory

STEPS = """
import resource, statistics, torch, instep
torch.set_num_threads(1)
net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
model = instep.DataParallel(net, ["cpu"] * 2, engine="threads")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 512)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(statistics.median([faults() for _ in range(60)][20:]))
model.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_steps_ask_for_no_new_pages() -> None:
    """Gradients of 4 MB, a thousand pages, are freed and made again in each of them.

    Allocators end a heap that threads have emptied now and then, so a few steps do ask for some: most must not.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", STEPS], env=clean, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_settings_of_the_users_own_come_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert not retain_freed_memory.__wrapped__()
