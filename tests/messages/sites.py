"""Every place in the source that creates an error or a warning."""

from __future__ import annotations

import ast
import builtins
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .harness import PACKAGE, Message

_WARNING_FUNCTIONS = ("warn", "warn_caller")
_REASON = "Reason"
"""Rows of the table of reasons to run on one device; their text is the warning."""


@dataclass(frozen=True)
class Site:
    """An expression that creates an error or a warning, or that raises what another function creates."""

    file: str
    function: str
    """The qualified name of the function around it; empty at the top of a module."""
    first_line: int
    last_line: int
    creates: str
    """The class, or the function that creates the error."""
    text: str
    """The message in the source, with expressions in braces."""

    @property
    def key(self) -> str:
        return f"{self.file}: {self.function or '(module)'}"

    def is_shown_by(self, message: Message) -> bool:
        if self.creates == _REASON:
            return re.search(_as_pattern(self.text), message.text, re.DOTALL) is not None
        return any((self.file, line) in message.lines for line in range(self.first_line, self.last_line + 1))


def _as_pattern(template: str) -> str:
    """A pattern for a template of `str.format`, whose fields match any text."""
    literals = [literal for literal, *_ in string.Formatter().parse(template)]
    return ".*".join(map(re.escape, literals))


@cache
def find_sites() -> list[Site]:
    """All sites, in the order of the files and lines."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    errors = _error_classes(trees.values())
    return [site for path, tree in trees.items() for site in _SiteFinder(path, errors).find(tree)]


def _error_classes(trees: Iterable[ast.AST]) -> set[str]:
    """The names of builtin exceptions and of the exceptions that instep defines."""
    names = {n for n, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        new = {c.name for c in classes if names & {ast.unparse(base).rpartition(".")[2] for base in c.bases}} - names
        if not new:
            return names
        names |= new


class _SiteFinder:
    def __init__(self, path: Path, errors: set[str]) -> None:
        self._file = path.relative_to(PACKAGE).as_posix()
        self._errors = errors

    def find(self, tree: ast.AST) -> list[Site]:
        return list(self._visit(tree, ()))

    def _visit(self, node: ast.AST, scope: tuple[str, ...]) -> Iterator[Site]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = (*scope, node.name)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield self._site(node, node.exc, scope)
            children: Iterator[ast.AST] = ast.iter_child_nodes(node.exc)
        else:
            if isinstance(node, ast.Call) and self._creates_message(node):
                yield self._site(node, node, scope)
            children = ast.iter_child_nodes(node)
        for child in children:
            yield from self._visit(child, scope)

    def _creates_message(self, call: ast.Call) -> bool:
        name = _called(call)
        has_message = bool(call.args) and (name != _REASON or len(call.args) > 1)
        return has_message and (name in self._errors or name in (*_WARNING_FUNCTIONS, _REASON))

    def _site(self, node: ast.stmt | ast.expr, call: ast.Call, scope: tuple[str, ...]) -> Site:
        name = _called(call)
        arguments = call.args[1:] if name == _REASON else call.args
        strings = [text for text in map(_template, arguments) if text]
        text = strings[0] if strings else ""
        return Site(self._file, ".".join(scope), node.lineno, node.end_lineno or node.lineno, name, text)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _template(node: ast.expr) -> str:
    """The text of a string in the source, with the expressions of an f-string in braces; empty for other values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ""
