"""The words of structure errors: the path, both sides, and the line to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from instep.errors import StructureError
from instep.structure.shapes import shape_of
from instep.structure.tree import Path, is_sequence, open_node, show_path

SHOWN = 12


def summary(value: Any) -> str:
    """A value in a few words: its type and shape or length, never its data."""
    name = type(value).__name__
    if getattr(value, "is_nested", False):
        return f"nested {name} of {value.size(0)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"{name} of {len(value)}"
    return name


def _line(path: Path, spec: object) -> str:
    where = show_path(path)
    return f"in_dims={{{where!r}: {spec!r}}}" if where else f"in_dims={spec!r}"


def _place(path: Path) -> str:
    where = show_path(path)
    return repr(where) if where else "the value"


def misfit_message(
    proposals: Sequence[Any], misfits: Mapping[int, Any], values: Sequence[Any], names: Sequence[str], dim: int
) -> StructureError:
    """No size fits every argument: say what each proposes, which leaf stands out, and what to write."""
    size = _likely_size([p for p in proposals if p.size in misfits], values, names)
    misfit = misfits[size]
    # Where there are many, those that speak for this size come first.
    seen = sorted(proposals, key=lambda p: p.size != size) if len(proposals) > SHOWN else proposals
    lines = [
        f"cannot share out this call: {_place(misfit.path)} ({summary(misfit.value)}) does not fit a batch of "
        f"{size}: {misfit.why}.",
        "Sizes seen: " + _cut_short([f"{_place(p.path)}: {p.what}" for p in seen], "; ") + ".",
        "Write one of:",
        f"  {_line(misfit.path, None)}   # every replica gets it whole (or pass instep.whole(...))",
    ]
    shape = shape_of(misfit.value)
    for other, length in enumerate(shape):
        if length == size and other != dim:
            lines.append(f"  {_line(misfit.path, other)}   # its batch is in dim {other}, whose size is {size}")
    owner = misfit.path if is_sequence(misfit.value) else _sequence_above(misfit.path, values, names)
    if owner is not None:
        lines.append(f"  {_line(owner, 'samples')}   # it has one entry a sample")
    return StructureError("\n".join(lines))


def _likely_size(proposals: Sequence[Any], values: Sequence[Any], names: Sequence[str]) -> int:
    """The declared size, else that of most arguments, in doubt of the first; inside a list may be samples: no vote."""
    sure = [p for p in proposals if p.declared] or proposals
    counted = [p for p in sure if _sequence_above(p.path, values, names, list) is None] or sure
    counted = [p for p in counted if p.size != 1] or counted
    votes: list[int] = []
    for name in names:
        sizes = Counter(proposal.size for proposal in counted if proposal.path[0] == name)
        votes += [size for size, _ in sizes.most_common(1)]
    counts = Counter(votes)
    return max(counts, key=lambda size: counts[size])


def _cut_short(items: Sequence[str], between: str) -> str:
    more = [f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return between.join([*items[:SHOWN], *more])


def _sequence_above(
    path: Path, values: Sequence[Any], names: Sequence[str], kind: type | tuple[type, ...] = (list, tuple)
) -> Path | None:
    """The list or tuple nearest above a leaf, where there is one."""
    value = dict(zip(names, values, strict=True)).get(path[0])
    above = None
    for depth, key in enumerate(path[1:], start=1):
        if is_sequence(value) and isinstance(value, kind):
            above = path[:depth]
        node = open_node(value)
        assert node is not None
        value = dict(zip(node.keys, node.children, strict=True))[key]
    return above


def ambiguous_sizes(
    proposals: Sequence[Any], fits: Mapping[int, Any], values: Sequence[Any], names: Sequence[str]
) -> StructureError:
    """More than one size fits every argument: show where each comes from and the line that decides."""
    each = "both" if len(fits) == 2 else "all"
    lines = [f"cannot tell the batch: {' and '.join(str(size) for size in fits)} {each} fit every argument."]
    lines.append("Write the line that is meant:")
    for proposal in proposals:
        if proposal.size in fits:
            # What decides is how the list is read, not one of its entries.
            owner = _sequence_above(proposal.path, values, names) or proposal.path
            line = _line(owner, proposal.spec)
            lines.append(f"  {line}   # a batch of {proposal.size}: {_place(owner)}, {proposal.what}")
    unique = {line.partition("   #")[0]: line for line in reversed(lines)}
    return StructureError("\n".join(list(unique.values())[::-1]))


def two_readings(value: Any, path: Path, dim: int) -> StructureError:
    """A list that fits both as samples and as a structure of batched leaves."""
    return StructureError(
        f"cannot tell how to read {_place(path)} ({summary(value)}): it fits as one entry a sample and as a structure "
        f"of batched leaves.\nWrite the line that is meant:\n"
        f"  {_line(path, 'samples')}   # one entry a sample\n"
        f"  {_line(path, dim)}   # every entry holds the whole batch in dim {dim}"
    )


def structured_dims(value: Any, path: Path, spec: Any) -> StructureError:
    """A structure of dims where the argument has none."""
    return StructureError(
        f"in_dims has {spec!r} for {_place(path)}, which is a {summary(value)}.\n"
        f"Write one dim for it, as in:\n  {_line(path, 0)}"
    )


def unusable(value: Any, path: Path) -> StructureError:
    """An argument of a type that cannot be shared out or handed over."""
    where, name = _place(path), type(value).__name__
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


def cannot_cut(path: Path, value: Any, why: str) -> StructureError:
    """A value whose own type says that it cannot be measured or split."""
    return StructureError(
        f"cannot share out this call: {_place(path)} ({summary(value)}): {why}.\n"
        f"If every replica needs all of it:  {_line(path, None)}   # or pass instep.whole(...)"
    )


def wrong_shards(path: Path, given: int, wanted: int) -> StructureError:
    """A `Shards` whose number of entries does not match the replicas."""
    return StructureError(
        f"{_place(path)} is Shards of {given} entries, but this call uses {wanted} replica(s): "
        f"give one entry for each replica."
    )


def unequal_shards(path: Path, given: Sequence[Any], other: Path, wanted: Sequence[Any]) -> StructureError:
    """Two `Shards` of one call that were not split alike."""
    return StructureError(
        f"{_place(path)} is Shards of {list(given)} samples, but {_place(other)} is Shards of {list(wanted)}: "
        f"split them alike."
    )


def unread(path: Path, value: Any, why: str) -> StructureError:
    """A place that cannot be read as it was read before, in a call that proposes no batch."""
    return StructureError(
        f"cannot share out this call: {show_path(path)!r} ({summary(value)}) does not fit: {why}.\n"
        f"Say how it is meant:  {_line(path, 'samples')}   # one entry a sample;  or None to hand it over whole"
    )
