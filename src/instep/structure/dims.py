"""`in_dims` and `out_dims`: which dim holds the batch, declared as `torch.vmap` takes it or by name.

A declaration is an int (that dim), None (whole), `"samples"` (a list with one entry a sample), `"auto"`, or a structure
of these. A dictionary is read by the names of the arguments; its keys may be dotted paths with `*` and `?`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from instep.errors import StructureError
from instep.structure.tree import Path, open_node, show_path, specific_first

AUTO = "auto"
SAMPLES = "samples"


@dataclass(frozen=True)
class Declared:
    """What was declared for one place of a structure, and for the places below it."""

    spec: Any
    dim: int
    """The batch dim where nothing is declared."""
    patterns: tuple[tuple[str, Any], ...] = ()
    inherited: bool = False
    """Whether it was declared for a container above rather than for this place."""

    @property
    def auto(self) -> bool:
        return isinstance(self.spec, str) and self.spec == AUTO

    @property
    def samples(self) -> bool:
        return isinstance(self.spec, str) and self.spec == SAMPLES

    @property
    def is_dim(self) -> bool:
        return isinstance(self.spec, int)

    @property
    def is_plain(self) -> bool:
        """Whether it says one thing for everything here, rather than something for each entry."""
        return self.spec is None or isinstance(self.spec, (int, str))

    @property
    def batch_dim(self) -> int:
        return int(self.spec) if self.is_dim else self.dim

    def children(self, keys: Sequence[Any], path: Path) -> list[Declared]:
        """The declarations for the entries of a container that lies at `path`."""
        if self.auto:
            below = [self] * len(keys)
        elif self.is_plain:
            spec = AUTO if self.samples else self.spec
            below = [Declared(spec, self.dim, self.patterns, spec != AUTO)] * len(keys)
        else:
            below = [Declared(spec, self.dim, self.patterns) for spec in _spread(self.spec, keys, path)]
        if not self.patterns:
            return below
        return [self._matching((*path, key)) or child for key, child in zip(keys, below, strict=True)]

    def _matching(self, path: Path) -> Declared | None:
        where = show_path(path)
        for pattern, spec in self.patterns:
            if fnmatchcase(where, pattern):
                return Declared(spec, self.dim, self.patterns)
        return None


def _spread(spec: Any, keys: Sequence[Any], path: Path) -> list[Any]:
    """A structure of declarations over the entries of a container: by name where it has names, else by position."""
    if isinstance(spec, Mapping):
        return [spec.get(key, spec.get(str(key), AUTO)) for key in keys]
    node = open_node(spec)
    assert node is not None  # `check_dims` has seen to it
    if not isinstance(node.keys, range):
        return [dict(zip(node.keys, node.children, strict=True)).get(key, AUTO) for key in keys]
    if len(node.children) > len(keys):
        where = repr(show_path(path)) if show_path(path) else "the structure"
        raise StructureError(f"{len(node.children)} dims are declared for {where}, which has {len(keys)} entries.")
    return [*node.children, *[AUTO] * (len(keys) - len(node.children))]


def check_dims(spec: Any, option: str) -> None:
    """Refuse a declaration that means nothing, when it is given rather than when it is needed."""
    if spec is None or (isinstance(spec, int) and not isinstance(spec, bool)):
        return
    if isinstance(spec, str) and spec in (AUTO, SAMPLES):
        return
    node = None if isinstance(spec, (str, bool)) else open_node(spec)
    if node is None:
        raise StructureError(
            f"{option} has {spec!r}: write an int, None, 'samples', 'auto', or a structure of these that follows the "
            f"arguments by position or by name."
        )
    for child in node.children:
        check_dims(child, option)


def declared_root(spec: Any, dim: int) -> Declared:
    """The declaration for a structure without a name, such as an output: a dictionary is read by path or pattern."""
    if isinstance(spec, Mapping):
        return Declared(AUTO, dim, tuple(specific_first(spec.items()).items()))
    return Declared(spec, dim)


def declared_below(spec: Any, names: Sequence[str], dim: int) -> list[Declared]:
    """The declaration for each argument."""
    if isinstance(spec, Mapping):
        return declared_root(spec, dim).children(names, ())
    if isinstance(spec, (tuple, list)):
        if len(spec) > len(names):
            raise StructureError(f"in_dims has {len(spec)} entries for a call with {len(names)} argument(s).")
        return [Declared(spec[index] if index < len(spec) else AUTO, dim) for index in range(len(names))]
    return [Declared(spec, dim) for _ in names]


def dims_by_name(spec: Any, parameters: Sequence[str], rest: str | None = None) -> Any:
    """`in_dims` given by position, by the names of a signature: so a keyword means the same wherever it is written.

    >>> dims_by_name((0, None), ["x", "weight"])
    {'x': 0, 'weight': None}
    """
    if not isinstance(spec, (tuple, list)):
        return spec
    more = [f"{rest or 'args'}.{index}" for index in range(len(spec) - len(parameters))]
    return dict(zip([*parameters, *more], spec, strict=False))


def declared_dims(spec: Any) -> set[int]:
    """Every dim that a declaration names."""
    if isinstance(spec, int):
        return {spec}
    node = None if isinstance(spec, str) else open_node(spec)
    return set().union(*(declared_dims(child) for child in node.children)) if node is not None else set()
