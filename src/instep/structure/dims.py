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
from instep.structure.tree import Path, open_node, show_path

AUTO = "auto"
SAMPLES = "samples"


@dataclass(frozen=True)
class Declared:
    """What was declared for one place of a structure, and for the places below it."""

    spec: Any
    dim: int
    """The batch dim where nothing is declared."""
    patterns: tuple[tuple[str, Any], ...] = ()

    @property
    def auto(self) -> bool:
        return isinstance(self.spec, str) and self.spec == AUTO

    @property
    def samples(self) -> bool:
        return isinstance(self.spec, str) and self.spec == SAMPLES

    @property
    def batch_dim(self) -> int:
        return self.dim if self.spec in (AUTO, SAMPLES) else int(self.spec)

    @property
    def is_dim(self) -> bool:
        return isinstance(self.spec, int) and not isinstance(self.spec, bool)

    def below(self, key: Any, path: Path) -> Declared:
        """The declaration for the child `key`, which lies at `path`."""
        for pattern, spec in self.patterns:
            if fnmatchcase(show_path(path), pattern):
                return Declared(spec, self.dim, self.patterns)
        if self.spec is None or self.is_dim or isinstance(self.spec, str):
            spec = AUTO if self.samples else self.spec
            return Declared(spec, self.dim, self.patterns)
        return Declared(_child(self.spec, key, path), self.dim, self.patterns)


def _child(spec: Any, key: Any, path: Path) -> Any:
    if isinstance(spec, Mapping):
        return spec.get(key, AUTO)
    node = open_node(spec)
    if node is None:
        raise StructureError(f"in_dims has {spec!r} above {show_path(path)!r}: write an int, None, 'samples' or 'auto'.")
    for name, child in zip(node.keys, node.children):
        if name == key:
            return child
    return AUTO


def declared_below(spec: Any, names: Sequence[str], dim: int) -> list[Declared]:
    """The declaration for each argument."""
    if isinstance(spec, Mapping):
        patterns = tuple((str(key), value) for key, value in spec.items())
        root = Declared(AUTO, dim, patterns)
        return [root.below(name, (name,)) for name in names]
    if isinstance(spec, (tuple, list)):
        if len(spec) > len(names):
            raise StructureError(f"in_dims has {len(spec)} entries for a call with {len(names)} argument(s).")
        return [Declared(spec[index] if index < len(spec) else AUTO, dim) for index in range(len(names))]
    return [Declared(spec, dim) for _ in names]


def declared_dims(spec: Any) -> set[int]:
    """Every dim that a declaration names."""
    if isinstance(spec, int) and not isinstance(spec, bool):
        return {spec}
    node = None if isinstance(spec, str) else open_node(spec)
    return set().union(*(declared_dims(child) for child in node.children)) if node is not None else set()
