"""Sends plain values in globals of the user's imported modules to workers, and finds other objects that changed.

A worker imports the user's modules itself, so it sees the values that the files assign. The script may have changed
them since: ``conf.args.scale = 2.0``. For each imported module that sent code refers to, the parent sends the plain
values that the code names: at first all of them, later those that changed. It looks into dictionaries, namespaces,
dataclasses, and classes and objects of the user's own. A function, class or other object that was replaced is an
error, because the worker would use the one that it imported.

Each wrapper watches the modules that its own code refers to (`ModuleGlobals`). What a worker has (`SentModuleValues`)
is recorded once per connection, because all wrappers use the same modules of the worker.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import marshal
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.engines.processes.serialization.by_reference import attribute_names, functions_of, is_importable
from instep.engines.processes.serialization.globals import ABSENT, plain_digest
from instep.errors import CannotCross
from instep.replicas.object_graph import read_contents, write_contents

_MAX_MODULES = 500
_MAX_ENTRIES = 5000
_MAX_DEPTH = 8
_MAX_BYTES = 64 * 1024
"""Larger values are compared by identity, and are not sent."""
_MAX_SHOWN = 100
_LIBRARIES = {"torch", "instep", "numpy", "builtins", "__main__", *sys.stdlib_module_names}
_INSTALLED = ("site-packages", "dist-packages")
_CONTAINERS = (list, dict, set, bytearray)
_IMMUTABLE = (torch.dtype, torch.device, torch.Size, enum.Enum, pathlib.PurePath, range, slice)
"""Types, beside those that `marshal` writes, whose values are sent."""

Path = tuple[tuple[str, Any], ...]
"""A module's name, then attributes and keys: ``(("module", "conf"), ("attribute", "args"), ("item", "scale"))``."""


class Update(NamedTuple):
    """A new value for one path; `ABSENT` for a name that was deleted."""

    path: Path
    value: Any
    in_place: bool = False
    """Whether the container that the path leads to was changed, and not replaced."""


class FunctionName(NamedTuple):
    """The function that the parent has at a path."""

    path: Path
    module: str
    qualname: str


class References:
    """Modules that sent code refers to, and the names that it uses for globals and attributes."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.names: set[str] = set()

    def add(self, other: References) -> None:
        """Add the references of other code."""
        self.modules |= other.modules
        self.names |= other.names


class _Entry(NamedTuple):
    value: Any
    digest: bytes | None = None
    """Of a plain value."""
    kind: str = "object"
    """ "value", "namespace" or "object"."""
    is_sent: bool = True


class _Namespace(NamedTuple):
    """The watched names of one mapping, for the check before each call."""

    mapping: Mapping[Any, Any]
    size: int
    get_values: Callable[[Mapping[Any, Any]], Iterable[Any]]
    values: tuple[Any, ...]
    containers: tuple[tuple[Any, bytes], ...]
    """Plain containers, which may change in place, with their digests."""


def _are_unchanged(namespaces: Iterable[_Namespace]) -> bool:
    """Whether all watched names have the same objects, and the containers among them the same contents."""
    dumps = marshal.dumps
    try:
        for mapping, size, get_values, values, containers in namespaces:
            if len(mapping) != size or not all(map(is_, get_values(mapping), values)):
                return False
            for value, digest in containers:
                if dumps(value, 2) != digest:
                    return False
    except (KeyError, ValueError):  # a name was deleted; a container holds something else now
        return False
    return True


class SentModuleValues:
    """The parent's record of what one worker has of the user's imported modules."""

    def __init__(self) -> None:
        self.entries: dict[Path, _Entry] = {}
        self.references = References()
        """References of the script's globals that changed after they were sent. Every wrapper may use them."""
        self.version = 0
        """Grows with every change of the record. A wrapper compares all values again if another one has sent some."""

    def add_references(self, references: References) -> None:
        """Have every wrapper watch the modules that changed globals refer to."""
        if not (references.modules <= self.references.modules and references.names <= self.references.names):
            self.references.add(references)
            self.version += 1

    def mark_all_unsent(self) -> None:
        """Send all values again: the worker may have none of them."""
        self.entries = {path: entry._replace(is_sent=False) for path, entry in self.entries.items()}
        self.version += 1

    def forget(self, module: str) -> None:
        """Drop the values of a module that the script has removed or replaced."""
        self.entries = {path: entry for path, entry in self.entries.items() if path[0] != ("module", module)}
        self.version += 1


