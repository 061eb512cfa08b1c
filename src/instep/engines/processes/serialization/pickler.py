"""Pickler and unpickler that keep tensors out of band and send code by numbered definition."""

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

from instep.autograd.nested_outputs import is_jagged, jagged_components, make_jagged
from instep.engines.processes.serialization.by_reference import (
    attribute_names,
    context_var_at,
    global_names,
    is_by_reference,
    is_importable,
    locate_context_var,
    reduce_class,
    submodules_used,
)
from instep.engines.processes.serialization.globals import (
    ABSENT,
    Namespaces,
    ValueSnapshot,
    snapshot_attributes,
    snapshot_cell,
    take_snapshot,
)
from instep.engines.processes.serialization.reducers import (
    cell_contents,
    has_strided_data,
    is_immutable_function,
    reducer_for,
    set_attributes,
)
from instep.errors import CannotCross

_MAX_INLINE_BYTES = 4096


class UnpicklerMethod:
    """A word in a pickle that the unpickler of the other side answers with one of its own methods."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name

    def __call__(self, *_: Any) -> Any:
        raise CannotCross("this was written for the other side of a line and means nothing elsewhere")


KNOWN = UnpicklerMethod("KNOWN")
TENSOR = UnpicklerMethod("TENSOR")
DEFINE = UnpicklerMethod("DEFINE")
FILL = UnpicklerMethod("FILL")
FUNCTION = UnpicklerMethod("FUNCTION")
FILL_FUNCTION = UnpicklerMethod("FILL_FUNCTION")
VARIABLE = UnpicklerMethod("VARIABLE")
MODULE = UnpicklerMethod("MODULE")
FILL_MODULE = UnpicklerMethod("FILL_MODULE")
DELETED = UnpicklerMethod("DELETED")
"""Stands for the value of a name that is no longer there."""


class Registry(Protocol):
    """What a side knows: the numbered functions and classes, and the globals."""

    is_parent: bool
    namespaces: Namespaces
    unsendable: dict[tuple[int, str], str]

    def id_of(self, thing: Any) -> int | None: ...
    def new_id(self) -> int: ...
    def peer_has(self, number: int) -> bool: ...
    def is_from_peer(self, number: int) -> bool: ...
    def get_object(self, number: int) -> Any: ...
    def has(self, number: int) -> bool: ...


class _PicklerBase:
    """How one value is pickled. What it defines counts as sent only when the whole has been pickled."""

    dispatch_table: Any

    def __init__(self, register: Registry) -> None:
        self.file = io.BytesIO()
        self.dispatch_table = _dispatch_table(len(copyreg.dispatch_table))
        self.buffers: list[Tensor] = []
        # Not a method of this object, which would hold itself then, and all that it has packed.
        keep_buffer = partial(_store_buffer, self.buffers)
        super().__init__(self.file, protocol=5, buffer_callback=keep_buffer)  # type: ignore[call-arg]
        self.registry = register
        self.tensors: list[Tensor] = []
        self.imported_modules: set[str] = set()
        """Modules that the receiver imports to rebuild the value."""
        self.attribute_names: set[str] = set()
        """Globals and attributes that the value names: code sent by value, and what goes by reference."""
        self.definitions: dict[int, Any] = {}
        self.class_attributes: dict[int, dict[str, ValueSnapshot]] = {}
        self.sent_globals: dict[tuple[int, str], ValueSnapshot] = {}
        self._described_namespaces: set[int] = set()
        self._cells: dict[int, Any] = {}
        self.closure_cells: list[tuple[types.CellType, ValueSnapshot]] = []

    def reducer_override(self, thing: Any) -> Any:
        """How anything but plain values and containers is written; the pickle module asks this first."""
        kind = type(thing)
        if issubclass(kind, Tensor):
            return self._reduce_tensor(thing)
        if issubclass(kind, type):
            return self._reduce_class(thing)
        if kind is types.FunctionType:
            return self._reduce_function(thing)
        if kind is ContextVar:
            return self._reduce_context_var(thing)
        if kind is types.CellType and id(thing) in self._cells:
            return types.CellType, ()  # what is in it goes with the function
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(thing)
        reducer = reducer_for(kind)
        return NotImplemented if reducer is None else reducer(thing)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if not has_strided_data(tensor):
            with_graph = tensor.requires_grad and is_jagged(tensor)
            return (make_jagged, jagged_components(tensor)) if with_graph else NotImplemented
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

    def _reduce_class(self, cls: type) -> Any:
        number = self.registry.id_of(cls)
        if number is not None and self.registry.peer_has(number):
            return KNOWN, (number,)
        if is_by_reference(cls):
            self.imported_modules.add(cls.__module__)
            self.attribute_names.add(cls.__name__)
            return NotImplemented
        plain = cloudpickle.Pickler.reducer_override(self, cls)
        if plain is not NotImplemented and len(plain) < 6:  # a type without a name of its own, such as None's
            return plain
        number = self.registry.new_id() if number is None else number
        self.definitions[number] = cls
        self.class_attributes[number] = snapshot_attributes(cls)
        make, args, contents, fill = reduce_class(cls)
        return DEFINE, (number, make, args), (fill, contents), None, None, FILL

    def _reduce_function(self, function: types.FunctionType) -> Any:
        number = self.registry.id_of(function)
        there = number is not None and self.registry.peer_has(number)
        if number is not None and there and (self.registry.is_from_peer(number) or is_immutable_function(function)):
            return KNOWN, (number,)
        if is_by_reference(function):
            self.imported_modules.add(function.__module__)
            self.attribute_names.add(function.__name__)
            return NotImplemented
        if "<" in function.__qualname__:  # made anew whenever the code around it runs: there would be no end of them
            number = 0
        else:
            number = self.registry.new_id() if number is None else number
            self.definitions[number] = function
        space, about, values = self._collect_globals(function.__globals__, global_names(function.__code__))
        self.attribute_names |= attribute_names(function.__code__)
        cells = function.__closure__ or ()
        inside = []
        for cell in cells:
            if id(cell) not in self._cells:
                self._cells[id(cell)] = cell
                inside.append((cell, cell_contents(cell)))
                self.closure_cells.append((cell, snapshot_cell(cell)))
        slots = {
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
            "__module__": function.__module__,
            "__doc__": function.__doc__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__annotations__": function.__annotations__,
        }
        held = [function.__globals__.get(name) for name in global_names(function.__code__)]
        imports = submodules_used(function.__code__, [*held, *(value[0] for _, value in inside if value)])
        state = (slots, function.__dict__, inside, space, values, imports)
        args = (number, function.__code__, space, about, cells)
        return FUNCTION, args, state, None, None, FILL_FUNCTION

    def _reduce_context_var(self, variable: ContextVar[Any]) -> Any:
        number = self.registry.id_of(variable)
        if number is not None and self.registry.peer_has(number):
            return KNOWN, (number,)
        place = locate_context_var(variable)
        if place is not None:
            return context_var_at, place
        number = self.registry.new_id() if number is None else number
        self.definitions[number] = variable
        try:
            default = [Context().run(variable.get)]
        except LookupError:
            default = []
        return VARIABLE, (number, variable.name, default)

    def _collect_globals(
        self, space: dict[str, Any], names: Iterable[str]
    ) -> tuple[int | str, dict[str, Any], dict[str, Any]]:
        """The number of a dictionary of globals, what goes along with it, and the values of names not sent before.

        The globals of a module that the other side can import go by its name: they are there.
        """
        name = str(space.get("__name__"))
        if getattr(sys.modules.get(name), "__dict__", None) is space and is_importable(name):
            self.imported_modules.add(name)
            return name, {}, {}
        spaces = self.registry.namespaces
        number = spaces.id_of(space)
        if not spaces.is_local(number):
            return number, {}, {}
        about = {} if number in self._described_namespaces else spaces.module_attributes(number)
        self._described_namespaces.add(number)
        values = {}
        for name in names:
            if (number, name) in self.sent_globals or spaces.is_current(number, name):
                continue
            self.sent_globals[number, name] = take_snapshot(space.get(name, ABSENT))
            if name in space:
                reason = self.registry.unsendable.get((number, name))
                values[name] = space[name] if reason is None else Unsendable(reason)
        return number, about, values

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if sys.modules.get(module.__name__) is module and is_importable(module.__name__):
            self.imported_modules.add(module.__name__)
            return importlib.import_module, (module.__name__,)
        if type(module) is not types.ModuleType:
            return NotImplemented
        self.registry.namespaces.register_module(module)
        names = tuple(name for name in vars(module) if not name.startswith("__"))
        space, about, values = self._collect_globals(vars(module), names)
        return MODULE, (space, about), values, None, None, FILL_MODULE


def _store_buffer(buffers: list[Tensor], buffer: pickle.PickleBuffer) -> bool:
    """Keep a large buffer out of the pickle; True leaves it in."""
    raw = buffer.raw()
    if raw.nbytes < _MAX_INLINE_BYTES:
        return True
    buffers.append(torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8))
    return False


class Pickler(_PicklerBase, pickle.Pickler):
    """Pickles one value."""


@lru_cache(maxsize=1)
def _dispatch_table(_: int) -> dict[type, Any]:
    """cloudpickle's table in one piece: looking in one after another takes as long as pickling a small object."""
    return dict(cloudpickle.Pickler.dispatch_table)


