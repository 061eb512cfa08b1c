"""What the file of a module gives its names and the attributes of its classes, by its text alone.

Only what is beyond doubt counts: names that are bound once, to a literal or by a `def` that nothing decorates. What a
file does besides as it is imported (calls, and what those run of its own functions) may change any name that it says.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from instep.runtime.locks import ForkSafeLock

MISSING = object()
_TRIES = 10
_ANYTHING = "*"
_AT_RUN_TIME = {"vars", "exec", "__dict__"}
"""Words by which code may bind names that its text does not say."""
_AT_RUN_TIME_HERE = {"globals", "locals", "modules"}
"""The same, for names of its own file: it may hand its module to somebody (`install(sys.modules[__name__])`)."""
_AS_CLASSES_ARE_MADE = {"__init_subclass__", "__set_name__"}
_Def = (ast.FunctionDef, ast.AsyncFunctionDef)
_files: WeakKeyDictionary[types.ModuleType, File] = WeakKeyDictionary()
_reading = ForkSafeLock()


@dataclass
class Body:
    """What the body of a file or of a class binds."""

    values: dict[str, Any] = field(default_factory=dict)
    """By name: literals, for names that are bound once."""
    functions: set[str] = field(default_factory=set)
    """Names that are bound once, by a `def`."""
    bound: set[str] = field(default_factory=set)
    """All names."""


@dataclass
class Deeds:
    """What code may do to names, wherever they are: what it binds as a global or an attribute, and what it names."""

    bound: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)

    def may_bind(self, name: str) -> bool:
        """Whether a name may be another object after it."""
        return name in self.bound or _ANYTHING in self.bound

    def may_change(self, name: str) -> bool:
        """Whether what a name holds may be changed in place."""
        return self.may_bind(name) or name in self.words


@dataclass
class File:
    """What a file says."""

    body: Body = field(default_factory=Body)
    classes: dict[str, Body] = field(default_factory=dict)
    """Those at its top level that nothing decorates, but `dataclass`."""
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Names that it has from another module, and from where."""
    deeds: Deeds = field(default_factory=Deeds)
    """What it does as it is imported."""


def file_of(module: types.ModuleType) -> File:
    """What the file of a module says; nothing where it was not imported as it is written, but by a hook."""
    with _reading:
        if module not in _files:
            plain = type(getattr(module, "__loader__", None)) is importlib.machinery.SourceFileLoader
            place = getattr(module, "__file__", None) if plain else None
            _files[module] = read_file(place, getattr(module, "__package__", None))
        return _files[module]


def done_by(module: types.ModuleType, words: set[str]) -> Deeds:
    """What is done by functions and classes of a module's file that somebody names."""
    with _reading:
        tree = _tree(getattr(module, "__file__", None))
    return _done((), tree.body, words)