class ModuleGlobals:
    """Watches the imported modules that the code of one wrapper refers to."""

    def __init__(self, sent: SentModuleValues) -> None:
        self._sent = sent
        self._modules: dict[str, types.ModuleType] = {}
        self._names: set[str] = set()
        """Globals and attributes that the sent code, or code of these modules, names."""
        self._scan = _Scan(set())
        """The values at the last `mark_sent`."""
        self._pending: tuple[_Scan, bool] | None = None
        """The values at the last `changes`, and whether some have to be sent."""
        self._sent_version = 0
        """The version of the record at the last `mark_sent`; -1 if modules or names were added since."""

    @property
    def has_new_modules(self) -> bool:
        """Whether modules were added whose values are not sent yet."""
        return self._sent_version < 0

    def add(self, references: References) -> None:
        """Watch the modules that sent code refers to, and those that their code refers to."""
        modules = {name for name in references.modules if self._is_new(name)}
        if not modules and (not self._modules or references.names <= self._names):
            self._names |= references.names
            return
        self._names |= references.names
        self._sent_version = -1
        size = (-1, -1)
        while size != (len(self._modules), len(self._names)) and len(self._modules) < _MAX_MODULES:
            size = len(self._modules), len(self._names)
            for name in modules:
                self._watch(name)
            modules = {name for name in self._referenced_modules() if self._is_new(name)}

    def _is_new(self, name: str) -> bool:
        return self._modules.get(name) is not sys.modules.get(name) and is_user_module(name)

    def _watch(self, name: str) -> None:
        if name in self._modules:  # the script imported another module under the name
            self._sent.forget(name)
        module = self._modules[name] = sys.modules[name]
        for function in _functions_in(module):
            self._names |= attribute_names(function.__code__)

    def _referenced_modules(self) -> set[str]:
        """The modules that watched values come from. The names of their classes are watched, too."""
        found: set[str] = set()
        for module in self._modules.values():
            for value in [value for name, value in list(vars(module).items()) if name in self._names]:
                if isinstance(value, types.ModuleType):
                    found.add(value.__name__)
                elif isinstance(value, types.FunctionType):
                    found.add(str(value.__module__))
                else:
                    classes = (value if isinstance(value, type) else type(value)).__mro__
                    user_classes = [cls for cls in classes if is_user_module(str(cls.__module__))]
                    found.update(cls.__module__ for cls in user_classes)
                    self._names.update(cls.__name__ for cls in user_classes)
        return found

    def changes(self) -> tuple[list[Update], list[FunctionName]] | None:
        """What to send; None if nothing changed. `CannotCross` if an object that cannot be sent was replaced."""
        if self._sent_version == self._sent.version and _are_unchanged(self._scan.namespaces):
            return None
        self.add(self._sent.references)
        for name in [name for name, module in self._modules.items() if sys.modules.get(name) is not module]:
            del self._modules[name]  # the script has removed it
            self._sent.forget(name)
        scan = _Scan(self._names)
        for name, module in self._modules.items():
            scan.visit((("module", name),), vars(module), is_dict=False)
        updates = [*self._new_values(scan.entries), *self._deleted_values(scan.entries)]
        functions = list(_function_names({path: e for path, e in scan.entries.items() if not self._has(path)}))
        self._pending = scan, bool(updates or functions)
        if not updates and not functions:
            self.mark_sent()
            return None
        return updates, functions

    def mark_sent(self) -> None:
        """Record the result of the last `changes` as sent."""
        if self._pending is None:
            return
        before, (self._scan, has_changes), self._pending = self._scan, self._pending, None
        for path in before.entries.keys() - self._scan.entries.keys():
            self._sent.entries.pop(path, None)
        self._sent.entries.update(self._scan.entries)
        self._sent.version += has_changes
        self._sent_version = self._sent.version

    def _has(self, path: Path) -> bool:
        entry = self._sent.entries.get(path)
        return entry is not None and entry.is_sent

    def _new_values(self, entries: dict[Path, _Entry]) -> Iterator[Update]:
        sent_whole: set[Path] = set()
        for path, entry in entries.items():
            before = self._sent.entries.get(path)
            if path[:-1] in sent_whole:
                sent_whole.add(path)
            elif entry.kind == "value":
                if before is None or not before.is_sent or not _same_value(before, entry):
                    yield Update(path, entry.value, in_place=before is not None and before.value is entry.value)
            elif before is not None and before.value is not entry.value and before.value is not None:
                if entry.kind != "namespace" or isinstance(entry.value, type):
                    raise _replaced_error(path, before.value, entry.value)
                sent_whole.add(path)
                yield Update(path, entry.value)

    def _deleted_values(self, entries: dict[Path, _Entry]) -> Iterator[Update]:
        before = self._scan.entries
        for path, entry in before.items():
            is_watched = path[0][1] in self._modules
            if is_watched and path not in entries and entry.kind == "value" and _parent_is_kept(path, entries, before):
                yield Update(path, ABSENT)


