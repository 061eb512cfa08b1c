"""The engine works in scripts, at prompts and under pytest, and opens no reachable sockets."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ....system_usage import sockets_of

SCRIPT = """
import os, torch, instep
from torch import nn
from dataclasses import dataclass

SCALE = 1.0

@dataclass
class Out:
    y: torch.Tensor
    name: str

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return Out(self.layer(x) * SCALE, "out")

net = Net()
model = instep.DataParallel(net, ["cpu"] * 2, engine="processes")
x = torch.randn(5, 4)
out = model(x)
assert type(out) is Out and out.name == "out", out
out.y.sum().backward()
torch.testing.assert_close(out.y, net(x).y)
SCALE = 3.0
torch.testing.assert_close(model(x).y, net(x).y)
"""

END = """
model.close()
print("all well")
"""

DATA_LOADER = """
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 3)), batch_size=5, num_workers=2)
for xs, ys in data:
    (model(xs).y - ys).square().mean().backward()
"""

DISTRIBUTED = """
import tempfile, torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    total = torch.ones(3)
    model(x).y.sum().backward()
    dist.all_reduce(total)
    dist.destroy_process_group()
assert total.tolist() == [1, 1, 1]
"""

SOCKETS = (
    f"from pathlib import Path\n{inspect.getsource(sockets_of)}"
    + """
worker = model._instep_engine._pool.get(1).pid
held = sockets_of(os.getpid()) | sockets_of(worker)
tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6", "udp", "udp6")]
listening = [line for table in tables for line in table]
assert not [line for line in listening if line.split()[9] in held], listening
named = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
held = sockets_of(worker)  # ours have no name to connect to; the CUDA driver has one
assert not [words for words in named if words[6] in held and len(words) > 7 and "@cuda" not in words[7]], named
assert not [name for name in os.listdir("/dev/shm") if "instep" in name]
"""
)


def run(folder: Path, *command: str, code: str = "") -> str:
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    done = subprocess.run(
        [sys.executable, *command],
        input=code,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + DATA_LOADER + DISTRIBUTED + SOCKETS + END)
    assert "all well" in run(tmp_path, str(script))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_command_string_and_interactive_prompt(tmp_path: Path) -> None:
    assert "all well" in run(tmp_path, "-c", SCRIPT + END)
    # A prompt reads one statement at a time.
    lines = "\n".join(f"exec({block!r})" for block in (textwrap.dedent(SCRIPT), END))
    assert "all well" in run(tmp_path, "-i", code=lines + "\n")


BREAKPOINT = """
import sys, torch, instep
sys.stderr = sys.stdout
from torch import nn

class Net(nn.Module):
    stop = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if self.stop:
            breakpoint()
        return self.layer(x)

net, x = Net(), torch.randn(5, 4)
model = instep.DataParallel(net, ["cpu"] * 2, engine="processes")
model(x)
net.stop = True
ys = [model(x) for _ in range(2)]
net.stop = False
for y in ys:
    torch.testing.assert_close(y, net(x))
model.close()
print("all well")
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_breakpoint_stops_only_replica_0(tmp_path: Path) -> None:
    script = tmp_path / "debug.py"
    script.write_text(BREAKPOINT)
    shown = run(tmp_path, str(script), code="c\n" * 20)  # the probe stops there too
    assert "(Pdb)" in shown
    assert shown.count("[replica 1 on cpu] breakpoint() is ignored") == 1, shown
    assert shown.endswith("all well\n")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_disabled_breakpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    script = tmp_path / "debug.py"
    script.write_text(BREAKPOINT)
    assert run(tmp_path, str(script)) == "all well\n"


TEST = """
import pytest, torch, instep
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

def test_it():
    net, x = Net(), torch.randn(5, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        torch.testing.assert_close(model(x), net(x))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [pytest.param("prepend", marks=pytest.mark.slow), "importlib"])
def test_pytest_in_both_import_modes(tmp_path: Path, mode: str) -> None:
    (tmp_path / "test_net.py").write_text(TEST)
    options = ("-q", "-p", "no:cacheprovider", f"--import-mode={mode}")
    assert "1 passed" in run(tmp_path, "-m", "pytest", *options, "test_net.py")