def read_file(place: str | None, package: str | None = None) -> File:
    """What a file says that is part of a package."""
    tree = _tree(place)
    deeds = _done(_run(tree.body), tree.body)
    if deeds.words & _AT_RUN_TIME_HERE:
        return File(deeds=deeds)
    once = _bound_once(tree.body)
    imported = dict(_imported(tree.body, package))
    file = File(_body(tree.body, deeds), deeds=deeds)
    file.imported = {name: place for name, place in imported.items() if name in once and not deeds.may_bind(name)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in once and all(map(_is_dataclass, node.decorator_list)):
            file.classes[node.name] = _body(node.body, deeds)
    return file


def is_mutable(value: Any) -> bool:
    """Whether a literal can change in place, or holds one that can."""
    try:
        hash(value)
    except TypeError:
        return True
    return False


def _body(nodes: Iterable[ast.stmt], deeds: Deeds) -> Body:
    nodes = list(nodes)
    body = Body(bound={name for node in nodes for name in _binds(node)})
    once = _bound_once(nodes)
    for node in nodes:
        is_plain = isinstance(node, _Def) and not node.decorator_list
        if isinstance(node, _Def) and is_plain and node.name in once and not deeds.may_bind(node.name):
            body.functions.add(node.name)
        name, value = _assigned(node)
        literal = _literal(value) if name in once else MISSING
        may_be_another = deeds.may_change if is_mutable(literal) else deeds.may_bind
        if name is not None and literal is not MISSING and not may_be_another(name):
            body.values[name] = literal
    return body


def _bound_once(nodes: Iterable[ast.stmt]) -> set[str]:
    times: Counter[str] = Counter()
    for node in nodes:
        names = list(_binds(node))
        if "*" in names:
            times.update(list(times))  # it may bind any of them again
        simple = _assigned(node)[0] is not None or isinstance(node, (*_Def, ast.ClassDef, ast.Import, ast.ImportFrom))
        for name in names:
            times[name] += 1 if simple else 2
    return {name for name, count in times.items() if count == 1}


def _assigned(node: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """The name that a statement binds to an expression, and that; None for other statements."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return None, None


def _binds(node: ast.stmt) -> Iterator[str]:
    """The names that a statement may bind where it stands."""
    if isinstance(node, (*_Def, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            yield one.id
        elif isinstance(one, ast.alias):
            yield one.asname or one.name.partition(".")[0]
        elif isinstance(one, (*_Def, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and one.name:
            yield one.name
        elif isinstance(one, ast.MatchMapping) and one.rest:
            yield one.rest


def _imported(nodes: Iterable[ast.stmt], package: str | None) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            try:
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            except ImportError:
                continue
            yield from ((one.asname or one.name, (module, one.name)) for one in node.names)


def _is_dataclass(decorator: ast.expr) -> bool:
    """Whether a decorator of a class is `dataclass`, which leaves its literals where they are, but not with slots."""
    if isinstance(decorator, ast.Call):
        return all(one.arg not in (None, "slots") for one in decorator.keywords) and _is_dataclass(decorator.func)
    return (decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")) == "dataclass"


def _done(nodes: Iterable[ast.AST], body: Iterable[ast.stmt], words: Iterable[str] = ()) -> Deeds:
    """What pieces of code do, with those of a body's functions and classes that they, or some words, name."""
    deeds = Deeds(words=set(words))
    waiting = {node.name: node for node in body if isinstance(node, (*_Def, ast.ClassDef))}
    pending = list(nodes)
    while True:
        for node in pending:
            _add(deeds, node, None)
        pending = [waiting.pop(name) for name in deeds.words & waiting.keys()]
        if not pending:
            break
    if deeds.words & _AT_RUN_TIME:
        deeds.bound.add(_ANYTHING)
    return deeds


def _run(nodes: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """The parts of a body that are run as it is read, and do more than to bind a name to a literal or to import."""
    for node in nodes:
        if isinstance(node, _Def):
            yield from (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults))
            if node.name in _AS_CLASSES_ARE_MADE:
                yield node
        elif isinstance(node, ast.ClassDef):
            yield from (one for one in node.decorator_list if not _is_dataclass(one))
            yield from (*node.keywords, *(base for base in node.bases if isinstance(base, ast.Call)))
            yield from _run(node.body)
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)) or _is_of_the_script(node):
            continue
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _assigned(node)[0] is not None:
            if node.value is not None and _evaluated(node.value) is MISSING:
                yield node.value
        elif not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            yield node


def _is_of_the_script(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`, without an `else`."""
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.test, ast.Compare):
        return False
    sides = [node.test.left, *node.test.comparators]
    return any(isinstance(one, ast.Name) and one.id == "__name__" for one in sides) and any(
        isinstance(one, ast.Constant) and one.value == "__main__" for one in sides
    )


def _add(deeds: Deeds, node: ast.AST, own: str | None) -> None:
    """Add what a piece of code may do. `own` is the name that it has for an object whose attributes are its own."""
    if isinstance(node, ast.ClassDef):
        for one in node.body:
            _add(deeds, one, _first_of(one))
        return
    if isinstance(node, ast.Name):
        deeds.words.add(node.id)
    elif isinstance(node, ast.Attribute):
        deeds.words.add(node.attr)
        if not isinstance(node.ctx, ast.Load) and not (isinstance(node.value, ast.Name) and node.value.id == own):
            deeds.bound.add(node.attr)
    elif isinstance(node, ast.Global):
        deeds.bound.update(node.names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        deeds.bound.update(texts or [_ANYTHING])
    for child in ast.iter_child_nodes(node):
        _add(deeds, child, own)


def _first_of(node: ast.stmt) -> str | None:
    """The first argument of a method that is called on an instance."""
    if not isinstance(node, _Def) or any(getattr(one, "id", "") != "property" for one in node.decorator_list):
        return None
    arguments = [*node.args.posonlyargs, *node.args.args]
    return arguments[0].arg if arguments and node.name not in _AS_CLASSES_ARE_MADE else None


def _tree(place: str | None) -> ast.Module:
    try:
        with open(place or "", "rb") as source:
            return _parse(source.read())
    except (OSError, SyntaxError, ValueError, SystemError):  # no source of its own
        return ast.Module([], [])


def _parse(text: bytes) -> ast.Module:
    """The syntax tree of a text.

    Python 3.11 counts how deep it is in a tree for all threads together, and fails (SystemError) where another thread
    parses something meanwhile. Ours take turns; the program may have others.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal; `MISSING` for anything else, and for an empty container, which is there to be filled."""
    value = _evaluated(node)
    return MISSING if is_mutable(value) and not value else value


def _evaluated(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else MISSING
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return MISSING
