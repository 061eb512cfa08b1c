"""Worker processes start isolated, print through this process, and end with it."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instep.engines.processes.lifecycle import launch, output, pool, process
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.transport.connection import ConnectionClosed, Message
from instep.errors import EngineError
from instep.runtime.process_role import inside_worker

HERE = Path(__file__).parents[1]
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Three workers, started in a directory with files named like installed modules."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("random", "numpy", "torch", "typing_extensions", "cloudpickle", "sympy"):
        (folder / f"{name}.py").write_text("raise SystemExit('hijacked')")
    (folder / "in_the_working_directory.py").write_text("")
    pool.stop_all()  # workers of other tests have another entry point
    workers = WorkerPool([CPU] * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "ENTRY_POINT", "entry_points:serve")
        patch.setattr(sys, "path", ["", *sys.path, str(HERE)])
        patch.chdir(folder)
        for index in range(1, 4):
            workers.get(index)
    yield workers
    workers.close()


def ask(worker: WorkerProcess, kind: str, body: bytes = b"", *tensors: torch.Tensor) -> Message:
    worker.connection.send(kind, 1, body, tensors)
    message = worker.connection.receive(20)
    assert message is not None
    return message


def test_a_worker_replies_and_ignores_ctrl_c(team: WorkerPool) -> None:
    worker = team.get(1)
    assert worker.name == "replica 1 on cpu"
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGINT)
    answer = ask(worker, "echo", b"hello", torch.arange(3000))
    assert answer.body == b"hello"
    assert torch.equal(answer.tensors[0], torch.arange(3000))


def test_a_worker_starts_isolated(team: WorkerPool, tmp_path: Path) -> None:
    worker = team.get(1)
    report = json.loads(ask(worker, "report").body)
    assert Path(report["random"]).parent == Path(os.__file__).parent
    assert Path(report["local"]).name == "in_the_working_directory.py"
    assert report["path"].index(str(Path(report["local"]).parent)) > report["path"].index(str(Path(os.__file__).parent))
    assert [entry for entry in report["path"] if entry in sys.path] == [entry for entry in sys.path if entry]
    assert all(name.startswith("__") for name in report["main"])
    assert report["session"] == worker.pid
    assert report["inside"]
    assert "cannot start workers of its own" in report["refused"]
    assert sum("socket:" in fd for fd in report["fds"]) == 1
    assert not inside_worker()


def test_the_working_directory_comes_last_in_the_import_path() -> None:
    library = str(Path(os.__file__).parent)
    path = ["", "/a", library, f"{library}/lib-dynload", "/site", "src", ""]
    wanted = ["/a", library, f"{library}/lib-dynload", "/site", "/here", "/here/src"]
    assert launch.worker_import_path(path, "/here") == wanted
    assert launch.worker_import_path(["/a", library], "/here") == ["/a", library]


def test_modules_imported_from_the_working_directory_are_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sympy.py").write_text("mine = True")  # the name of something that is installed
    (tmp_path / "wholly_mine").mkdir()
    (tmp_path / "wholly_mine" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "sympy", raising=False)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    import sympy
    import wholly_mine  # noqa: F401

    assert sympy.mine
    found = launch.modules_from_cwd(sys.path, str(tmp_path))
    assert found == {"sympy": str(tmp_path), "wholly_mine": str(tmp_path)}
    monkeypatch.setattr(launch.CwdModuleFinder, "locations", found)
    assert launch.CwdModuleFinder.find_spec("sympy").origin == str(tmp_path / "sympy.py")
    assert launch.CwdModuleFinder.find_spec("numpy") is None
    assert launch.CwdModuleFinder.find_spec("sympy.core", ["elsewhere"]) is None
    assert launch.modules_from_cwd(sys.path[1:], str(tmp_path)) == {}


def test_output_before_a_reply_is_printed_before_it(team: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = team.get(1), team.get(2)
    for turn in range(5):
        ask(first, "say", f"line {turn}\nnot a whole one".encode())
        ask(second, "say", "été\n".encode())
        output.flush_output()
        shown = capsys.readouterr()
        lines = shown.out.splitlines()
        assert sorted(lines) == [
            f"[replica 1 on cpu] line {turn}",
            "[replica 1 on cpu] not a whole one",
            "[replica 2 on cpu] été",
        ]
        assert lines.index("[replica 1 on cpu] not a whole one") > lines.index(f"[replica 1 on cpu] line {turn}")
        assert sorted(shown.err.splitlines()) == [f"[replica {n} on cpu] and more" for n in (1, 2)]


def test_output_is_printed_while_the_worker_runs(team: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    worker = team.get(1)
    text = "".join(f"{number}\n" for number in range(40_000))  # more than a pipe holds
    worker.connection.send("say", 1, text.encode())
    deadline, shown = time.monotonic() + 20, ""
    while shown.count("\n") < 40_000 and time.monotonic() < deadline:
        time.sleep(0.01)
        shown += capsys.readouterr().out
    assert shown == "".join(f"[replica 1 on cpu] {number}\n" for number in range(40_000))
    assert worker.connection.receive(10) is not None


def test_pools_share_workers_until_the_last_is_closed(team: WorkerPool) -> None:
    other = WorkerPool([torch.device("meta"), CPU, CPU])
    assert other.get(2) is team.get(2)
    assert other.get(1) is team.get(1)
    other.close()
    assert team.get(1).is_alive()
    with pytest.raises(EngineError, match="closed"):
        other.get(1)
    with pytest.raises(IndexError):
        team.get(0)


def test_a_forked_child_does_not_affect_the_workers(team: WorkerPool) -> None:
    worker = team.get(1)
    ask(worker, "echo", b"", torch.zeros(10_000))
    ring = worker.connection._ring_writer._ring
    assert ring is not None
    ring_inode = os.fstat(ring.memory.fd).st_ino
    del ring
    child = os.fork()
    if not child:
        status = 1
        try:
            for use in (
                worker.is_alive,
                worker.python_stacks,
                lambda: worker.connection.send("stop"),
                lambda: worker.connection.receive(0),
            ):
                with pytest.raises(EngineError, match="forked"):
                    use()
            output.flush_output()
            worker.request_stop()
            worker.kill()
            team.close()
            pool.stop_all()
            descriptors = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            inodes = {os.stat(fd).st_ino for fd in descriptors if os.path.exists(fd)}
            assert ring_inode not in inodes
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(worker, "echo", b"still there").body == b"still there"


def test_python_stacks_of_a_stuck_worker(team: WorkerPool) -> None:
    worker = team.get(1)
    assert "in receive" in worker.python_stacks()
    stuck = team.get(2)
    stuck.connection.send("hang")
    time.sleep(0.2)
    for _ in range(2):
        assert "in hang" in stuck.python_stacks()
    began = time.monotonic()
    pool.stop_workers([stuck])
    assert time.monotonic() - began < 2.5
    assert stuck.exit_reason() == "killed by this process"


def test_exit_reason_of_a_crashed_worker(team: WorkerPool) -> None:
    worker = team.get(3)
    worker.connection.send("crash")
    for _ in range(2):
        with pytest.raises(ConnectionClosed):
            worker.connection.receive(20)
    reason = worker.exit_reason()
    assert reason.startswith("segmentation fault (SIGSEGV), at:\n")
    assert "entry_points.py" in reason
    assert "in crash" in reason
    assert not worker.is_alive()
    assert "has exited: segmentation fault" in worker.python_stacks()


def test_a_dead_worker_is_replaced_for_all_pools(team: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENTRY_POINT", "entry_points:serve")
    monkeypatch.setattr(sys, "path", [*sys.path, str(HERE)])
    other = WorkerPool([CPU] * 2)
    old = team.get(1)
    assert other.get(1) is old
    os.kill(old.pid, signal.SIGKILL)
    assert "out-of-memory killer" in old.exit_reason()
    team.kill(1)
    new = team.get(1)
    assert new is not old
    assert ask(new, "echo", b"new").body == b"new"
    other.kill(1)  # it still holds the dead worker, not the new one
    assert other.get(1) is new
    assert team.get(1) is new
    team.close()
    other.close()
    assert not process.running_workers()


def test_a_failed_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    # instep cannot be imported. That fails before torch is imported, which keeps this test fast.
    monkeypatch.setattr(process, "_PACKAGE_INIT", HERE / "nowhere" / "__init__.py")
    worker = WorkerProcess("replica 1 on cpu")
    with pytest.raises(
        ConnectionClosed, match=r"(?s)did not start: exited with status 1 after printing:.*No such file"
    ):
        worker.wait_ready(time.monotonic() + 20)
    worker.kill()


@pytest.mark.parametrize("timeout", [1.0, float("inf")])
def test_a_worker_that_hangs_at_start_times_out(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    def start(name: str) -> WorkerProcess:
        worker = WorkerProcess(name)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    monkeypatch.setattr(pool, "WorkerProcess", start)
    monkeypatch.setattr(pool, "_workers", {})
    for name, seconds in {
        "MIN_START_SECONDS": 0.5,
        "_NOTICE_SECONDS": 0.1,
        "_WARN_SECONDS": 0.3,
        "_MAX_START_SECONDS": 1.5,
    }.items():
        monkeypatch.setattr(pool, name, seconds)
    team = WorkerPool([CPU] * 2)
    begun = time.monotonic()
    with (
        pytest.warns(UserWarning, match=r"replica 1 on cpu has not started after 0 s"),
        pytest.raises(pool.StartTimeout, match=rf"did not start within {min(timeout, 1.5):.0f} s.*\n.*\n.*timeout="),
    ):
        team.get(1, timeout)
    assert time.monotonic() - begun < 10
    worker = team.last_worker(1)
    team.kill(1)
    assert worker is not None
    assert not worker.is_alive()
    team.close()


def test_starting_and_stopping_leaks_nothing() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(50):
        worker = WorkerProcess("replica 1 on cpu")
        pool.stop_workers([worker])
    assert count() == before
    assert not process.running_workers()


def start_with_descriptors_below(limit: int) -> WorkerProcess | EngineError:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        return WorkerProcess("replica 1 on cpu")
    except EngineError as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_file_descriptors_is_an_error_without_leaks() -> None:
    before = os.listdir("/proc/self/fd")
    first = next(fd for fd in itertools.count() if str(fd) not in before)
    for limit in itertools.count(first):
        result = start_with_descriptors_below(limit)
        if isinstance(result, WorkerProcess):
            result.kill()
            break
        assert isinstance(result.__cause__, OSError)
        assert re.match(r"cannot start a worker process for replica 1 on cpu: .*\n.*`ulimit -n`", str(result))
        assert os.listdir("/proc/self/fd") == before
    assert limit > first
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.slow
def test_workers_end_with_the_script() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    script = subprocess.run(
        [sys.executable, HERE / "exit_scripts.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    *lines, worker = script.stdout.splitlines()
    assert lines == [
        "error 1 gone",
        "exit 5 gone",
        "term -15 gone",
        "quit 6 gone",
        "kill -9 gone",
        "hang -9 gone",
        "early -9 gone",
        "parent answers",
    ], script.stderr
    assert script.returncode == 0
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize(
    ("quiet", "terminal", "printed"),
    [
        (None, True, "instep: starting 3 worker processes (importing torch)\n"),
        ("1", True, ""),
        (None, False, ""),
    ],
)
def test_a_slow_start_prints_one_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: str | None, terminal: bool, printed: str
) -> None:
    class Slow:
        """A worker that is ready at the second wait."""

        def __init__(self) -> None:
            self.waits: list[float] = []

        def wait_ready(self, deadline: float) -> bool:
            self.waits.append(deadline - time.monotonic())
            return len(self.waits) > 1

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("INSTEP_QUIET", quiet) if quiet else monkeypatch.delenv("INSTEP_QUIET", raising=False)
    team, slow = WorkerPool([CPU] * 4), [Slow(), Slow()]
    for worker in slow:
        team._wait_ready(worker, 10.0)  # type: ignore[arg-type]
    assert capsys.readouterr().err == printed
    assert all(worker.waits[0] < 2 for worker in slow)


def test_all_workers_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    team = WorkerPool([CPU] * 4)
    monkeypatch.setattr(team, "_wait_ready", lambda worker, seconds: None)
    team.get(1)
    assert len(process.running_workers()) == 3
    team.close()


def test_workers_of_a_freed_pool_end_when_another_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_workers", {})  # other tests may use the existing workers
    monkeypatch.setattr(WorkerPool, "_wait_ready", lambda *_: None)
    first, dropped, last = WorkerPool([CPU] * 2), WorkerPool([CPU] * 4), WorkerPool([CPU] * 3)
    workers = [dropped.get(index) for index in (1, 2, 3)]
    assert first.get(1) is workers[0]
    del dropped
    assert all(worker.is_alive() for worker in workers)
    assert [last.get(index) for index in (1, 2)] == workers[:2]  # they are available to other pools
    first.close()
    assert [worker.is_alive() for worker in workers] == [True, True, False]
    del last
    WorkerPool([CPU] * 2).close()  # it had no workers
    assert not any(worker.is_alive() for worker in workers)
