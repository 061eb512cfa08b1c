"""The pickler and the unpickler of a line.

Tensors and large buffers stay out of the pickle; functions and classes that cross by value are numbered.
What the unpickler has to look up or make with what it knows is written as the name of a `Verb`, which it answers with
one of its own methods.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import cloudpickle
import torch
from torch import Tensor, nn

from instep.engines.processes.by_value import (
    by_name,
    class_parts,
    importable,
    names_read,
    place_of,
    submodules_read,
    variable_at,
)
from instep.engines.processes.cannot import CannotCross
from instep.engines.processes.closures import look_at
from instep.engines.processes.reducers import contents, has_plain_memory, reducer_for, set_attributes, settled
from instep.engines.processes.spaces import ABSENT, Seen, Spaces, attributes_of, seen
from instep.pieces import is_jagged, jagged_parts, make_jagged

_IN_BAND = 4096


class Verb:
    """A word in a pickle that the unpickler of the other side answers with one of its own methods."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name

    def __call__(self, *_: Any) -> Any:
        raise CannotCross("this was written for the other side of a line and means nothing elsewhere")


KNOWN = Verb("KNOWN")
TENSOR = Verb("TENSOR")
DEFINE = Verb("DEFINE")
FILL = Verb("FILL")
FUNCTION = Verb("FUNCTION")
FILL_FUNCTION = Verb("FILL_FUNCTION")
VARIABLE = Verb("VARIABLE")
MODULE = Verb("MODULE")
FILL_MODULE = Verb("FILL_MODULE")
DELETED = Verb("DELETED")
"""Stands for the value of a name that is no longer there."""


class Register(Protocol):
    """What a side knows: the numbered functions and classes, and the globals."""

    home: bool
    spaces: Spaces
    left_out: dict[tuple[int, str], str]

    def number(self, thing: Any) -> int | None: ...
    def next_number(self) -> int: ...
    def crossed(self, number: int) -> bool: ...
    def theirs(self, number: int) -> bool: ...
    def thing(self, number: int) -> Any: ...
    def has(self, number: int) -> bool: ...


