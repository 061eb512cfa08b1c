"""The main function of workers in the tests: it handles one message after the other by its kind."""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from collections.abc import Callable

import torch

from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.transport.connection import Connection, Message
from instep.errors import EngineError
from instep.runtime.process_role import inside_worker


def serve(connection: Connection) -> None:
    while (message := connection.receive()) is not None and message.kind != "stop":
        reply = HANDLERS[message.kind](message)
        connection.send("done", message.call_id, reply or b"", message.tensors)


def say(message: Message) -> None:
    print(message.body.decode(), end="")
    print("and more", file=sys.stderr)


def open_files() -> list[str]:
    """The targets of the open file descriptors of this process."""
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(name) for name in names if os.path.lexists(name)]


def report(_: Message) -> bytes:
    import in_the_working_directory

    try:
        WorkerPool([torch.device("cpu")] * 2)
        refused = ""
    except EngineError as error:
        refused = str(error)
    values = {
        "path": sys.path,
        "random": random.__file__,
        "local": in_the_working_directory.__file__,
        "main": sorted(vars(sys.modules["__main__"])),
        "session": os.getsid(0),
        "inside": inside_worker(),
        "refused": refused,
        "fds": open_files(),
    }
    return json.dumps(values).encode()


def crash(_: Message) -> None:
    ctypes.string_at(0)


def hang(_: Message) -> None:
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(60)  # native code that holds the GIL


HANDLERS: dict[str, Callable[[Message], bytes | None]] = {
    "echo": lambda message: message.body,
    **{handler.__name__: handler for handler in (say, report, crash, hang)},
}
