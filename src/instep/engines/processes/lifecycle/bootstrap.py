"""The script that a worker process runs before it can import instep.

Nothing imports this file, and it imports only the standard library at the top. `launch.py` starts it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any


def run_worker(fd: int, max_config_bytes: int) -> None:
    """Run the worker on the socket `fd` until it ends. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")]:
        del sys.modules["__main__"].__dict__[name]  # definitions of the parent's script are unpickled into `__main__`
    sock = socket.socket(fileno=fd)
    encoded = sock.recv(max_config_bytes)
    if not encoded:
        os._exit(0)  # the parent has already exited
    config = json.loads(encoded)
    fds = config["fds"]
    for inherited in (fd, *fds.values()):
        os.set_inheritable(inherited, False)
    _exit_with_parent(fds.get("parent"), fds["life"])
    faulthandler.enable(fds["crash"])
    faulthandler.register(signal.SIGUSR1, fds["stacks"], all_threads=True)
    status = 1
    try:
        _start_server(config, sock)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        flush_streams()
        os._exit(status)  # a regular interpreter exit could wait for threads that never end


def _exit_with_parent(parent: int | None, life: int) -> None:
    """Kill this process group when the parent exits.

    `parent` is the parent's pidfd; it works even if a process forked by the parent keeps its sockets open. `life` is a
    pipe that is never written to: when its other end closes, the kernel sends SIGKILL, even while C code holds the GIL.
    It is only the second means because a forked process may keep it open.
    """
    parent_pid, process_group = os.getppid(), os.getpid()
    poll = select.poll()
    for fd in (life, parent):
        if fd is not None:
            poll.register(fd, select.POLLIN)

    def wait_for_parent_exit() -> None:  # `WorkerProcess.python_stacks` hides this thread by its name
        while os.getppid() == parent_pid and not poll.poll(1000):
            pass
        os.killpg(process_group, signal.SIGKILL)

    threading.Thread(target=wait_for_parent_exit, name="instep-parent", daemon=True).start()
    fcntl.fcntl(life, fcntl.F_SETOWN, -process_group)
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def _start_server(config: dict[str, Any], sock: socket.socket) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = config["path"]
    sys.argv[:] = config["argv"]
    sys.setrecursionlimit(config["recursion_limit"])
    _import_package(config["package_init"])
    launch: Any = importlib.import_module("instep.engines.processes.lifecycle.launch")
    launch.CwdModuleFinder.locations.update(config["cwd_modules"])
    sys.meta_path.insert(0, launch.CwdModuleFinder)
    sys.breakpointhook = skip_breakpoint
    process_role: Any = importlib.import_module("instep.runtime.process_role")
    process_role.mark_worker()
    transport: Any = importlib.import_module("instep.engines.processes.transport.connection")
    module, _, function = config["main"].partition(":")
    main: Callable[[Any], None] = getattr(importlib.import_module(module), function)
    connection = transport.Connection(sock, config["fds"].get("parent"))
    connection.before_send = flush_streams
    connection.send("ready")
    main(connection)


def _import_package(package_init: str) -> None:
    """Import the parent's instep, even if the import path leads to another one or to none."""
    folder = os.path.dirname(package_init)
    spec = importlib.util.spec_from_file_location("instep", package_init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"instep cannot be imported from {package_init}")
    sys.modules["instep"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def flush_streams() -> None:
    """Flush stdout and stderr, so that output precedes the next message."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):  # no stream, or it is closed: the output is lost
            continue


def skip_breakpoint(*_: Any, **__: Any) -> None:
    """The `sys.breakpointhook` of workers: continue, and print a notice once unless breakpoints are disabled."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        _print_breakpoint_notice()


@cache
def _print_breakpoint_notice() -> None:
    sys.stderr.write(
        "breakpoint() is ignored in a worker process, which has no terminal; it stops in replica 0 only. "
        "To stop in every replica: DataParallel(..., engine='serial').\n"
    )