class Unpickler(pickle.Unpickler):
    """Rebuilds one value. What it defines counts as known only when the whole has been rebuilt."""

    _METHODS: ClassVar = {
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

    def __init__(self, register: Registry, file: io.BytesIO, tensors: list[Tensor], buffers: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.registry = register
        self.tensors = tensors
        self.definitions: dict[int, Any] = {}
        self.received_globals: list[tuple[int, list[str]]] = []
        self.requiring_grad: list[Tensor] = []
        """In a worker: tensors that need a gradient where they come from."""
        self.closure_values: list[Any] = []
        """In a worker: what variables of closures hold."""
        self._existing: set[int] = set()

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        if module == __name__ and name in self._METHODS:
            return getattr(self, self._METHODS[name])
        return super().find_class(module, name)

    def _known(self, number: int) -> Any:
        return self.definitions[number] if number in self.definitions else self.registry.get_object(number)

    def _tensor(
        self, place: int, parameter: bool | None = None, kind: type | None = None, needs: bool = False
    ) -> Tensor:
        made = self.tensors[place]
        if parameter is not None and not isinstance(made, kind or nn.Parameter):
            made = torch.Tensor._make_subclass(kind or nn.Parameter, made.detach(), parameter)
        elif kind is not None and not isinstance(made, kind):
            made = made.as_subclass(kind)
        if (needs or parameter) and not self.registry.is_parent:
            self.requiring_grad.append(made.requires_grad_())  # it may have been sent without
        return made

    def _define(self, number: int, make: Callable[..., type], args: tuple[Any, ...]) -> type:
        if self.registry.has(number):  # it was defined before: what is here is the one that counts
            known: type = self.registry.get_object(number)
            self._existing.add(id(known))
            return known
        made = self.definitions[number] = make(*args)
        return made

    def _fill(self, cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
        if id(cls) not in self._existing:
            fill, contents = state
            fill(cls, contents)

    def _function(
        self, number: int, code: types.CodeType, space: int | str, about: dict[str, Any], cells: tuple[Any, ...]
    ) -> types.FunctionType:
        if isinstance(space, str):
            names = vars(importlib.import_module(space))
        else:
            names = self.registry.namespaces.get_or_create(space, about)
        made = types.FunctionType(code, names, code.co_name, None, cells or None)
        if number:
            self.definitions[number] = made
        return made

    def _fill_function(self, function: types.FunctionType, state: tuple[Any, ...]) -> None:
        slots, attributes, inside, space, values, imports = state
        for name in imports:
            importlib.import_module(name)
        if values:
            self._receive_globals(space, values)
        for cell, held in inside:
            if held:
                cell.cell_contents = held[0]
                if not self.registry.is_parent:
                    self.closure_values.append(held[0])
        for name, value in slots.items():
            setattr(function, name, value)
        function.__dict__.update(attributes)

    def _variable(self, number: int, name: str, default: list[Any]) -> ContextVar[Any]:
        if self.registry.has(number):
            known: ContextVar[Any] = self.registry.get_object(number)
            return known
        made: ContextVar[Any] = ContextVar(name, default=default[0]) if default else ContextVar(name)
        self.definitions[number] = made
        return made

    def _module(self, space: int, about: dict[str, Any]) -> types.ModuleType:
        return self.registry.namespaces.get_module(space, about)

    def _fill_module(self, module: types.ModuleType, values: dict[str, Any]) -> None:
        self._receive_globals(self.registry.namespaces.id_of(vars(module)), values)

    def _receive_globals(self, space: int, values: dict[str, Any]) -> None:
        self.registry.namespaces.receive(space, values)
        self.received_globals.append((space, list(values)))


class Unsendable:
    """Placeholder in a worker for a global that could not be sent. Any use raises the reason."""

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def __reduce__(self) -> Any:
        return Unsendable, (object.__getattribute__(self, "_reason"),)

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise CannotCross(object.__getattribute__(self, "_reason"))

    __getattr__ = __setattr__ = __call__ = __iter__ = __len__ = __bool__ = __getitem__ = __setitem__ = _raise
    __contains__ = __enter__ = __exit__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = _raise
    __lt__ = __gt__ = __le__ = __ge__ = __str__ = __format__ = __next__ = __float__ = __int__ = __index__ = _raise
