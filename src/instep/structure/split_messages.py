"""Messages for arguments that cannot be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from instep.errors import StructureError
from instep.structure.shapes import shape_of
from instep.structure.tree import Path, flatten_one_level, format_path, is_sequence

MAX_CANDIDATES_SHOWN = 12


def summarize(value: Any) -> str:
    """A value in a few words: its type and shape or length, never its data."""
    name = type(value).__name__
    if getattr(value, "is_nested", False):
        return f"nested {name} of {value.size(0)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"{name} of {len(value)}"
    return name


def _in_dims_line(path: Path, spec: object) -> str:
    where = format_path(path)
    return f"in_dims={{{where!r}: {spec!r}}}" if where else f"in_dims={spec!r}"


def _quote_path(path: Path) -> str:
    where = format_path(path)
    return repr(where) if where else "the value"


def size_mismatch_error(
    proposals: Sequence[Any], misfits: Mapping[int, Any], values: Sequence[Any], names: Sequence[str], dim: int
) -> StructureError:
    """No size fits every argument: say what each proposes, which leaf stands out, and what to write."""
    size = _likely_batch_size([p for p in proposals if p.size in misfits], values, names)
    misfit = misfits[size]
    # Where there are many, those that speak for this size come first.
    seen = sorted(proposals, key=lambda p: p.size != size) if len(proposals) > MAX_CANDIDATES_SHOWN else proposals
    lines = [
        f"cannot share out this call: {_quote_path(misfit.path)} ({summarize(misfit.value)}) does not fit a batch of "
        f"{size}: {misfit.reason}.",
        "Sizes seen: " + _truncate_list([f"{_quote_path(p.path)}: {p.description}" for p in seen], "; ") + ".",
        "Write one of:",
        f"  {_in_dims_line(misfit.path, None)}   # every replica gets it whole (or pass instep.whole(...))",
    ]
    shape = shape_of(misfit.value)
    for other, length in enumerate(shape):
        if length == size and other != dim:
            lines.append(f"  {_in_dims_line(misfit.path, other)}   # its batch is in dim {other}, whose size is {size}")
    owner = misfit.path if is_sequence(misfit.value) else _enclosing_sequence(misfit.path, values, names)
    if owner is not None:
        lines.append(f"  {_in_dims_line(owner, 'samples')}   # it has one entry a sample")
    return StructureError("\n".join(lines))


def _likely_batch_size(proposals: Sequence[Any], values: Sequence[Any], names: Sequence[str]) -> int:
    """The declared size, else that of most arguments, in doubt of the first; inside a list may be samples: no vote."""
    sure = [p for p in proposals if p.is_declared] or proposals
    counted = [p for p in sure if _enclosing_sequence(p.path, values, names, list) is None] or sure
    counted = [p for p in counted if p.size != 1] or counted
    votes: list[int] = []
    for name in names:
        sizes = Counter(proposal.size for proposal in counted if proposal.path[0] == name)
        votes += [size for size, _ in sizes.most_common(1)]
    counts = Counter(votes)
    return max(counts, key=lambda size: counts[size])


def _truncate_list(items: Sequence[str], between: str) -> str:
    more = [f"and {len(items) - MAX_CANDIDATES_SHOWN} more"] if len(items) > MAX_CANDIDATES_SHOWN else []
    return between.join([*items[:MAX_CANDIDATES_SHOWN], *more])


def _enclosing_sequence(
    path: Path, values: Sequence[Any], names: Sequence[str], kind: type | tuple[type, ...] = (list, tuple)
) -> Path | None:
    """The list or tuple nearest above a leaf, where there is one."""
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
    proposals: Sequence[Any], fits: Mapping[int, Any], values: Sequence[Any], names: Sequence[str]
) -> StructureError:
    """More than one size fits every argument: show where each comes from and the line that decides."""
    each = "both" if len(fits) == 2 else "all"
    lines = [f"cannot tell the batch: {' and '.join(str(size) for size in fits)} {each} fit every argument."]
    lines.append("Write the line that is meant:")
    for proposal in proposals:
        if proposal.size in fits:
            # What decides is how the list is read, not one of its entries.
            owner = _enclosing_sequence(proposal.path, values, names) or proposal.path
            line = _in_dims_line(owner, proposal.suggested_spec)
            lines.append(f"  {line}   # a batch of {proposal.size}: {_quote_path(owner)}, {proposal.description}")
    unique = {line.partition("   #")[0]: line for line in reversed(lines)}
    return StructureError("\n".join(list(unique.values())[::-1]))


def ambiguous_sequence(value: Any, path: Path, dim: int) -> StructureError:
    """A list that fits both as samples and as a structure of batched leaves."""
    return StructureError(
        f"cannot tell how to read {_quote_path(path)} ({summarize(value)}): it fits as one entry a sample and as a structure "
        f"of batched leaves.\nWrite the line that is meant:\n"
        f"  {_in_dims_line(path, 'samples')}   # one entry a sample\n"
        f"  {_in_dims_line(path, dim)}   # every entry holds the whole batch in dim {dim}"
    )


def unexpected_dim_structure(value: Any, path: Path, spec: Any) -> StructureError:
    """A structure of dims where the argument has none."""
    return StructureError(
        f"in_dims has {spec!r} for {_quote_path(path)}, which is a {summarize(value)}.\n"
        f"Write one dim for it, as in:\n  {_in_dims_line(path, 0)}"
    )


def unsupported_argument(value: Any, path: Path) -> StructureError:
    """An argument of a type that cannot be shared out or handed over."""
    where, name = _quote_path(path), type(value).__name__
    if isinstance(value, nn.Module):
        return StructureError(
            f"{where} is a module ({name}): a module passed as an argument would stay on one device.\n"
            f"Make it a submodule of the wrapped module, or wrap it in instep.DataParallel by itself."
        )
    if isinstance(value, Iterator):
        return StructureError(
            f"{where} is an iterator ({name}): it can be read only once, so it cannot be shared out.\n"
            f"Write list(...) around it."
        )
    return StructureError(
        f"{where} is a {name}, which holds tensors, and instep has not been told how to split it.\n"
        f"Write, once:\n"
        f"  instep.register({name}, size=lambda v: ..., split=lambda v, sizes: [...], merge=lambda parts: ...)\n"
        f"or hand it to every replica with instep.whole(...)."
    )


def cannot_split(path: Path, value: Any, why: str) -> StructureError:
    """A value whose own type says that it cannot be measured or split."""
    return StructureError(
        f"cannot share out this call: {_quote_path(path)} ({summarize(value)}): {why}.\n"
        f"If every replica needs all of it:  {_in_dims_line(path, None)}   # or pass instep.whole(...)"
    )


def shard_count_mismatch(path: Path, given: int, wanted: int) -> StructureError:
    """A `Shards` whose number of entries does not match the replicas."""
    return StructureError(
        f"{_quote_path(path)} is Shards of {given} entries, but this call uses {wanted} replica(s): "
        f"give one entry for each replica."
    )


def shard_size_mismatch(path: Path, given: Sequence[Any], other: Path, wanted: Sequence[Any]) -> StructureError:
    """Two `Shards` of one call that were not split alike."""
    return StructureError(
        f"{_quote_path(path)} is Shards of {list(given)} samples, but {_quote_path(other)} is Shards of {list(wanted)}: "
        f"split them alike."
    )


def inconsistent_reading(path: Path, value: Any, why: str) -> StructureError:
    """A place that cannot be read as it was read before, in a call that proposes no batch."""
    return StructureError(
        f"cannot share out this call: {format_path(path)!r} ({summarize(value)}) does not fit: {why}.\n"
        f"Say how it is meant:  {_in_dims_line(path, 'samples')}   # one entry a sample;  or None to hand it over whole"
    )
