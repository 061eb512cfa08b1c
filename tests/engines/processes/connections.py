"""Two ends of a line for the tests of what crosses it: in one process, and with a second interpreter."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types
from typing import Any

import torch

from instep.engines.processes.serialization.exceptions import pack_exception, unpack_exception
from instep.engines.processes.serialization.registry import CodeRegistry, Payload


def script(source: str) -> Any:
    """What a script defines: code that no other process could import."""
    module = types.ModuleType("__main__")
    exec(compile(source, "<script>", "exec"), module.__dict__)
    return module


class Line:
    """Both ends in one process. Tensors are copied, as they are on a real line."""

    def __init__(self) -> None:
        self.home, self.away = CodeRegistry(is_parent=True), CodeRegistry(is_parent=False)
        self.bytes = 0
        """The size of the last pickle."""

    def _carry(self, parcel: Payload) -> Payload:
        self.bytes = len(parcel.body)
        return Payload(bytes(parcel.body), [tensor.detach().clone() for tensor in parcel.tensors])

    def there(self, value: Any, what: str = "") -> Any:
        """A value as the worker has it."""
        return self.away.unpack(self._carry(self.home.pack(value, what)))

    def back(self, value: Any) -> Any:
        """A value of the worker as home has it."""
        return self.home.unpack(self._carry(self.away.pack(value)))

    def follow(self) -> bool:
        """Send what has changed in the script; False if nothing has."""
        update = self.home.pack_changed_globals()
        if update is not None:
            self.away.apply_globals(*self._carry(update))
        return update is not None

    def raise_back(self, error: BaseException) -> BaseException:
        """An exception of the worker as home has it."""
        return unpack_exception(self._carry(pack_exception(error, self.away)), self.home)


class Apart:
    """The other end is a second interpreter with the same `sys.path`; it calls what it is sent."""

    def __init__(self) -> None:
        self.home = CodeRegistry(is_parent=True)
        code = _SERVE.format(path=sys.path)
        self._process = subprocess.Popen([sys.executable, "-I", "-c", code], stdin=-1, stdout=-1)

    def __call__(self, function: Any, *args: Any) -> Any:
        """What a call gives there."""
        update = self.home.pack_changed_globals()
        parcel = self.home.pack((function, args))
        pickle.dump((_plain(update), _plain(parcel)), self._process.stdin)
        self._process.stdin.flush()
        worked, (body, arrays) = pickle.load(self._process.stdout)
        answer = Payload(body, [torch.from_numpy(array) for array in arrays])
        if worked:
            return self.home.unpack(answer)
        raise unpack_exception(answer, self.home)

    def close(self) -> None:
        """End the other interpreter."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


def _plain(parcel: Payload | None) -> Any:
    return parcel and (parcel.body, [tensor.detach().numpy() for tensor in parcel.tensors])


_SERVE = """
import sys
sys.path[:] = {path!r}
import pickle, torch
from instep.engines.processes.serialization.exceptions import pack_exception
from instep.engines.processes.serialization.registry import CodeRegistry, Payload
registry = CodeRegistry(is_parent=False)
while True:
    try:
        update, (body, arrays) = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        if update:
            registry.apply_globals(update[0], [torch.from_numpy(array) for array in update[1]])
        function, args = registry.unpack(Payload(body, [torch.from_numpy(array) for array in arrays]))
        worked, answer = True, registry.pack(function(*args))
    except Exception as error:
        worked, answer = False, pack_exception(error, registry)
    tensors = [tensor.detach().numpy() for tensor in answer.tensors]
    pickle.dump((worked, (answer.body, tensors)), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""
