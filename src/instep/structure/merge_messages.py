"""Errors for outputs that cannot be merged, with the rules that the user can set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instep.errors import MergeError
from instep.structure.shapes import shape_of
from instep.structure.tree import Path, flatten_one_level, format_path
from instep.structure.types import handler_for_type


def _output_name(path: Path) -> str:
    name = format_path(path)
    return f"the output {name!r}" if name else "the output"


def _rule_line(path: Path, rule: str) -> str:
    name = format_path(path)
    return f"merge={{{name!r}: {rule}}}" if name else f"merge={rule}"


def _is_container(part: Any) -> bool:
    """Whether a part is not a leaf, so that leaf rules do not apply to it."""
    return (
        flatten_one_level(part) is not None
        or handler_for_type(type(part)) is not None
        or getattr(part, "is_nested", False)
    )


def cannot_merge(
    path: Path,
    parts: Sequence[Any],
    why: str,
    sizes: Sequence[int],
    has_two_batch_dims: bool = False,
    suggestions: Sequence[str] = (),
) -> MergeError:
    """The merge is ambiguous. Describes the parts and lists the rules to choose from."""
    if any(map(_is_container, parts)):
        choices = "'list', 'first', 'drop'"
    elif any(map(shape_of, parts)):
        choices = "'cat', 'pad', 'nested', 'list', 'unique', 'stack', 'sum', 'mean', 'first', 'drop'"
    else:
        choices = "'mean', 'sum', 'max', 'min', 'stack', 'list', 'first', 'drop'"
    lines = [
        f"cannot merge {_output_name(path)}: {why}, from shards of {list(sizes)} samples.",
        f"Write what it means:  {_rule_line(path, '...')}  with {choices},",
        "  instep.weighted_by(...) for a mean over something else than samples, or a function (parts, sizes) -> value.",
    ]
    lines += [f"  {_rule_line(path, count)}" for count in suggestions]
    if 1 in sizes:
        lines.append("Where a shard of one sample loses a dim (squeeze), min_shard=2 keeps shards larger.")
    if has_two_batch_dims:
        lines.append(
            "Where an entry depends on the whole batch, gather what it is computed from, instep.all_gather(z), or "
            "compute it outside forward, on the merged outputs."
        )
    return MergeError("\n".join(lines))


def depends_on_other_samples(path: Path, why: str, sizes: Sequence[int]) -> MergeError:
    """The output of a sample depends on other samples of the batch."""
    first, second = sizes
    return MergeError(
        f"cannot merge {_output_name(path)}: {why}. It was tried on {first} and {second} samples apart and "
        f"on the {first + second} together.\n"
        f"Samples meet somewhere in forward. Write one of:\n"
        f"  z = instep.all_gather(z)   # inside forward, before samples meet: every replica sees the whole batch\n"
        f"  compute it outside forward, on the merged outputs\n"
        f"  {_rule_line(path, '...')}   # 'cat', 'list', 'drop', ...: what the parts give is what is meant\n"
        f"  {_rule_line(path, '(lambda parts, sizes: ...)')}   # a function of the parts"
    )


def no_rule_fits(path: Path, parts: Sequence[Any], why: str, sizes: Sequence[int], counts: Sequence[str]) -> MergeError:
    """No merge rule computes the output of the whole batch from the outputs of the parts."""
    error = cannot_merge(path, parts, f"{why}; no sum, mean or constant explains it", sizes, suggestions=counts)
    return MergeError(
        f"{error}\n"
        f"If samples meet in it (a contrastive loss, a variance), none of these is right. Write one of:\n"
        f"  z = instep.all_gather(z)   # inside forward, before samples meet: every replica sees the whole batch\n"
        f"  compute it outside forward, on the merged outputs"
    )


def conflicting_trials(path: Path, before: str, now: str) -> MergeError:
    """Two trials gave contradictory verdicts."""
    return MergeError(
        f"cannot merge {_output_name(path)}: some samples of the batch show a {before}, others a {now}.\n"
        f"Write what it means:  {_rule_line(path, 'instep.weighted_by(...)')}  for a mean over "
        "something else than samples, "
        f"or a function (parts, sizes) -> value."
    )


def keys_differ(path: Path, keys: Sequence[Any], index: int, other: Sequence[Any], sizes: Sequence[int]) -> MergeError:
    """The keys of a container differ between replicas."""
    missing = [key for key in keys if key not in set(other)]
    added = [key for key in other if key not in set(keys)]
    differences = [f"has no {missing}"] * bool(missing) + [f"has {added} besides"] * bool(added)
    return MergeError(
        f"cannot merge {_output_name(path)}: the first replica has the entries {list(keys)}, replica {index} "
        f"{' and '.join(differences)}, from shards of {list(sizes)} samples.\n"
        f"Return the same entries always, None where there is nothing, or write what it means:\n"
        f"  {_rule_line(path, '...')}  with 'list', 'first', 'drop' or a function (parts, sizes) -> value."
    )


def ambiguous_list(path: Path, dim: int) -> MergeError:
    """A list could hold one entry per sample or be a structure of batched leaves."""
    return MergeError(
        f"cannot tell how to read {_output_name(path)}: each replica gave a list as long as its "
        "shard, whose entries hold as "
        f"many samples as the shard too.\nWrite the line that is meant:\n"
        f"  {_rule_line(path, repr('list'))}   # one entry per sample\n"
        f"  {_rule_line((*path, '*'), repr('cat'))}   # a structure of batched tensors, in dim {dim}"
    )


def unregistered_type(path: Path, value: Any) -> MergeError:
    """The type is not registered."""
    name = type(value).__name__
    return MergeError(
        f"cannot merge {_output_name(path)}: instep has not been told how to merge a {name}.\n"
        f"Write, once:\n"
        f"  instep.register({name}, size=lambda v: ..., split=lambda v, sizes: [...], merge=lambda parts: ...)\n"
        f"or choose:  {_rule_line(path, repr('first'))}  or 'list', 'drop', a function (parts, sizes) -> value."
    )


def attributes_differ(path: Path, parts: Sequence[Any], names: Sequence[str], sizes: Sequence[int]) -> MergeError:
    """Extra attributes of a container, number or string differ between replicas."""
    type_name = type(parts[0]).__name__
    why = f"the attributes {list(names)} of a {type_name} differ between replicas, and only what it holds is merged"
    error = cannot_merge(path, parts, why, sizes)
    return MergeError(f"{error}\nOr return them as entries of a dictionary, each of which is merged by itself.")


def no_batch_size(path: Path, value: Any) -> MergeError:
    """A value of a batched type has no batch size, such as a TensorDict of losses."""
    name = type(value).__name__
    return MergeError(
        f"cannot merge {_output_name(path)}: a {name} that does not say how many samples it holds "
        "(no batch size), so that "
        f"its entries are not merged one by one.\n"
        f"Return a dictionary ({name}.to_dict() makes one), or write what it means:\n"
        f"  {_rule_line(path, '...')}  with 'list', 'first', 'drop' or a function (parts, sizes) -> value."
    )


def ambiguous_part_sizes(length: int | None, inner: Sequence[set[int | None]]) -> MergeError:
    """The parts are lists of tensors, and nothing else gives their numbers of samples."""
    batched = [next(iter(sizes)) for sizes in inner]
    return MergeError(
        f"cannot tell how many samples the parts hold: each has a list of {length} tensors.\n"
        f"Write the line that is meant:\n"
        f"  merge(parts, {[length] * len(batched)})   # one entry per sample\n"
        f"  merge(parts, {batched})   # a structure of batched tensors"
    )


def wrong_divisor(criterion: str, divisor: Any, computed: Any, expected: Any) -> MergeError:
    """The mean of a criterion is not its sum divided by the assumed divisor."""
    return MergeError(
        f"the mean of {criterion} is taken for its sum over {float(divisor):g}, which is {float(computed):.6g} for the "
        f"samples that were tried, and the criterion itself says {float(expected):.6g}.\n"
        "Write one of:\n"
        "  instep.with_loss(net, criterion, weight=lambda output, target: ...)   # what its mean divides by\n"
        "  loss = criterion(model(x), y)   # the loss outside, on the merged output"
    )


def loss_not_additive() -> MergeError:
    """The losses of the parts of a batch do not add up to the loss of the whole batch."""
    return MergeError(
        "the losses of two parts of the batch do not add up to the loss of both: samples meet in forward or in the "
        "criterion, or weight= is not what its mean divides by.\n"
        "Write one of:\n"
        "  z = instep.all_gather(z)   # inside forward, before samples meet: every replica sees the whole batch\n"
        "  loss = criterion(model(x), y)   # the loss outside, on the merged output\n"
        "  probe=False   # if what each shard gives alone is what is meant"
    )
