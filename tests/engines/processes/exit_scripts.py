"""A script that ends in several ways, each in a forked child, and prints whether workers outlive the child."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch

from instep.engines.processes.lifecycle import process
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.lifecycle.process import WorkerProcess

CASES = ("error", "exit", "term", "quit", "kill", "hang", "early")
SECONDS = 2.0


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def answers(worker: WorkerProcess) -> bool:
    worker.connection.send("echo", 1, b"still there")
    message = worker.connection.receive(10)
    return message is not None and message.body == b"still there"


def end_process(case: str, worker: WorkerProcess) -> None:
    if case == "error":
        raise RuntimeError("an error in the script")
    if case == "exit":
        sys.exit(5)
    if case == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if case == "quit":
        os._exit(6)
    if case == "kill" and not ctypes.PyDLL(None).fork():  # a child in which no fork hook has run
        os.closerange(0, 3)
        time.sleep(SECONDS + 8)
        os._exit(0)
    if case == "hang":
        worker.connection.send("hang")
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def run() -> None:
    process.ENTRY_POINT = "entry_points:serve"
    pool = WorkerPool([torch.device("cpu")] * 2)
    worker_of_parent = pool.get(1)
    torch.set_num_threads(1)
    children: dict[str, tuple[int, int]] = {}
    for case in CASES:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            if case in ("kill", "hang"):
                worker = pool.get(1)
                assert answers(worker)
            else:
                worker = WorkerProcess("replica 1 on cpu")
            assert worker.pid != worker_of_parent.pid
            os.write(write, b"%d" % worker.pid)
            os.close(write)
            end_process(case, worker)
            break
        os.close(write)
        children[case] = child, read
    else:
        for case, (child, read) in children.items():
            started = int(os.read(read, 20))
            _, status = os.waitpid(child, 0)
            deadline = time.monotonic() + SECONDS
            while is_alive(started) and time.monotonic() < deadline:
                time.sleep(0.01)
            print(case, os.waitstatus_to_exitcode(status), "left" if is_alive(started) else "gone", flush=True)
        print("parent", "answers" if answers(worker_of_parent) else "is silent", flush=True)
        print(worker_of_parent.pid, flush=True)  # then the script ends normally


if __name__ == "__main__":
    run()
