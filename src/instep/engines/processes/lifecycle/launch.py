"""The parent's side of starting a worker: command line, configuration and script environment.

`bootstrap.py` is the other side. A worker's interpreter starts isolated (`-I`), so neither the working directory nor an
environment variable decides what it imports. The parent's import path is set afterwards, with entries relative to the
working directory last.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.machinery import PathFinder
from typing import Any, ClassVar

MAX_CONFIG_BYTES = 128 * 1024
"""Maximum size of the encoded configuration."""
NATIVE_ENVIRONMENT = {"ONEDNN_JIT_PROFILE": "0"}
"""Variables for native libraries in a worker, unless the user has set them.

By default, oneDNN may leave a profiling file in /tmp for each process.
"""

_BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")
_LOAD_SCRIPT = (
    "import sys; script = {'__name__': 'instep_bootstrap'}; "
    "exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'), script); "
    "script['run_worker'](int(sys.argv[2]), int(sys.argv[3]))"
)


def worker_command(fd: int, name: str) -> list[str]:
    """The command line of a worker that inherits the socket `fd`. The last word is for process listings only."""
    arguments = [_BOOTSTRAP, str(fd), str(MAX_CONFIG_BYTES), f"instep:{name}"]
    return [sys.executable, *_interpreter_options(), "-c", _LOAD_SCRIPT, *arguments]


def _interpreter_options() -> list[str]:
    """Isolation, and those options of this interpreter that change what code does."""
    options = ["-I", *["-O"] * sys.flags.optimize, *(f"-W{option}" for option in sys.warnoptions)]
    if sys.flags.dont_write_bytecode:
        options.append("-B")
    if sys.flags.utf8_mode:
        options += ["-X", "utf8"]
    return options


def encode_config(main: str, package_init: str, fds: dict[str, int]) -> bytes:
    """The configuration that a worker reads before it can import anything."""
    config = {
        "path": worker_import_path(sys.path, os.getcwd()),
        "cwd_modules": modules_from_cwd(sys.path, os.getcwd()),
        "package_init": package_init,
        "argv": sys.argv[:1],
        "recursion_limit": sys.getrecursionlimit(),
        "main": main,
        "fds": fds,
    }
    return json.dumps(config).encode("ascii")


def worker_import_path(path: list[str], cwd: str) -> list[str]:
    """`path` with relative entries made absolute and moved to the end.

    A file such as `random.py` in the working directory must not shadow a library module in the worker.
    """
    return [*(entry for entry in path if os.path.isabs(entry)), *_cwd_entries(path, cwd)]


def _cwd_entries(path: list[str], cwd: str) -> list[str]:
    """The relative entries of an import path, made absolute."""
    entries = (os.path.normpath(os.path.join(cwd, entry)) for entry in path if not os.path.isabs(entry))
    return list(dict.fromkeys(entries))


def modules_from_cwd(path: list[str], cwd: str) -> dict[str, str]:
    """Top-level modules that this process imported through relative entries of `path`, and their directories.

    The worker imports them from the same directories, even if a library has the same name.
    """
    relative = set(_cwd_entries(path, cwd))
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()) if relative else ():
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." in name or not isinstance(origin, str):
            continue
        directory, file = os.path.split(origin)
        directory = os.path.dirname(directory) if file == "__init__.py" else directory
        if directory in relative:
            found[name] = directory
    return found


class CwdModuleFinder:
    """Import finder of a worker for the modules that its parent imported from the working directory."""

    locations: ClassVar[dict[str, str]] = {}
    """Directories by module name."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        directory = cls.locations.get(name) if path is None else None
        return None if directory is None else PathFinder.find_spec(name, [directory], target)


def script_environment() -> tuple[str, list[str], Any, int]:
    """The script's working directory, import path, environment and number of imported modules, to detect changes.

    The environment is not decoded, which is faster to compare.
    """
    try:
        cwd = os.getcwd()
    except OSError:  # it was removed
        cwd = os.sep
    return cwd, sys.path, getattr(os.environ, "_data", os.environ), len(sys.modules)


def apply_script_environment(cwd: str, path: list[str], locations: dict[str, str], variables: dict[str, str]) -> None:
    """Adopt the script's working directory, import path, modules of the working directory and environment variables.

    `NATIVE_ENVIRONMENT` is set for native code only: `os.environ` has exactly the script's variables.
    """
    sys.path[:] = path
    CwdModuleFinder.locations.clear()
    CwdModuleFinder.locations.update(locations)
    os.chdir(cwd)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    for name in NATIVE_ENVIRONMENT.keys() - variables.keys():
        os.putenv(name, NATIVE_ENVIRONMENT[name])
    importlib.invalidate_caches()
