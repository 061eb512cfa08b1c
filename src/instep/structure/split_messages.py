"""Errors for arguments that cannot be split.

Each names the argument, gives the reason, and says what to decide. The probe tries the lines that may be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any

from torch import nn

from instep.errors import StructureError
from instep.structure.problems import SplitLine, split_error
from instep.structure.shapes import shape_of
from instep.structure.tree import Path, flatten_one_level, format_path, is_sequence

MAX_CANDIDATES_SHOWN = 12


def summarize(value: Any) -> str:
    """The type and the shape or length of a value."""
    name = type(value).__name__
    if getattr(value, "is_nested", False):
        return f"nested {name} of {value.size(0)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"{name} of {len(value)}"
    return name


_WHOLE = "every replica gets all of it (or pass instep.whole(...))"


def _line(path: Path, spec: object, condition: str) -> SplitLine:
    return SplitLine(format_path(path), spec, condition)


def _quote_path(path: Path) -> str:
    where = format_path(path)
    return repr(where) if where else "the structure"


def _argument(path: Path) -> str:
    """What a path refers to: an argument of a call, or an entry of the structure that `split` or `scatter` got."""
    where = format_path(path)
    if path[0] == "":
        return f"entry {where!r}" if where else "the structure"
    return f"argument {where!r}"


def size_mismatch_error(
    candidates: Sequence[Any], mismatches: Mapping[int, Any], values: Sequence[Any], names: Sequence[str], dim: int
) -> StructureError:
    """No batch size matches every argument. Names the leaf that does not match the likely batch size."""
    size = _likely_batch_size([p for p in candidates if p.size in mismatches], values, names)
    mismatch = mismatches[size]
    # The message is truncated: list the candidates for this size first.
    seen = sorted(candidates, key=lambda p: p.size != size) if len(candidates) > MAX_CANDIDATES_SHOWN else candidates
    headline = (
        f"cannot split {_argument(mismatch.path)} ({summarize(mismatch.value)}) for a batch of {size}: "
        f"{mismatch.reason}.\n"
        f"Sizes found: {_truncate_list([f'{_quote_path(p.path)}: {p.description}' for p in seen], '; ')}."
    )
    lines = [_line(mismatch.path, None, _WHOLE)]
    shape = shape_of(mismatch.value)
    for other, length in enumerate(shape):
        if length == size and other != dim:
            lines.append(_line(mismatch.path, other, f"the batch is dim {other}, which has size {size}"))
    owner = mismatch.path if is_sequence(mismatch.value) else _enclosing_sequence(mismatch.path, values, names)
    if owner is not None:
        lines.append(_line(owner, "samples", "it has one entry per sample"))
    return split_error(headline, *lines)


def _likely_batch_size(candidates: Sequence[Any], values: Sequence[Any], names: Sequence[str]) -> int:
    """The declared size, or else the size of most arguments. Leaves in lists are ignored: they may be samples."""
    sure = [p for p in candidates if p.is_declared] or candidates
    counted = [p for p in sure if _enclosing_sequence(p.path, values, names, list) is None] or sure
    counted = [p for p in counted if p.size != 1] or counted
    votes: list[int] = []
    for name in names:
        sizes = Counter(candidate.size for candidate in counted if candidate.path[0] == name)
        votes += [size for size, _ in sizes.most_common(1)]
    counts = Counter(votes)
    return max(counts, key=lambda size: counts[size])


def _truncate_list(items: Sequence[str], between: str) -> str:
    more = [f"and {len(items) - MAX_CANDIDATES_SHOWN} more"] if len(items) > MAX_CANDIDATES_SHOWN else []
    return between.join([*items[:MAX_CANDIDATES_SHOWN], *more])


def _enclosing_sequence(
    path: Path, values: Sequence[Any], names: Sequence[str], kind: type | tuple[type, ...] = (list, tuple)
) -> Path | None:
    """The path of the innermost list or tuple that contains a leaf, if any."""
    value = dict(zip(names, values, strict=True)).get(path[0])
    above = None
    for depth, key in enumerate(path[1:], start=1):
        if is_sequence(value) and isinstance(value, kind):
            above = path[:depth]
        node = flatten_one_level(value)
        assert node is not None
        value = dict(zip(node.keys, node.children, strict=True))[key]
    return above


def ambiguous_batch_size(
    candidates: Sequence[Any], matches: Mapping[int, Any], values: Sequence[Any], names: Sequence[str]
) -> StructureError:
    """More than one batch size matches every argument."""
    each, what = "both" if len(matches) == 2 else "all", "argument" if names[0] else "entry"
    sizes = " and ".join(str(size) for size in matches)
    lines: dict[tuple[Path, Any], SplitLine] = {}
    for candidate in candidates:
        if candidate.size in matches:
            # The list decides, not one of its entries.
            owner = _enclosing_sequence(candidate.path, values, names) or candidate.path
            condition = f"the batch has {candidate.size} samples ({candidate.description})"
            lines.setdefault((owner, candidate.suggested_spec), _line(owner, candidate.suggested_spec, condition))
    return split_error(f"cannot determine the batch size: {sizes} {each} match every {what}.", *list(lines.values()))


def ambiguous_sequence(value: Any, path: Path, dim: int) -> StructureError:
    """A list that may have one entry per sample or be a structure of batched leaves."""
    return split_error(
        f"cannot determine how to split {_argument(path)} ({summarize(value)}): it may have one entry per sample or "
        f"be a structure of batched leaves.",
        _line(path, "samples", "it has one entry per sample"),
        _line(path, dim, f"every entry has the batch in dim {dim}"),
    )


def unexpected_dim_structure(value: Any, path: Path, spec: Any) -> StructureError:
    """A structured specification for a leaf."""
    return StructureError(
        f"in_dims has {spec!r} for {_argument(path)}, which is a {summarize(value)}. Give it one dim, or None."
    )


def unsupported_argument(value: Any, path: Path) -> StructureError:
    """An argument of a type that can be neither split nor replicated."""
    where, name = _argument(path), type(value).__name__
    if isinstance(value, nn.Module):
        return StructureError(
            f"{where} is a module ({name}): a module passed as an argument would stay on one device.\n"
            f"Make it a submodule of the wrapped module, or wrap it in instep.DataParallel by itself."
        )
    if isinstance(value, Iterator):
        return StructureError(
            f"{where} is an iterator ({name}), which can be read only once and so cannot be split.\n"
            f"Pass list(...) instead."
        )
    if isinstance(value, (Set, ValuesView)):
        return StructureError(
            f"{where} is a {name} of tensors, which has no positions to split.\nPass a list or tuple."
        )
    return StructureError(
        f"cannot split {where}: it is a {name}, which contains tensors and is not a registered type.\n"
        f"Write once:\n"
        f"  instep.register({name}, size=lambda v: ..., split=lambda v, sizes: [...], merge=lambda parts: ...)\n"
        f"or pass it to every replica with instep.whole(...)."
    )


def cannot_split(path: Path, value: Any, reason: str) -> StructureError:
    """A value whose type handler cannot split it."""
    return split_error(f"cannot split {_argument(path)} ({summarize(value)}): {reason}.", _line(path, None, _WHOLE))


def shard_count_mismatch(path: Path, given: int, wanted: int) -> StructureError:
    """A `Shards` argument with the wrong number of entries."""
    return StructureError(
        f"{_argument(path)} is Shards of {given} entries, but the call uses {wanted} replica(s). "
        f"Pass one entry per replica."
    )


def shard_size_mismatch(path: Path, given: Sequence[Any], other: Path, wanted: Sequence[Any]) -> StructureError:
    """Two `Shards` arguments with different sizes."""
    return StructureError(
        f"{_argument(path)} is Shards of {list(given)} samples, but {_argument(other)} is Shards of {list(wanted)} "
        f"samples. Split both into the same sizes."
    )


def inconsistent_reading(path: Path, value: Any, reason: str) -> StructureError:
    """A list that does not match its first interpretation, in a call without a batch."""
    return split_error(
        f"cannot split {_argument(path)} ({summarize(value)}): {reason}.",
        _line(path, "samples", "it has one entry per sample"),
        _line(path, None, _WHOLE),
    )
