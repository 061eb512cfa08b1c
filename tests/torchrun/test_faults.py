"""Ranks that die, sleep, end or fail; restarts; two nodes whose network is cut."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launch import ROOT, finish_ranks, read_rank, run_ranks, start_ranks

LOOP = str(ROOT / "tests/torchrun/scripts/loop.py")
STEPS = 8


def loop(tmp_path: Path, *arguments: str, options: tuple[str, ...] = ("--standalone",)) -> list[str]:
    job = run_ranks(tmp_path, 2, [LOOP, *arguments], options=options, timeout=120)
    assert job.returncode != 0, job.describe()
    return [*job.ranks, job.output]


@pytest.mark.slow
def test_a_rank_that_waits_elsewhere_is_shown_with_its_stack(tmp_path: Path) -> None:
    first, _, _ = loop(tmp_path, "--at", "3", "--do", "sleep")
    assert "RankFailure: rank 0 waited 5 s for the other ranks in call 4 of Sequential" in first
    assert "rank 1 is not in a call of instep. It is at:" in first
    assert "time.sleep(4 * options.timeout + 20)" in first


@pytest.mark.slow
def test_a_rank_with_fewer_batches(tmp_path: Path) -> None:
    first, _, _ = loop(tmp_path, "--at", "3", "--do", "return")
    assert "RankFailure: rank 0 waited" in first
    assert "rank 1 has come to the end of its script. Its last call: backward of forward 3 of Sequential" in first


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    *_, output = loop(tmp_path, "--at", "3")
    assert "rank      : 1 (local_rank: 1)" in output
    assert "SIGKILL" in output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What rank 0 prints if nothing happens."""
    return run_ranks(tmp_path_factory.mktemp("plain"), 2, [LOOP]).check().ranks[0]


@pytest.mark.slow
def test_a_restart_after_a_kill(tmp_path: Path, undisturbed: str) -> None:
    """The group comes up again, on a store that has the keys of the first start."""
    options = ("--standalone", "--max-restarts", "1")
    job = run_ranks(tmp_path / "killed", 2, [LOOP, "--at", "3"], options=options).check()
    for text in job.ranks:
        assert text.count("step 2:") == 2  # before and after the restart
        assert text.endswith(undisturbed)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_an_unreachable_store_is_said_at_once() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = "import torch, instep; instep.DataParallel(torch.nn.Linear(1, 1), engine='torchrun', timeout=3)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=90
    )
    assert "EngineError: rank 1 cannot reach the store of the ranks at 127.0.0.1" in done.stderr
    assert "no firewall closes port" in done.stderr


@pytest.mark.slow
def test_other_launchers_by_explicit_choice(tmp_path: Path) -> None:
    """As under SLURM: the variables of a launcher, but not those of torchrun."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, instep\n"
        "torch.manual_seed(0)\n"
        "model = instep.DataParallel(torch.nn.Linear(3, 2), engine='torchrun', timeout=30)\n"
        "print(model(torch.ones(4, 3)).sum().item(), instep.is_primary())\n"
    )
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=90)[0].split() for process in processes]
    assert outputs[0][0] == outputs[1][0]
    assert [output[1] for output in outputs] == ["True", "False"]


# Two nodes


def can_make_namespaces() -> bool:
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"instep-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces, joined by a virtual cable."""
    if not can_make_namespaces():
        pytest.skip("network namespaces need root and the command ip")
    names = [f"instep{os.getpid()}{letter}" for letter in "ab"]
    links = [f"in{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            ip("-n", name, "link", "set", link, "name", "eth0")
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def start_node(node: str, number: int, log_dir: Path, arguments: list[str]) -> subprocess.Popen[str]:
    options = (
        *("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"),
        *("--rdzv-id", "job", "--rdzv-conf", f"is_host={number == 1}", "--local-addr", f"10.77.0.{number}"),
    )
    return start_ranks(
        log_dir, 1, [LOOP, *arguments], options, prefix=("ip", "netns", "exec", node), GLOO_SOCKET_IFNAME="eth0"
    )


def wait_for_step(log_dir: Path, step: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while f"step {step}:" not in read_rank(log_dir, 0):
        assert time.monotonic() < deadline, read_rank(log_dir, 0)
        time.sleep(0.1)


def test_two_nodes(tmp_path: Path, nodes: list[str], undisturbed: str) -> None:
    folders = [tmp_path / node for node in nodes]
    processes = [
        start_node(node, number, folder, ["--timeout", "60"])
        for number, (node, folder) in enumerate(zip(nodes, folders, strict=True), start=1)
    ]
    for process, folder in zip(processes, folders, strict=True):
        job = finish_ranks(process, folder, 1, 120).check()
        assert job.ranks[0].splitlines()[-STEPS - 1 :] == undisturbed.splitlines()[-STEPS - 1 :]


def test_a_node_that_is_cut_off(tmp_path: Path, nodes: list[str]) -> None:
    folders = [tmp_path / node for node in nodes]
    arguments = ["--steps", "1000", "--pause", "0.2", "--timeout", "5"]
    processes = [
        start_node(node, number, folder, arguments)
        for number, (node, folder) in enumerate(zip(nodes, folders, strict=True), start=1)
    ]
    try:
        wait_for_step(folders[0], 3)
        ip("-n", nodes[1], "link", "set", "eth0", "down")
        cut = time.monotonic()
        while "RankFailure" not in read_rank(folders[0], 0) + read_rank(folders[1], 0):
            assert time.monotonic() - cut < 40, read_rank(folders[0], 0)
            time.sleep(0.2)
        time.sleep(1)
        text = read_rank(folders[0], 0) + read_rank(folders[1], 0)
        assert "waited 5 s for the other ranks" in text
        assert "its process has ended, or its network is cut off" in text or "does not answer" in text
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
