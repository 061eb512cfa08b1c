"""What code names, reads by key and may change, by its instructions: code of a prompt has no other text."""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

_BINDS = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_SETS = {"STORE_ATTR", "DELETE_ATTR"}
_READS = {"LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_PUTS = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_AGAIN = {"COPY", "DUP_TOP_TWO"}
"""What comes after the key where an entry is read in order to be written (`counts[key] += 1`)."""
_SILENT = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"}
_READERS = {"get", "items", "keys", "values", "index", "count", "copy"}
_CHANGERS = {"append", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse"}
_CHANGERS |= {"setdefault", "sort", "update", "__setitem__", "__delitem__"}


@dataclass
class Glance:
    """What one piece of code, with the code nested in it, does to names of its module and of others."""

    words: set[str] = field(default_factory=set)
    """The attributes that it reads, of whatever."""
    keys: set[Any] = field(default_factory=set)
    """Its constants, by which it may read entries."""
    bound: set[str] = field(default_factory=set)
    """Names that it binds as globals, or as attributes of anything but its own object."""
    changed: set[str] = field(default_factory=set)
    """Names whose containers it may change in place."""
    put: set[Any] = field(default_factory=set)
    """Keys by which it writes to entries of something."""


_known: WeakKeyDictionary[types.CodeType, dict[bool, Glance]] = WeakKeyDictionary()


def glance(code: types.CodeType, method: bool = False) -> Glance:
    """What code does; the first argument of a `method` is the object that it belongs to."""
    known = _known.setdefault(code, {})
    if method not in known:
        known[method] = _glance(code, code.co_varnames[0] if method and code.co_argcount else None)
    return known[method]


def _glance(code: types.CodeType, own: str | None) -> Glance:
    found = Glance()
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    found.keys = {one for one in code.co_consts if type(one) in (str, int)}
    loose: set[str] = set()
    for place, step in enumerate(steps):
        after = [*steps[place + 1 : place + 3], step, step][:2]
        if step.opname in _BINDS or (step.opname in _SETS and not _loads(steps[place - 1], own)):
            found.bound.add(step.argval)
        elif _is_constant(step) and type(step.argval) in (str, int) and after[0].opname in _PUTS | _AGAIN:
            found.put.add(step.argval)
        elif step.opname in _READS:
            if step.opname != "LOAD_GLOBAL":
                found.words.add(step.argval)
            by_key = _is_constant(after[0]) and _is_subscript(after[1])
            if not by_key and after[0].argval not in _READERS:
                loose.add(step.argval)
    if found.words & _CHANGERS or any(step.opname in _PUTS for step in steps):
        found.changed = loose
    texts = {one for one in found.keys if isinstance(one, str)}
    if "getattr" in code.co_names:
        found.words |= texts
    if "setattr" in code.co_names or "delattr" in code.co_names:
        found.bound |= texts
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = glance(constant)
            found.words |= inner.words
            found.keys |= inner.keys
            found.bound |= inner.bound
            found.changed |= inner.changed
            found.put |= inner.put
    return found


def _is_constant(step: dis.Instruction) -> bool:
    return step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _loads(step: dis.Instruction, own: str | None) -> bool:
    """Whether an instruction leaves the object on top of the stack that a method belongs to."""
    last = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
    return own is not None and last == own and ("LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF")
