"""What workers run in the tests: one message after the other, each doing what it is called."""

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


def obey(line: Connection) -> None:
    while (message := line.receive()) is not None and message.kind != "stop":
        answer = DEEDS[message.kind](message)
        line.send("done", message.call_id, answer or b"", message.tensors)


def say(message: Message) -> None:
    print(message.body.decode(), end="")
    print("and more", file=sys.stderr)


def open_files() -> list[str]:
    """What this process holds open."""
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(name) for name in names if os.path.lexists(name)]


def report(_: Message) -> bytes:
    import lies_in_the_working_folder

    try:
        WorkerPool([torch.device("cpu")] * 2)
        refused = ""
    except EngineError as error:
        refused = str(error)
    values = {
        "path": sys.path,
        "random": random.__file__,
        "local": lies_in_the_working_folder.__file__,
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
        ctypes.PyDLL(None).sleep(60)  # in native code, and no other Python thread can run


DEEDS: dict[str, Callable[[Message], bytes | None]] = {
    "echo": lambda message: message.body,
    **{deed.__name__: deed for deed in (say, report, crash, hang)},
}
