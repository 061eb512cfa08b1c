"""Variables of the environment that are others while a group is made, and the user's own again after that."""

from __future__ import annotations

import os
from collections.abc import Mapping

from instep.locks import ProcessLock

MEETING_SECONDS = 60
"""Members that have not met by then do not come."""

FOR_NCCL: dict[str, str | None] = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_COMM_ID": None,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(MEETING_SECONDS),
}
"""What NCCL listens on is loopback, nothing else of it listens, and torch ends no process because of a group.

The last but one: torch sleeps four times as long before it lets go of a group that has failed, a minute by default.
"""


class Variables:
    """Values in force from when this is made until `put_back`; where several are, the first one's came before all."""

    def __init__(self, wanted: Mapping[str, str | None]) -> None:
        with _lock:
            for name, value in wanted.items():
                _before.setdefault(name, os.environ.get(name))
                _set(name, value)
            _in_force.append(self)

    def put_back(self) -> None:
        """The environment is the user's own again, unless another one is in force."""
        with _lock:
            if self in _in_force:
                _in_force.remove(self)
            if not _in_force:
                while _before:
                    _set(*_before.popitem())


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _forget() -> None:
    _in_force.clear()
    while _before:
        _set(*_before.popitem())


_in_force: list[Variables] = []
_before: dict[str, str | None] = {}
_lock = ProcessLock(_forget)