class _Scan:
    """The current values of all watched names."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._visited: set[int] = set()
        self.entries: dict[Path, _Entry] = {}
        self.namespaces: list[_Namespace] = []

    def visit(self, path: Path, mapping: Mapping[Any, Any], is_dict: bool) -> None:
        """Read the values of a mapping, and of the namespaces in it."""
        names, values, containers, nested = [], [], [], []
        for name, value in list(mapping.items()):
            if len(self.entries) >= _MAX_ENTRIES:
                return
            if not is_dict and (name not in self._names or name.startswith("__")):
                continue
            digest = _digest(value)
            here = (*path, ("item" if is_dict else "attribute", name))
            if is_dict and type(name) not in (str, int):
                continue
            if digest is not None or isinstance(value, _IMMUTABLE):
                self.entries[here] = _Entry(value, digest, "value")
                if isinstance(value, _CONTAINERS) and digest is not None:
                    containers.append((value, digest))
            elif (attributes := _namespace_of(value)) is not None and len(path) < _MAX_DEPTH:
                self.entries[here] = _Entry(value, kind="namespace")
                nested.append((here, value, attributes))
            elif is_dict or isinstance(value, types.ModuleType):
                continue  # dictionaries of objects are registries and caches, which each process fills itself
            else:
                self.entries[here] = _Entry(value)
            names.append(name)
            values.append(value)
        # The first name is given twice: an `itemgetter` of one name would not return a tuple.
        get_values: Any = itemgetter(*names, *names[:1]) if names else lambda _: ()
        size = len(mapping)
        self.namespaces.append(_Namespace(mapping, size, get_values, (*values, *values[:1]), tuple(containers)))
        for here, value, attributes in nested:
            if id(value) not in self._visited:
                self._visited.add(id(value))
                self.visit(here, attributes, isinstance(value, dict))


def apply_updates(updates: Iterable[Update], functions: Iterable[FunctionName]) -> None:
    """In a worker: assign what `ModuleGlobals.changes` gave, and check that functions are those of the parent."""
    for update in updates:
        _assign(Update(*update))
    for path, module, qualname in functions:
        own = _unwrap(_get(path))
        if isinstance(own, types.FunctionType) and (own.__module__, own.__qualname__) != (module, qualname):
            raise CannotCross(
                f"{format_path(path)} was replaced by {module}.{qualname}: a worker process imports the module itself "
                f"and has {own.__module__}.{own.__qualname__}.\n{_hint(path)}"
            )


def _assign(update: Update) -> None:
    for path in (update.path[:length] for length in range(2, len(update.path))):
        if _get(path) is None:
            raise CannotCross(
                f"{format_path(path)} is another object in the script: a worker process imports the module itself and "
                f"has None.\n{_hint(path)}"
            )
    owner, (kind, name) = _get(update.path[:-1]), update.path[-1]
    if owner is ABSENT:
        return
    if update.value is ABSENT:
        if kind == "item":
            owner.pop(name, None)
        elif name in vars(owner):
            delattr(owner, name)
        return
    current = owner.get(name, ABSENT) if kind == "item" else vars(owner).get(name, ABSENT)
    digest = _digest(current)
    if digest is not None and digest == _digest(update.value):
        return
    if update.in_place and type(current) is type(update.value) and isinstance(current, (dict, set, list)):
        write_contents(current, read_contents(update.value))
    elif kind == "item":
        owner[name] = update.value
    elif dataclasses.is_dataclass(owner) and not isinstance(owner, type):
        object.__setattr__(owner, name, update.value)  # it may be frozen
    else:
        setattr(owner, name, update.value)


def _get(path: Path) -> Any:
    """The object at a path in this process, or `ABSENT`."""
    value: Any = importlib.import_module(path[0][1])
    for kind, name in path[1:]:
        value = value.get(name, ABSENT) if kind == "item" else getattr(value, name, ABSENT)
        if value is ABSENT:
            break
    return value


def is_user_module(name: str) -> bool:
    """Whether a module is part of the user's program, and a worker can import it."""
    if name.partition(".")[0] in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not any(folder in file for folder in _INSTALLED) and is_importable(name)


