"""The parent's side of starting a worker: command line, configuration and script environment."""

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
from importlib.machinery import PathFinder
from typing import Any, ClassVar

MAX_CONFIG_BYTES = 128 * 1024
"""Bytes of the first frame at most."""
NATIVE_ENVIRONMENT = {"ONEDNN_JIT_PROFILE": "0"}
"""For native code of a worker, unless the user's environment says otherwise.

oneDNN may leave a file in /tmp for each process, which tells a profiler what it has compiled.
"""

_LOAD_SCRIPT = (
    "import sys; boot = {'__name__': 'instep_boot'}; "
    "exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'), boot); boot['boot'](int(sys.argv[2]))"
)


def worker_command(fd: int, name: str) -> list[str]:
    """The words that start a worker whose line is the inherited descriptor; the last is for whoever lists processes."""
    return [
        sys.executable,
        *_interpreter_options(),
        "-c",
        _LOAD_SCRIPT,
        os.path.abspath(__file__),
        str(fd),
        f"instep:{name}",
    ]


def _interpreter_options() -> list[str]:
    """Isolation, and what was asked of the parent's interpreter that changes what code does."""
    options = ["-I", *["-O"] * sys.flags.optimize, *(f"-W{option}" for option in sys.warnoptions)]
    if sys.flags.dont_write_bytecode:
        options.append("-B")
    if sys.flags.utf8_mode:
        options += ["-X", "utf8"]
    return options


def encode_config(main: str, instep: str, fds: dict[str, int]) -> bytes:
    """What a worker has to know before it can import anything."""
    said = {
        "path": worker_import_path(sys.path, os.getcwd()),
        "local": modules_from_cwd(sys.path, os.getcwd()),
        "instep": instep,
        "argv": sys.argv[:1],
        "recursion": sys.getrecursionlimit(),
        "main": main,
        "fds": fds,
    }
    return json.dumps(said).encode("ascii")


def worker_import_path(path: list[str], folder: str) -> list[str]:
    """An import path for another process, with what depends on the working folder last.

    An empty or relative entry means the folder that one happens to be in: a `random.py` or a `numpy.py` that lies there
    must not become the worker's.
    """
    return [*(entry for entry in path if os.path.isabs(entry)), *_cwd_entries(path, folder)]


def _cwd_entries(path: list[str], folder: str) -> list[str]:
    """The entries of an import path that depend on the working folder."""
    entries = (os.path.normpath(os.path.join(folder, entry)) for entry in path if not os.path.isabs(entry))
    return list(dict.fromkeys(entries))


def modules_from_cwd(path: list[str], folder: str) -> dict[str, str]:
    """By name: the modules that this process has imported from there, and where exactly they lie.

    These the worker takes from there too, whatever else has their names.
    """
    local = set(_cwd_entries(path, folder))
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()) if local else ():
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." in name or not isinstance(origin, str):
            continue
        entry, file = os.path.split(origin)
        entry = os.path.dirname(entry) if file == "__init__.py" else entry
        if entry in local:
            found[name] = entry
    return found


class CwdModuleFinder:
    """Finds in a worker what its parent has imported from the working folder."""

    locations: ClassVar[dict[str, str]] = {}
    """By the name of a module: where it lies."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """What an import asks every finder."""
        entry = cls.locations.get(name) if path is None else None
        return None if entry is None else PathFinder.find_spec(name, [entry], target)


def apply_script_environment(folder: str, path: list[str], entries: dict[str, str], variables: dict[str, str]) -> None:
    """Be where the script is now: its folder, its import path, what it imported from there, and its environment.

    What only native code is to read is not in `os.environ`: `forward` finds the script's own variables there.
    """
    sys.path[:] = path
    CwdModuleFinder.locations.clear()
    CwdModuleFinder.locations.update(entries)
    os.chdir(folder)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    for name in NATIVE_ENVIRONMENT.keys() - variables.keys():
        os.putenv(name, NATIVE_ENVIRONMENT[name])
    importlib.invalidate_caches()


def boot(fd: int) -> None:
    """All that a worker does, from its first moment to its last. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it decides what becomes of a call
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")]:
        del sys.modules["__main__"].__dict__[name]  # whatever the parent's script defines comes to an empty room
    sock = socket.socket(fileno=fd)
    heard = sock.recv(MAX_CONFIG_BYTES)
    if not heard:
        os._exit(0)  # the parent has ended already
    said = json.loads(heard)
    for inherited in (fd, *said["fds"].values()):
        os.set_inheritable(inherited, False)
    _exit_with_parent(said["fds"].get("parent"), said["fds"]["life"])
    faulthandler.enable(said["fds"]["crash"])
    faulthandler.register(signal.SIGUSR1, said["fds"]["stacks"], all_threads=True)
    status = 1
    try:
        _start_server(said, sock)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        flush_streams()
        os._exit(status)  # an orderly end of the interpreter could wait for threads that never end


def _exit_with_parent(parent: int | None, life: int) -> None:
    """End with the parent, however it ends and whatever is being done here, and what was started here too.

    The parent's pidfd tells of its end also where a process that it forked holds its sockets. The other descriptor is a
    pipe into which nothing is ever written: when the parent is gone the kernel itself ends this process, though it may
    be in C code that lets no Python thread run. It is second, because a forked process may hold it open.
    """
    born_to, own_group = os.getppid(), os.getpid()
    watch = select.poll()
    for fd in (life, parent):
        if fd is not None:
            watch.register(fd, select.POLLIN)

    def until_it_ends() -> None:
        while os.getppid() == born_to and not watch.poll(1000):
            pass
        os.killpg(own_group, signal.SIGKILL)

    threading.Thread(target=until_it_ends, name="instep-parent", daemon=True).start()
    fcntl.fcntl(life, fcntl.F_SETOWN, -own_group)
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def _start_server(said: dict[str, Any], sock: socket.socket) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = said["path"]
    sys.argv[:] = said["argv"]
    sys.setrecursionlimit(said["recursion"])
    _import_package(said["instep"])
    local: Any = importlib.import_module(
        "instep.engines.processes.lifecycle.launch"
    ).CwdModuleFinder  # not this file's: it is run by itself
    local.locations.update(said["local"])
    sys.meta_path.insert(0, local)
    wire: Any = importlib.import_module("instep.engines.processes.transport.connection")
    hands: Any = importlib.import_module("instep.engines.processes.lifecycle.pool")
    hands.enter_worker()
    module, _, function = said["main"].partition(":")
    main: Callable[[Any], None] = getattr(importlib.import_module(module), function)
    line = wire.Connection(sock, said["fds"].get("parent"))
    line.before_send = flush_streams
    line.send("ready")
    main(line)


def _import_package(file: str) -> None:
    """The parent's own instep, also where the import path would find another or none."""
    found = importlib.util.find_spec("instep")
    if found is not None and found.origin is not None and os.path.realpath(found.origin) == os.path.realpath(file):
        importlib.import_module("instep")
        return
    spec = importlib.util.spec_from_file_location("instep", file, submodule_search_locations=[os.path.dirname(file)])
    if spec is None or spec.loader is None:
        raise ImportError(f"instep cannot be imported from {file}")
    sys.modules["instep"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def flush_streams() -> None:
    """Let all that was printed so far out, so that it lies before what is sent next."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):  # none, closed, or nobody reads: what was printed has no place
            continue
