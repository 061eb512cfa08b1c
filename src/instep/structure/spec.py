"""`in_dims` and `out_dims` specifications, and the `whole` and `Shards` argument wrappers.

A specification is an int (the batch dim), None (replicated), `"samples"` (one entry per sample), `"auto"`, or a
structure of these. The keys of a dictionary are argument names or dotted paths, which may contain `*` and `?`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from instep.errors import StructureError
from instep.structure.tree import Path, flatten_one_level, format_path, order_patterns

AUTO = "auto"
SAMPLES = "samples"


@dataclass(frozen=True)
class DimSpec:
    """The specification of a value and of its children."""

    value: Any
    default_dim: int
    """The batch dim if the specification is `"auto"`."""
    patterns: tuple[tuple[str, Any], ...] = ()
    is_inherited: bool = False
    """Whether the specification was given for an enclosing container."""

    @property
    def is_auto(self) -> bool:
        return isinstance(self.value, str) and self.value == AUTO

    @property
    def is_samples(self) -> bool:
        return isinstance(self.value, str) and self.value == SAMPLES

    @property
    def is_dim(self) -> bool:
        return isinstance(self.value, int)

    @property
    def is_uniform(self) -> bool:
        """Whether one specification applies to the whole value."""
        return self.value is None or isinstance(self.value, (int, str))

    @property
    def batch_dim(self) -> int:
        return int(self.value) if self.is_dim else self.default_dim

    def children(self, keys: Sequence[Any], path: Path) -> list[DimSpec]:
        """The specifications of the entries of the container at `path`."""
        if self.is_auto:
            children = [self] * len(keys)
        elif self.is_uniform:
            spec = AUTO if self.is_samples else self.value
            children = [DimSpec(spec, self.default_dim, self.patterns, spec != AUTO)] * len(keys)
        else:
            children = [
                DimSpec(spec, self.default_dim, self.patterns) for spec in _spec_per_entry(self.value, keys, path)
            ]
        if not self.patterns:
            return children
        return [self._match((*path, key)) or child for key, child in zip(keys, children, strict=True)]

    def _match(self, path: Path) -> DimSpec | None:
        where = format_path(path)
        for pattern, spec in self.patterns:
            if fnmatchcase(where, pattern):
                return DimSpec(spec, self.default_dim, self.patterns)
        return None


def _spec_per_entry(spec: Any, keys: Sequence[Any], path: Path) -> list[Any]:
    """Match the entries of a structured specification to container keys, by name or by position."""
    if isinstance(spec, Mapping):
        return [spec.get(key, spec.get(str(key), AUTO)) for key in keys]
    node = flatten_one_level(spec)
    assert node is not None  # checked by `validate_dims`
    if not isinstance(node.keys, range):
        return [dict(zip(node.keys, node.children, strict=True)).get(key, AUTO) for key in keys]
    if len(node.children) > len(keys):
        where = repr(format_path(path)) if format_path(path) else "the structure"
        raise StructureError(
            f"{len(node.children)} dims are given for {where}, which has {len(keys)} entries. Give one for each entry."
        )
    return [*node.children, *[AUTO] * (len(keys) - len(node.children))]


def validate_dims(spec: Any, option: str) -> None:
    """Raise `StructureError` if a specification is invalid."""
    if spec is None or (isinstance(spec, int) and not isinstance(spec, bool)):
        return
    if isinstance(spec, str) and spec in (AUTO, SAMPLES):
        return
    node = None if isinstance(spec, (str, bool)) else flatten_one_level(spec)
    if node is None:
        raise StructureError(
            f"{option} contains {spec!r}, which is not a dim. Write an int, None, 'samples', 'auto', or a structure of "
            f"these that matches the {'outputs' if option == 'out_dims' else 'arguments'} by position or by name."
        )
    for child in node.children:
        validate_dims(child, option)


def root_spec(spec: Any, dim: int) -> DimSpec:
    """The specification of an unnamed structure, such as an output. Dictionary keys are paths or patterns."""
    if isinstance(spec, Mapping):
        return DimSpec(AUTO, dim, tuple(order_patterns(spec.items()).items()))
    return DimSpec(spec, dim)


def argument_specs(spec: Any, names: Sequence[str], dim: int) -> list[DimSpec]:
    """The specification of each argument."""
    if isinstance(spec, Mapping):
        return root_spec(spec, dim).children(names, ())
    if isinstance(spec, (tuple, list)):
        if len(spec) > len(names):
            raise StructureError(
                f"in_dims has {len(spec)} entries for a call with {len(names)} argument(s). Give one for each argument."
            )
        return [DimSpec(spec[index] if index < len(spec) else AUTO, dim) for index in range(len(names))]
    return [DimSpec(spec, dim) for _ in names]


def dims_by_name(spec: Any, parameters: Sequence[str], rest: str | None = None) -> Any:
    """Convert positional `in_dims` to a dictionary keyed by parameter name.

    >>> dims_by_name((0, None), ["x", "weight"])
    {'x': 0, 'weight': None}
    """
    if not isinstance(spec, (tuple, list)):
        return spec
    more = [f"{rest or 'args'}.{index}" for index in range(len(spec) - len(parameters))]
    return dict(zip([*parameters, *more], spec, strict=False))


def collect_dims(spec: Any) -> set[int]:
    """All dims in a specification."""
    if isinstance(spec, int):
        return {spec}
    node = None if isinstance(spec, str) else flatten_one_level(spec)
    return set().union(*(collect_dims(child) for child in node.children)) if node is not None else set()


T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """An argument with information on how it is split."""

    value: Any

    def __post_init__(self) -> None:
        _record_mark_use()


class Whole(Mark):
    """An argument that is passed to every replica unsplit."""


class Shards:
    """An argument that is already split: one entry per replica, in order.

    >>> Shards([[1, 2], [3]])
    Shards([[1, 2], [3]])
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)
        if not self.parts:
            raise StructureError("Shards is empty. Pass one entry per replica.")
        _record_mark_use()

    def __repr__(self) -> str:
        return f"Shards({self.parts!r})"


def whole(value: T) -> T:
    """Pass `value` to every replica unsplit, for example `model(x, instep.whole(class_weights))`."""
    return Whole(value)  # type: ignore[return-value]


_marks_used = False


def _record_mark_use() -> None:
    global _marks_used
    _marks_used = True


def strip_marks(value: Any) -> Any:
    """Unwrap marks and `Shards` in a value, for a call that is not split."""
    return _strip_recursive(value) if _marks_used else value


def _strip_recursive(value: Any) -> Any:
    if isinstance(value, Mark):
        return value.value
    if isinstance(value, Shards):
        if len(value.parts) != 1:
            raise StructureError(
                f"Shards has {len(value.parts)} entries, but the call runs on one replica. Pass one entry."
            )
        return value.parts[0]
    node = flatten_one_level(value)
    if node is None:
        return value
    children = [_strip_recursive(child) for child in node.children]
    unchanged = all(new is old for new, old in zip(children, node.children, strict=True))
    return value if unchanged else node.unflatten(children)
