"""Pairs of code registries for serialization tests: both in one process, or one in a second interpreter."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types
from typing import Any

import torch

from instep.engines.processes.serialization.exceptions import pack_exception, unpack_exception
from instep.engines.processes.serialization.registry import CodeRegistry, PickledValue


def script(source: str) -> Any:
    """Run a script as `__main__` and return its module. No other process can import what it defines."""
    module = types.ModuleType("__main__")
    exec(compile(source, "<script>", "exec"), module.__dict__)
    return module


class LocalChannel:
    """The registries of a parent and of a worker in one process. Tensors are copied, as on a real connection."""

    def __init__(self) -> None:
        self.parent, self.worker = CodeRegistry(is_parent=True), CodeRegistry(is_parent=False)
        self.pickle_size = 0
        """The size of the last pickle in bytes."""

    def _copy(self, payload: PickledValue) -> PickledValue:
        self.pickle_size = len(payload.body)
        return PickledValue(bytes(payload.body), [tensor.detach().clone() for tensor in payload.tensors])

    def to_worker(self, value: Any, what: str = "") -> Any:
        """Send a value to the worker and return what the worker gets."""
        return self.worker.unpack(self._copy(self.parent.pack(value, what)))

    def to_parent(self, value: Any) -> Any:
        """Send a value to the parent and return what the parent gets."""
        return self.parent.unpack(self._copy(self.worker.pack(value)))

    def send_changed_globals(self) -> bool:
        """Send the globals of the script that have changed; False if none has."""
        update = self.parent.pack_changed_globals()
        if update is not None:
            self.worker.apply_globals(*self._copy(update))
        return update is not None

    def error_to_parent(self, error: BaseException) -> BaseException:
        """Send an exception to the parent and return what the parent gets."""
        return unpack_exception(self._copy(pack_exception(error, self.worker)), self.parent)


class RemoteInterpreter:
    """A second interpreter with the same `sys.path` that calls the functions it is sent."""

    def __init__(self) -> None:
        self.registry = CodeRegistry(is_parent=True)
        code = _SERVE.format(path=sys.path)
        self._process = subprocess.Popen([sys.executable, "-I", "-c", code], stdin=-1, stdout=-1)

    def __call__(self, function: Any, *args: Any) -> Any:
        """Call a function in the other interpreter and return its result."""
        update = self.registry.pack_changed_globals()
        request = self.registry.pack((function, args))
        pickle.dump((_to_plain(update), _to_plain(request)), self._process.stdin)
        self._process.stdin.flush()
        succeeded, (body, arrays) = pickle.load(self._process.stdout)
        reply = PickledValue(body, [torch.from_numpy(array) for array in arrays])
        if succeeded:
            return self.registry.unpack(reply)
        raise unpack_exception(reply, self.registry)

    def close(self) -> None:
        """End the other interpreter."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


def _to_plain(payload: PickledValue | None) -> Any:
    """A payload as bytes and arrays, which a plain pickle can hold."""
    return payload and (payload.body, [tensor.detach().numpy() for tensor in payload.tensors])


_SERVE = """
import sys
sys.path[:] = {path!r}
import pickle, torch
from instep.engines.processes.serialization.exceptions import pack_exception
from instep.engines.processes.serialization.registry import CodeRegistry, PickledValue
registry = CodeRegistry(is_parent=False)
while True:
    try:
        update, (body, arrays) = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        if update:
            registry.apply_globals(update[0], [torch.from_numpy(array) for array in update[1]])
        function, args = registry.unpack(PickledValue(body, [torch.from_numpy(array) for array in arrays]))
        succeeded, reply = True, registry.pack(function(*args))
    except Exception as error:
        succeeded, reply = False, pack_exception(error, registry)
    tensors = [tensor.detach().numpy() for tensor in reply.tensors]
    pickle.dump((succeeded, (reply.body, tensors)), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""