class _Packing:
    """How one value is pickled. What it defines counts as sent only when the whole has been pickled."""

    dispatch_table: Any

    def __init__(self, register: Register) -> None:
        self.file = io.BytesIO()
        self.dispatch_table = _dispatch_table(len(copyreg.dispatch_table))
        self.buffers: list[Tensor] = []
        # Not a method of this object, which would hold itself then, and all that it has packed.
        keep_buffer = partial(_keep_buffer, self.buffers)
        super().__init__(self.file, protocol=5, buffer_callback=keep_buffer)  # type: ignore[call-arg]
        self.register = register
        self.tensors: list[Tensor] = []
        self.defined: dict[int, Any] = {}
        self.attributes: dict[int, dict[str, Seen]] = {}
        self.told: dict[tuple[int, str], Seen] = {}
        self._spaces_told: set[int] = set()
        self._cells: dict[int, Any] = {}
        self.variables: list[tuple[types.CellType, Seen]] = []

    def reducer_override(self, thing: Any) -> Any:
        """How anything but plain values and containers is written; the pickle module asks this first."""
        kind = type(thing)
        if issubclass(kind, Tensor):
            return self._tensor(thing)
        if issubclass(kind, type):
            return self._class(thing)
        if kind is types.FunctionType:
            return self._function(thing)
        if kind is ContextVar:
            return self._variable(thing)
        if kind is types.CellType and id(thing) in self._cells:
            return types.CellType, ()  # what is in it goes with the function
        if issubclass(kind, types.ModuleType):
            return self._module(thing)
        reducer = reducer_for(kind)
        return NotImplemented if reducer is None else reducer(thing)

    def _tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if not has_plain_memory(tensor):
            with_graph = tensor.requires_grad and is_jagged(tensor)
            return (make_jagged, jagged_parts(tensor)) if with_graph else NotImplemented
        place = len(self.tensors)
        self.tensors.append(tensor)
        own = None if kind is Tensor or kind is nn.Parameter else kind
        parameter = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
        needs = parameter is None and tensor.requires_grad
        args: tuple[Any, ...] = (place,) if own is None and parameter is None else (place, parameter, own)
        if needs:
            args = (place, parameter, own, needs)
        attributes = tensor.__dict__
        return (TENSOR, args, dict(attributes), None, None, set_attributes) if attributes else (TENSOR, args)

    def _class(self, cls: type) -> Any:
        number = self.register.number(cls)
        if number is not None and self.register.crossed(number):
            return KNOWN, (number,)
        if by_name(cls):
            return NotImplemented
        plain = cloudpickle.Pickler.reducer_override(self, cls)
        if plain is not NotImplemented and len(plain) < 6:  # a type without a name of its own, such as None's
            return plain
        number = self.register.next_number() if number is None else number
        self.defined[number] = cls
        self.attributes[number] = attributes_of(cls)
        make, args, contents, fill = class_parts(cls)
        return DEFINE, (number, make, args), (fill, contents), None, None, FILL

    def _function(self, function: types.FunctionType) -> Any:
        number = self.register.number(function)
        there = number is not None and self.register.crossed(number)
        if number is not None and there and (self.register.theirs(number) or settled(function)):
            return KNOWN, (number,)
        if by_name(function):
            return NotImplemented
        if "<" in function.__qualname__:  # made anew whenever the code around it runs: there would be no end of them
            number = 0
        else:
            number = self.register.next_number() if number is None else number
            self.defined[number] = function
        space, about, values = self._read(function.__globals__, names_read(function.__code__))
        cells = function.__closure__ or ()
        inside = []
        for cell in cells:
            if id(cell) not in self._cells:
                self._cells[id(cell)] = cell
                inside.append((cell, contents(cell)))
                self.variables.append((cell, look_at(cell)))
        slots = {
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
            "__module__": function.__module__,
            "__doc__": function.__doc__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__annotations__": function.__annotations__,
        }
        held = [function.__globals__.get(name) for name in names_read(function.__code__)]
        imports = submodules_read(function.__code__, [*held, *(value[0] for _, value in inside if value)])
        state = (slots, function.__dict__, inside, space, values, imports)
        args = (number, function.__code__, space, about, cells)
        return FUNCTION, args, state, None, None, FILL_FUNCTION

    def _variable(self, variable: ContextVar[Any]) -> Any:
        number = self.register.number(variable)
        if number is not None and self.register.crossed(number):
            return KNOWN, (number,)
        place = place_of(variable)
        if place is not None:
            return variable_at, place
        number = self.register.next_number() if number is None else number
        self.defined[number] = variable
        try:
            default = [Context().run(variable.get)]
        except LookupError:
            default = []
        return VARIABLE, (number, variable.name, default)

    def _read(self, space: dict[str, Any], names: Iterable[str]) -> tuple[int | str, dict[str, Any], dict[str, Any]]:
        """The number of a dictionary of globals, what goes along with it, and the values of names not sent before.

        The globals of a module that the other side can import go by its name: they are there.
        """
        name = str(space.get("__name__"))
        if getattr(sys.modules.get(name), "__dict__", None) is space and importable(name):
            return name, {}, {}
        spaces = self.register.spaces
        number = spaces.number(space)
        if not spaces.ours(number):
            return number, {}, {}
        about = {} if number in self._spaces_told else spaces.about(number)
        self._spaces_told.add(number)
        values = {}
        for name in names:
            if (number, name) in self.told or spaces.told(number, name):
                continue
            self.told[number, name] = seen(space.get(name, ABSENT))
            if name in space:
                reason = self.register.left_out.get((number, name))
                values[name] = space[name] if reason is None else LeftOut(reason)
        return number, about, values

    def _module(self, module: types.ModuleType) -> Any:
        if sys.modules.get(module.__name__) is module and importable(module.__name__):
            return importlib.import_module, (module.__name__,)
        if type(module) is not types.ModuleType:
            return NotImplemented
        self.register.spaces.keep_module(module)
        names = tuple(name for name in vars(module) if not name.startswith("__"))
        space, about, values = self._read(vars(module), names)
        return MODULE, (space, about), values, None, None, FILL_MODULE


def _keep_buffer(buffers: list[Tensor], buffer: pickle.PickleBuffer) -> bool:
    """Keep a large buffer out of the pickle; True leaves it in."""
    raw = buffer.raw()
    if raw.nbytes < _IN_BAND:
        return True
    buffers.append(torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8))
    return False


class Packer(_Packing, pickle.Pickler):
    """Pickles one value."""


class DeepPacker(_Packing, pickle._Pickler):
    """Pickles one value that is nested deeper than C code may go: in Python, slowly."""


@lru_cache(maxsize=1)
def _dispatch_table(_: int) -> dict[type, Any]:
    """cloudpickle's table in one piece: looking in one after another takes as long as pickling a small object."""
    return dict(cloudpickle.Pickler.dispatch_table)


