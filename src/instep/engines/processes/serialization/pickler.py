"""Pickler and unpickler that keep tensors out of band and send code by numbered definition."""

from __future__ import annotations

import copyreg
import enum
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context, ContextVar
from functools import lru_cache, partial
from typing import Any, Protocol

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
    CLASS,
    GLOBALS,
    Namespaces,
    SentValues,
    TrackerKey,
    ValueSnapshot,
    read_cell,
    snapshot_attributes,
    snapshot_cell,
    take_snapshot,
)
from instep.engines.processes.serialization.module_globals import References
from instep.engines.processes.serialization.reducers import (
    has_strided_data,
    is_immutable_function,
    reducer_for,
    set_attributes,
)
from instep.errors import CannotCross

_MAX_INLINE_BYTES = 4096


class UnpicklerMethod:
    """A name in a pickle that stands for a method of the receiver's `Unpickler`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.method = f"_{name.lower()}"

    def __reduce__(self) -> str:
        return self.name

    def __call__(self, *_: Any) -> Any:
        raise CannotCross(f"{self.name} can only be called by the unpickler of another process")


KNOWN = UnpicklerMethod("KNOWN")
TENSOR = UnpicklerMethod("TENSOR")
DEFINE = UnpicklerMethod("DEFINE")
FILL = UnpicklerMethod("FILL")
FUNCTION = UnpicklerMethod("FUNCTION")
FILL_FUNCTION = UnpicklerMethod("FILL_FUNCTION")
VARIABLE = UnpicklerMethod("VARIABLE")
MODULE = UnpicklerMethod("MODULE")
FILL_MODULE = UnpicklerMethod("FILL_MODULE")


class Registry(Protocol):
    """The definitions and globals that one end of a connection has sent and received."""

    is_parent: bool
    namespaces: Namespaces
    sent_values: SentValues
    unsendable: dict[tuple[int, str], str]

    def id_of(self, thing: Any) -> int | None: ...
    def new_id(self) -> int: ...
    def peer_has(self, number: int) -> bool: ...
    def is_from_peer(self, number: int) -> bool: ...
    def get_object(self, number: int) -> Any: ...
    def has(self, number: int) -> bool: ...


class _PicklerBase:
    """Pickles one value. Its definitions count as sent only when the whole value has been pickled."""

    dispatch_table: Any

    def __init__(self, registry: Registry) -> None:
        self.file = io.BytesIO()
        self.dispatch_table = _dispatch_table(len(copyreg.dispatch_table))
        self.buffers: list[Tensor] = []
        # Not a bound method, which would make a reference cycle that holds all pickled tensors.
        buffer_callback = partial(_store_buffer, self.buffers)
        super().__init__(self.file, protocol=5, buffer_callback=buffer_callback)  # type: ignore[call-arg]
        self.registry = registry
        self.tensors: list[Tensor] = []
        self.references = References()
        self.known: set[Any] = set()
        """What the value refers to and the peer already has: ids of definitions, and globals by key and name."""
        self.definitions: dict[int, Any] = {}
        self.snapshots: dict[TrackerKey, tuple[Mapping[str, Any], dict[str, ValueSnapshot]]] = {}
        """Tracked values in the pickle: the mapping that holds them, and their snapshots."""
        self._described_namespaces: set[int] = set()
        self.closure_cells: dict[int, tuple[types.CellType, ValueSnapshot]] = {}
        """Closure cells in the pickle by `id()`, with snapshots of their contents."""

    def reducer_override(self, thing: Any) -> Any:
        """Reduce anything but plain values and containers. The pickle module asks this first."""
        kind: Any = type(thing)
        if issubclass(kind, Tensor):
            return self._reduce_tensor(thing)
        if issubclass(kind, type):
            return self._reduce_class(thing)
        if kind is types.FunctionType:
            return self._reduce_function(thing)
        if kind is ContextVar:
            return self._reduce_context_var(thing)
        if kind is types.CellType and id(thing) in self.closure_cells:
            return types.CellType, ()  # its contents are part of the state of a function
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(thing)
        reducer = reducer_for(kind)
        return NotImplemented if reducer is None else reducer(thing)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if not has_strided_data(tensor):
            with_graph = tensor.requires_grad and is_jagged(tensor)
            return (make_jagged, jagged_components(tensor)) if with_graph else NotImplemented
        index = len(self.tensors)
        self.tensors.append(tensor)
        subclass = None if type(tensor) in (Tensor, nn.Parameter) else type(tensor)
        parameter = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
        needs_grad = parameter is None and tensor.requires_grad
        args: tuple[Any, ...] = (index,)
        if needs_grad or subclass is not None or parameter is not None:
            args = (index, parameter, subclass, needs_grad)
        attributes = tensor.__dict__
        return (TENSOR, args, dict(attributes), None, None, set_attributes) if attributes else (TENSOR, args)

    def _reduce_known(self, thing: Any) -> tuple[Any, ...] | None:
        """The reduced form of a definition that the peer has; None if it has not."""
        number = self.registry.id_of(thing)
        if number is None or not self.registry.peer_has(number):
            return None
        self.known.add(number)
        return KNOWN, (number,)

    def _assign_id(self, thing: Any) -> int:
        """Give a definition an id, or the one that it has already."""
        number = self.registry.id_of(thing)
        number = self.registry.new_id() if number is None else number
        self.definitions[number] = thing
        return number

    def _reduce_class(self, cls: type) -> Any:
        known = self._reduce_known(cls)
        if known is not None:
            return known
        if is_by_reference(cls):
            self.references.modules.add(cls.__module__)
            self.references.names.add(cls.__name__)
            return NotImplemented
        reduced = cloudpickle.Pickler.reducer_override(self, cls)
        if reduced is not NotImplemented and len(reduced) < 6:  # a type without a name, such as None's
            return reduced
        number = self._assign_id(cls)
        if not issubclass(cls, enum.Enum):  # its members cannot be assigned
            self.snapshots[CLASS, number] = vars(cls), snapshot_attributes(cls)
        make, args, contents, fill = reduce_class(cls)
        return DEFINE, (number, make, args), (fill, contents), None, None, FILL

    def _reduce_function(self, function: types.FunctionType) -> Any:
        number = self.registry.id_of(function)
        if number is not None and (self.registry.is_from_peer(number) or is_immutable_function(function)):
            known = self._reduce_known(function)
            if known is not None:
                return known
        if is_by_reference(function):
            self.references.modules.add(function.__module__)
            self.references.names.add(function.__name__)
            return NotImplemented
        # Lambdas and nested functions get no id: each run of the code around them creates new ones.
        number = 0 if "<" in function.__qualname__ else self._assign_id(function)
        names = global_names(function.__code__)
        namespace, module_attributes, values = self._collect_globals(function.__globals__, names)
        self.references.names |= attribute_names(function.__code__)
        cells = function.__closure__ or ()
        new_cells = [cell for cell in cells if id(cell) not in self.closure_cells]
        self.closure_cells.update((id(cell), (cell, snapshot_cell(cell))) for cell in new_cells)
        filled_cells = [(cell, read_cell(cell)) for cell in new_cells]
        slots = {
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
            "__module__": function.__module__,
            "__doc__": function.__doc__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__annotations__": function.__annotations__,
        }
        used_values = [function.__globals__.get(name) for name in names]
        used_values += [contents for _, contents in filled_cells]
        imports = submodules_used(function.__code__, used_values)
        state = (slots, function.__dict__, filled_cells, namespace, values, imports)
        args = (number, function.__code__, namespace, module_attributes, cells)
        return FUNCTION, args, state, None, None, FILL_FUNCTION

    def _reduce_context_var(self, variable: ContextVar[Any]) -> Any:
        known = self._reduce_known(variable)
        if known is not None:
            return known
        location = locate_context_var(variable)
        if location is not None:
            return context_var_at, location
        try:
            default = [Context().run(variable.get)]
        except LookupError:
            default = []
        return VARIABLE, (self._assign_id(variable), variable.name, default)

    def _collect_globals(
        self, namespace: dict[str, Any], names: Iterable[str]
    ) -> tuple[int | str, dict[str, Any], dict[str, Any]]:
        """The id of a namespace, the attributes of its module, and the values that the peer lacks.

        A module that the peer can import is sent by name, without values.
        """
        module_name = str(namespace.get("__name__"))
        if getattr(sys.modules.get(module_name), "__dict__", None) is namespace and is_importable(module_name):
            self.references.modules.add(module_name)
            return module_name, {}, {}
        namespaces = self.registry.namespaces
        number = namespaces.id_of(namespace)
        if not namespaces.is_local(number):
            return number, {}, {}
        attributes = {} if number in self._described_namespaces else namespaces.module_attributes(number)
        self._described_namespaces.add(number)
        key = GLOBALS, number
        _, snapshots = self.snapshots.setdefault(key, (namespace, {}))
        values = {}
        for name in names:
            if name in snapshots:
                continue
            if self.registry.sent_values.is_current(key, name):
                self.known.add((key, name))
                continue
            snapshots[name] = take_snapshot(namespace.get(name, ABSENT))
            if name in namespace:
                reason = self.registry.unsendable.get((number, name))
                values[name] = namespace[name] if reason is None else Unsendable(reason)
        return number, attributes, values

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if sys.modules.get(module.__name__) is module and is_importable(module.__name__):
            self.references.modules.add(module.__name__)
            return importlib.import_module, (module.__name__,)
        if type(module) is not types.ModuleType:
            return NotImplemented
        self.registry.namespaces.register_module(module)
        names = tuple(name for name in vars(module) if not name.startswith("__"))
        namespace, attributes, values = self._collect_globals(vars(module), names)
        return MODULE, (namespace, attributes), values, None, None, FILL_MODULE


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
    """cloudpickle's chain of tables as one dictionary. Searching the chain takes as long as pickling a small object."""
    return dict(cloudpickle.Pickler.dispatch_table)


class Unpickler(pickle.Unpickler):
    """Rebuilds one value. Its definitions are registered only when the whole value has been rebuilt."""

    def __init__(self, registry: Registry, file: io.BytesIO, tensors: list[Tensor], buffers: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.registry = registry
        self.tensors = tensors
        self.definitions: dict[int, Any] = {}
        self.received_globals: list[tuple[int, list[str]]] = []
        self.requiring_grad: list[Tensor] = []
        """Worker only: tensors that require grad in the parent."""
        self.closure_values: list[Any] = []
        """Worker only: contents of closure cells."""
        self._existing: set[int] = set()

    def find_class(self, module: str, name: str) -> Any:
        """The object with a name; for an `UnpicklerMethod`, the method."""
        found = super().find_class(module, name)
        return getattr(self, found.method) if isinstance(found, UnpicklerMethod) else found

    def _known(self, number: int) -> Any:
        return self.definitions[number] if number in self.definitions else self.registry.get_object(number)

    def _tensor(
        self, index: int, parameter: bool | None = None, subclass: type | None = None, needs_grad: bool = False
    ) -> Tensor:
        tensor = self.tensors[index]
        if parameter is not None and not isinstance(tensor, subclass or nn.Parameter):
            tensor = torch.Tensor._make_subclass(subclass or nn.Parameter, tensor.detach(), parameter)
        elif subclass is not None and not isinstance(tensor, subclass):
            tensor = tensor.as_subclass(subclass)
        if (needs_grad or parameter) and not self.registry.is_parent:
            self.requiring_grad.append(tensor.requires_grad_())  # it may have been sent without
        return tensor

    def _define(self, number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.registry.has(number):  # it was sent before: the object of the first definition stays
            known = self.registry.get_object(number)
            self._existing.add(id(known))
            return known
        created = self.definitions[number] = make(*args)
        return created

    def _fill(self, cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
        if id(cls) not in self._existing:
            fill, contents = state
            fill(cls, contents)

    def _function(
        self,
        number: int,
        code: types.CodeType,
        namespace: int | str,
        attributes: dict[str, Any],
        cells: tuple[Any, ...],
    ) -> types.FunctionType:
        if isinstance(namespace, str):
            names = vars(importlib.import_module(namespace))
        else:
            names = self.registry.namespaces.get_or_create(namespace, attributes)
        function = types.FunctionType(code, names, code.co_name, None, cells or None)
        if number:
            self.definitions[number] = function
        return function

    def _fill_function(self, function: types.FunctionType, state: tuple[Any, ...]) -> None:
        slots, attributes, filled_cells, namespace, values, imports = state
        for name in imports:
            importlib.import_module(name)
        if values:
            self._receive_globals(namespace, values)
        for cell, contents in filled_cells:
            if contents is not ABSENT:
                cell.cell_contents = contents
                if not self.registry.is_parent:
                    self.closure_values.append(contents)
        for name, value in slots.items():
            setattr(function, name, value)
        function.__dict__.update(attributes)

    def _variable(self, number: int, name: str, default: list[Any]) -> ContextVar[Any]:
        if self.registry.has(number):
            known: ContextVar[Any] = self.registry.get_object(number)
            return known
        variable: ContextVar[Any] = ContextVar(name, default=default[0]) if default else ContextVar(name)
        self.definitions[number] = variable
        return variable

    def _module(self, namespace: int, attributes: dict[str, Any]) -> types.ModuleType:
        return self.registry.namespaces.get_module(namespace, attributes)

    def _fill_module(self, module: types.ModuleType, values: dict[str, Any]) -> None:
        self._receive_globals(self.registry.namespaces.id_of(vars(module)), values)

    def _receive_globals(self, namespace: int, values: dict[str, Any]) -> None:
        self.registry.namespaces.receive(namespace, values)
        self.received_globals.append((namespace, list(values)))


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