def format_path(path: Path) -> str:
    """A path as code: ``conf.CFG['scale']``."""
    steps = (f"[{name!r}]" if kind == "item" else f".{name}" for kind, name in path[1:])
    return str(path[0][1]) + "".join(steps)


def _digest(value: Any) -> bytes | None:
    """The bytes of a plain value; None if it is not plain, or too large."""
    digest = plain_digest(value)
    return digest if digest is not None and len(digest) <= _MAX_BYTES else None


def _same_value(before: _Entry, now: _Entry) -> bool:
    if before.digest is not None or now.digest is not None:
        return before.digest == now.digest
    return before.value is now.value or (type(before.value) is type(now.value) and bool(before.value == now.value))


def _namespace_of(value: Any) -> Mapping[Any, Any] | None:
    """The mapping that holds an object's values, if it is one whose values are watched."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (nn.Module, Tensor, types.ModuleType, types.FunctionType, BaseException)):
        return None
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, enum.Enum):  # its members cannot be assigned
        return None
    is_config = isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or dataclasses.is_dataclass(value)
    attributes = getattr(value, "__dict__", None)
    if attributes is None or not (is_config or is_user_module(cls.__module__ or "")):
        return None
    return attributes if isinstance(attributes, Mapping) else None


def _functions_in(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """The functions and methods that a module defines."""
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute in list(vars(value).values()):
                yield from (f for f in map(_unwrap, functions_of(attribute)) if isinstance(f, types.FunctionType))
        elif isinstance(function := _unwrap(value), types.FunctionType) and function.__module__ == module.__name__:
            yield function


def _unwrap(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    for _ in range(20):
        if not isinstance(value, types.FunctionType) or "__wrapped__" not in vars(value):
            break
        value = vars(value)["__wrapped__"]
    return value


def _function_names(entries: Mapping[Path, _Entry]) -> Iterator[FunctionName]:
    for path, entry in entries.items():
        function = _unwrap(entry.value)
        if isinstance(function, types.FunctionType):
            yield FunctionName(path, str(function.__module__), function.__qualname__)


def _parent_is_kept(path: Path, entries: Mapping[Path, _Entry], before: Mapping[Path, _Entry]) -> bool:
    parent = path[:-1]
    if len(parent) == 1:
        return True
    return parent in entries and entries[parent].value is before[parent].value


def _replaced_error(path: Path, before: Any, now: Any) -> CannotCross:
    return CannotCross(
        f"{format_path(path)} was replaced: it was {_shown(before)} and is {_shown(now)} now. A worker process imports "
        f"the module itself and would use the first.\n{_hint(path)}"
    )


def _hint(path: Path) -> str:
    name = str(path[-1][1])
    return f"Set it on the module (self.{name} = ...), pass it to forward, or use engine='threads'."


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