class Unpacker(pickle.Unpickler):
    """Rebuilds one value. What it defines counts as known only when the whole has been rebuilt."""

    _VERBS: ClassVar = {
        "KNOWN": "_known",
        "TENSOR": "_tensor",
        "DEFINE": "_define",
        "FILL": "_fill",
        "FUNCTION": "_function",
        "FILL_FUNCTION": "_fill_function",
        "VARIABLE": "_variable",
        "MODULE": "_module",
        "FILL_MODULE": "_fill_module",
    }

    def __init__(self, register: Register, file: io.BytesIO, tensors: list[Tensor], buffers: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.register = register
        self.tensors = tensors
        self.defined: dict[int, Any] = {}
        self.received: list[tuple[int, list[str]]] = []
        self.needing: list[Tensor] = []
        """In a worker: tensors that need a gradient where they come from."""
        self.enclosed: list[Any] = []
        """In a worker: what variables of closures hold."""
        self._kept: set[int] = set()

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        if module == __name__ and name in self._VERBS:
            return getattr(self, self._VERBS[name])
        return super().find_class(module, name)

    def _known(self, number: int) -> Any:
        return self.defined[number] if number in self.defined else self.register.thing(number)

    def _tensor(
        self, place: int, parameter: bool | None = None, kind: type | None = None, needs: bool = False
    ) -> Tensor:
        made = self.tensors[place]
        if parameter is not None and not isinstance(made, kind or nn.Parameter):
            made = torch.Tensor._make_subclass(kind or nn.Parameter, made.detach(), parameter)
        elif kind is not None and not isinstance(made, kind):
            made = made.as_subclass(kind)
        if (needs or parameter) and not self.register.home:
            self.needing.append(made.requires_grad_())  # it may have been sent without
        return made

    def _define(self, number: int, make: Callable[..., type], args: tuple[Any, ...]) -> type:
        if self.register.has(number):  # it was defined before: what is here is the one that counts
            known: type = self.register.thing(number)
            self._kept.add(id(known))
            return known
        made = self.defined[number] = make(*args)
        return made

    def _fill(self, cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
        if id(cls) not in self._kept:
            fill, contents = state
            fill(cls, contents)

    def _function(
        self, number: int, code: types.CodeType, space: int | str, about: dict[str, Any], cells: tuple[Any, ...]
    ) -> types.FunctionType:
        if isinstance(space, str):
            names = vars(importlib.import_module(space))
        else:
            names = self.register.spaces.get(space, about)
        made = types.FunctionType(code, names, code.co_name, None, cells or None)
        if number:
            self.defined[number] = made
        return made

    def _fill_function(self, function: types.FunctionType, state: tuple[Any, ...]) -> None:
        slots, attributes, inside, space, values, imports = state
        for name in imports:
            importlib.import_module(name)
        if values:
            self._receive(space, values)
        for cell, held in inside:
            if held:
                cell.cell_contents = held[0]
                if not self.register.home:
                    self.enclosed.append(held[0])
        for name, value in slots.items():
            setattr(function, name, value)
        function.__dict__.update(attributes)

    def _variable(self, number: int, name: str, default: list[Any]) -> ContextVar[Any]:
        if self.register.has(number):
            known: ContextVar[Any] = self.register.thing(number)
            return known
        made: ContextVar[Any] = ContextVar(name, default=default[0]) if default else ContextVar(name)
        self.defined[number] = made
        return made

    def _module(self, space: int, about: dict[str, Any]) -> types.ModuleType:
        return self.register.spaces.module(space, about)

    def _fill_module(self, module: types.ModuleType, values: dict[str, Any]) -> None:
        self._receive(self.register.spaces.number(vars(module)), values)

    def _receive(self, space: int, values: dict[str, Any]) -> None:
        self.register.spaces.receive(space, values)
        self.received.append((space, list(values)))


class LeftOut:
    """Stands in a worker for a global that could not be sent; whoever uses it is told why."""

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def __reduce__(self) -> Any:
        return LeftOut, (object.__getattribute__(self, "_reason"),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CannotCross(object.__getattribute__(self, "_reason"))

    __getattr__ = __setattr__ = __call__ = __iter__ = __len__ = __bool__ = __getitem__ = __setitem__ = _refuse
    __contains__ = __enter__ = __exit__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __str__ = __format__ = __next__ = __float__ = __int__ = __index__ = _refuse
