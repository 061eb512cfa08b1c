"""The words of structure errors: the path, both sides, and the line to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from instep.errors import StructureError
from instep.structure.tree import Path, show_path


def summary(value: Any) -> str:
    """A value in a few words: its type and shape or length, never its data."""
    name = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"{name} of {len(value)}"
    return name


def _line(path: Path, spec: object) -> str:
    return f"in_dims={{{show_path(path)!r}: {spec!r}}}"


def misfit_message(
    proposals: Sequence[Any], misfits: Mapping[int, Any], values: Sequence[Any], names: Sequence[str], dim: int
) -> StructureError:
    """No size fits every argument: say what each proposes, which leaf stands out, and what to write."""
    votes = Counter(proposal.size for proposal in proposals if proposal.size in misfits)
    size = max(votes, key=lambda candidate: (votes[candidate], candidate != 1, -list(misfits).index(candidate)))
    misfit = misfits[size]
    lines = [
        f"cannot share out this call: {show_path(misfit.path)!r} ({summary(misfit.value)}) does not fit a batch of "
        f"{size}: {misfit.why}.",
        "Sizes seen: " + "; ".join(f"{show_path(p.path)}: {p.what}" for p in proposals) + ".",
        "Write one of:",
        f"  {_line(misfit.path, None)}   # every replica gets it whole (or pass instep.whole(...))",
    ]
    shape = list(getattr(misfit.value, "shape", ()))
    for other, length in enumerate(shape):
        if length == size and other != dim:
            lines.append(f"  {_line(misfit.path, other)}   # its batch is in dim {other}, whose size is {size}")
    if isinstance(misfit.value, (list, tuple)) or _inside_sequence(misfit.path, values, names):
        owner = _sequence_above(misfit.path, values, names) or misfit.path
        lines.append(f"  {_line(owner, 'samples')}   # it has one entry a sample")
    return StructureError("\n".join(lines))


def _sequence_above(path: Path, values: Sequence[Any], names: Sequence[str]) -> Path | None:
    """The list or tuple nearest above a leaf, where there is one."""
    value = dict(zip(names, values)).get(path[0])
    above: Path | None = (path[0],) if isinstance(value, (list, tuple)) and len(path) > 1 else None
    for depth, key in enumerate(path[1:], start=1):
        try:
            value = value[key]  # type: ignore[index]
        except (TypeError, KeyError, IndexError):
            value = getattr(value, str(key), None)
        if isinstance(value, (list, tuple)) and depth + 1 < len(path):
            above = path[: depth + 1]
    return above


def _inside_sequence(path: Path, values: Sequence[Any], names: Sequence[str]) -> bool:
    return _sequence_above(path, values, names) is not None


def ambiguous_sizes(proposals: Sequence[Any], fits: Mapping[int, Any]) -> StructureError:
    """More than one size fits every argument: show where each comes from and the line that decides."""
    lines = [f"cannot tell the batch: {' and '.join(str(size) for size in fits)} both fit every argument."]
    for proposal in proposals:
        if proposal.size in fits:
            entry = "samples" if " of " in proposal.what else 0
            line = _line(proposal.path, entry)
            lines.append(f"  {line}   # a batch of {proposal.size}: {show_path(proposal.path)} is a {proposal.what}")
    lines.insert(1, "Write the line that is meant:")
    return StructureError("\n".join(dict.fromkeys(lines)))


def two_readings(value: Any, path: Path) -> StructureError:
    """A list that fits both as samples and as a structure of batched leaves."""
    return StructureError(
        f"cannot tell how to read {show_path(path)!r} ({summary(value)}): it fits as one entry a sample and as a structure "
        f"of batched leaves.\nWrite the line that is meant:\n"
        f"  {_line(path, 'samples')}   # one entry a sample\n"
        f"  {_line(path, 0)}   # every entry holds the whole batch in dim 0"
    )


def unusable(value: Any, path: Path) -> StructureError:
    """An argument of a type that cannot be shared out or handed over."""
    where, name = show_path(path), type(value).__name__
    if isinstance(value, nn.Module):
        return StructureError(
            f"{where!r} is a module ({name}): a module passed as an argument would stay on one device.\n"
            f"Make it a submodule of the wrapped module, or wrap it in instep.DataParallel by itself."
        )
    if isinstance(value, Iterator):
        return StructureError(
            f"{where!r} is an iterator ({name}): it can be read only once, so it cannot be shared out.\n"
            f"Write list(...) around it."
        )
    return StructureError(
        f"{where!r} is a {name}, which holds tensors, and instep has not been told how to split it.\n"
        f"Write, once:\n"
        f"  instep.register({name}, size=lambda v: ..., split=lambda v, sizes: [...], merge=lambda parts: ...)\n"
        f"or hand it to every replica with instep.whole(...)."
    )


def wrong_shards(path: Path, given: int, wanted: int) -> StructureError:
    """A `Shards` whose number of entries does not match the replicas."""
    return StructureError(
        f"{show_path(path)!r} is Shards of {given} entries, but this call uses {wanted} replica(s): "
        f"give one entry for each replica."
    )
