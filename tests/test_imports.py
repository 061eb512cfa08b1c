"""Import rules: a folder imports only from folders below it, and there is no import cycle.

Imports inside functions count, and so do modules that are named in strings (`"instep.engines.serial:SerialEngine"`).
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MAX_LINES = 700

# Lowest first. `__init__` is above the modules whose names it exports, and below the command line.
FLOORS = (
    "errors",
    "runtime",
    "structure",
    "devices",
    "replicas",
    "autograd",
    "collectives",
    "engines",
    "probe",
    "call",
    "parallel",
    "functional",
    "__init__",
    "cli",
    "__main__",
)
PROCESSES = "instep.engines.processes"
PROCESSES_FLOORS = ("messages", "serialization", "transport", "nccl", "lifecycle", "worker", "controller", "engine")
BOOTSTRAP = f"{PROCESSES}.lifecycle.bootstrap"
"""The script that a worker process runs. No module imports it. It names the modules that the worker loads."""

ENGINES = {"serial", "threads", "processes", "torchrun"}
IMPURE = {"asyncio", "concurrent", "multiprocessing", "os", "queue", "signal", "socket", "subprocess", "threading"}
NOT_ON_IMPORT = ("transformers", "tensordict", "torch_geometric", "rich")
MODULE_NAME = re.compile(r"instep(\.\w+)+(?=$|:\w+$)")


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by dotted name; a package has the name of its folder."""
    found = {}
    for path in sorted(SOURCE.joinpath("instep").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def entry(module: str) -> str:
    """The folder or file directly under the package that a module is in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floor(module: str) -> int:
    return FLOORS.index(entry(module))


def processes_floor(module: str) -> int | None:
    """The floor of a module inside the processes engine; None for other modules."""
    relative = module.removeprefix(f"{PROCESSES}.")
    return PROCESSES_FLOORS.index(relative.split(".")[0]) if relative != module else None


@functools.cache
def imported(module: str) -> tuple[tuple[str, int], ...]:
    """Each dotted name that a module imports or names in a string, with its line."""
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = MODULE_NAME.match(node.value)
            if named is not None and named.group() in modules():
                yield named.group(), node.lineno


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    above = parents[: len(parents) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def internal_imports(module: str) -> Iterator[tuple[str, int]]:
    """The modules of the package that a module imports, each with its line."""
    names = ((name, line) for name, line in imported(module) if name.split(".")[0] == "instep")
    # In `from a import b`, `b` is a module or a name in module `a`.
    found = ((name if name in modules() else name.rpartition(".")[0] or name, line) for name, line in names)
    yield from dict.fromkeys(found)


def location(module: str, line: int) -> str:
    return f"{modules()[module].relative_to(SOURCE)}:{line}"


def test_the_package_contains_exactly_the_listed_entries() -> None:
    folder = SOURCE / "instep"
    found = {path.stem for path in folder.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert found == set(FLOORS)
    assert (folder / "py.typed").exists()


def test_files_are_not_too_long() -> None:
    lines = {module: len(path.read_text("utf-8").splitlines()) for module, path in modules().items()}
    assert not {module: count for module, count in lines.items() if count > MAX_LINES}


def test_imports_point_down() -> None:
    upward = [
        f"{location(module, line)} imports {target}"
        for module in modules()
        for target, line in internal_imports(module)
        if floor(target) > floor(module)
    ]
    assert not upward


def test_imports_inside_the_processes_engine_point_down() -> None:
    upward = [
        f"{location(module, line)} imports {target}"
        for module in modules()
        if module != BOOTSTRAP and not _names_entry_point(module)
        for target, line in internal_imports(module)
        if (processes_floor(target) or 0) > (processes_floor(module) or 0) and processes_floor(module) is not None
    ]
    assert not upward


def _names_entry_point(module: str) -> bool:
    """`lifecycle.process` passes the name of the worker's main function to the bootstrap script."""
    return module == f"{PROCESSES}.lifecycle.process"


def test_no_module_imports_the_bootstrap_script() -> None:
    users = [module for module in modules() if any(target == BOOTSTRAP for target, _ in internal_imports(module))]
    assert not users


def test_imports_name_modules_that_exist() -> None:
    missing = [
        f"{location(module, line)} imports {target}"
        for module in modules()
        for target, line in internal_imports(module)
        if target not in modules()
    ]
    assert not missing


def test_there_is_no_import_cycle() -> None:
    graph = {
        module: set(_required(module)) - {module}
        for module in modules()
        if module != BOOTSTRAP and not _names_entry_point(module)
    }
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]), pytrace=False)


def _required(module: str) -> Iterator[str]:
    """The modules that a module imports, and their parent packages except those that contain the module itself."""
    for target, _ in internal_imports(module):
        yield target
        while target := target.rpartition(".")[0]:
            if not f"{module}.".startswith(f"{target}."):
                yield target


def test_engines_do_not_import_one_another() -> None:
    def engine(module: str) -> str | None:
        parts = module.split(".")
        return parts[2] if parts[1:2] == ["engines"] and len(parts) > 2 and parts[2] in ENGINES else None

    across = [
        f"{location(module, line)} imports {target}"
        for module in modules()
        if engine(module)
        for target, line in internal_imports(module)
        if engine(target) not in {None, engine(module)}
    ]
    assert not across


def test_structure_is_pure() -> None:
    impure = [
        f"{location(module, line)} imports {name}"
        for module in modules()
        if entry(module) == "structure"
        for name, line in imported(module)
        if name.split(".")[0] in IMPURE
    ]
    assert not impure


def test_only_the_command_line_uses_rich() -> None:
    elsewhere = [
        f"{location(module, line)} imports {name}"
        for module in modules()
        if entry(module) != "cli"
        for name, line in imported(module)
        if name.split(".")[0] == "rich"
    ]
    assert not elsewhere


def test_importing_instep_imports_no_optional_package() -> None:
    code = f"""
import sys
import torch
before = set(sys.modules)
import instep
print(*[name for name in {NOT_ON_IMPORT} if name in sys.modules and name not in before])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr
