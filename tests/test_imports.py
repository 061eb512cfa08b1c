"""The rule of the house: a module imports only from its own floor and from floors below, and never in a circle."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LINES_AT_MOST = 399

# From the ground up. The public face stands above what it shows and below what uses it as any user would.
FLOORS = [
    {"errors", "locks", "modes", "private", "settings"},
    {"structure"},
    {"compiled", "devices", "random", "sources"},
    {"replicas", "reduce"},
    {"batchnorm", "bridge", "collectives", "hooks", "meeting", "packages", "pieces", "reaching", "user_hooks"},
    {"engines"},
    {"attempt", "attempt_backward", "crossing", "given", "known", "precision", "probe"},
    {"accept", "explain", "face", "functional", "loader", "loss", "named", "options", "parallel", "together"},
    {"check", "doctor"},
    {"__init__"},
    {"demo", "report", "cli", "__main__"},
]

ENGINES = {"serial", "threads", "processes", "torchrun"}
IMPURE = {"asyncio", "concurrent", "multiprocessing", "os", "queue", "signal", "socket", "subprocess", "threading"}
NOT_ON_IMPORT = ("transformers", "tensordict", "torch_geometric", "rich")
MAY_USE_RICH = {"demo", "report", "cli"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package goes by the name of its folder."""
    found = {}
    for path in sorted(SOURCE.joinpath("instep").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """The part of the house a module is in: the folder or file directly under the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floor(module: str) -> int:
    return next((number for number, rooms in enumerate(FLOORS) if room(module) in rooms), -1)


@functools.cache
def imported(module: str) -> tuple[tuple[str, int], ...]:
    """Each dotted name that a module imports, at its top or inside functions, with the line it stands on."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(_imported(ast.parse(path.read_text("utf-8")), package))


def _imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    above = parents[: len(parents) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def ours(module: str) -> Iterator[tuple[str, int]]:
    """The modules of the package that a module imports, each with the line."""
    names = ((name, line) for name, line in imported(module) if name.split(".")[0] == "instep")
    # The last part of `from a import b` is a module or something inside one.
    found = ((name if name in modules() else name.rpartition(".")[0] or name, line) for name, line in names)
    yield from dict.fromkeys(found)


def place(module: str, line: int) -> str:
    return f"{modules()[module].relative_to(SOURCE)}:{line}"


def test_every_module_has_a_floor() -> None:
    homeless = {room(module) for module in modules() if floor(module) < 0}
    assert not homeless, "give each of these a place in FLOORS"


def test_every_room_is_on_one_floor() -> None:
    rooms = [name for on_floor in FLOORS for name in on_floor]
    assert len(rooms) == len(set(rooms))


def test_files_are_short() -> None:
    lines = {module: len(path.read_text("utf-8").splitlines()) for module, path in modules().items()}
    long = {module: count for module, count in lines.items() if count > LINES_AT_MOST}
    assert not long, "each of these holds more than one idea"


def test_imports_go_down() -> None:
    upward = [
        f"{place(module, line)} imports {target}"
        for module in modules()
        for target, line in ours(module)
        if floor(target) > floor(module)
    ]
    assert not upward


def test_imports_name_modules_that_exist() -> None:
    missing = [
        f"{place(module, line)} imports {target}"
        for module in modules()
        for target, line in ours(module)
        if target not in modules()
    ]
    assert not missing


def test_nothing_imports_in_a_circle() -> None:
    graph = {module: set(_needed(module)) - {module} for module in modules()}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("these import one another: " + " <- ".join(error.args[1]), pytrace=False)


def _needed(module: str) -> Iterator[str]:
    """What has to be imported before a module: what it names, and the packages around that which are not around it."""
    for target, _ in ours(module):
        yield target
        while target := target.rpartition(".")[0]:
            if not f"{module}.".startswith(f"{target}."):
                yield target


def test_engines_never_import_one_another() -> None:
    def engine(module: str) -> str | None:
        parts = module.split(".")
        return parts[2] if parts[1:2] == ["engines"] and len(parts) > 2 and parts[2] in ENGINES else None

    across = [
        f"{place(module, line)} imports {target}"
        for module in modules()
        if engine(module)
        for target, line in ours(module)
        if engine(target) not in {None, engine(module)}
    ]
    assert not across


def test_structure_is_pure() -> None:
    impure = [
        f"{place(module, line)} imports {name}"
        for module in modules()
        if room(module) == "structure"
        for name, line in imported(module)
        if name.split(".")[0] in IMPURE
    ]
    assert not impure


def test_only_the_command_line_uses_rich() -> None:
    elsewhere = [
        f"{place(module, line)} imports {name}"
        for module in modules()
        if room(module) not in MAY_USE_RICH
        for name, line in imported(module)
        if name.split(".")[0] == "rich"
    ]
    assert not elsewhere


def test_import_instep_brings_no_optional_package() -> None:
    code = f"""
import sys
import torch
before = set(sys.modules)
import instep
print(*[name for name in {NOT_ON_IMPORT} if name in sys.modules and name not in before])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr
