"""Errors for outputs that cannot be merged, with the rules that the user can set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from instep.errors import MergeError
from instep.structure.problems import Problem, add_footer, set_problems
from instep.structure.shapes import shape_of
from instep.structure.tree import Path, flatten_one_level, format_path
from instep.structure.types import handler_for_type

_GATHER_LINE = "  z = instep.all_gather(z)   # in forward, before samples interact: every replica gets the whole batch"


INTERACTION_ADVICE = (_GATHER_LINE, "  compute it outside forward, on the merged outputs")
"""What to write if the value of the whole batch cannot be computed from the values of its parts."""


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


def _problem(path: Path, headline: str, *advice: str, hints: Sequence[str] = (), can_try: bool = True) -> MergeError:
    """An error with one problem."""
    return set_problems(MergeError(), [Problem(format_path(path), headline, advice, tuple(hints), can_try)])


def change_problem(error: MergeError, **changes: Any) -> MergeError:
    """The error with changed fields of its problem."""
    (problem,) = error.problems
    return set_problems(error, [replace(problem, **changes)])


def cannot_merge(
    path: Path,
    parts: Sequence[Any],
    why: str,
    sizes: Sequence[int],
    has_two_batch_dims: bool = False,
) -> MergeError:
    """The merge is ambiguous. Describes the parts and lists the rules to choose from."""
    if any(map(_is_container, parts)):
        choices = "'list', 'first', 'drop'"
    elif any(map(shape_of, parts)):
        choices = "'cat', 'pad', 'nested', 'list', 'unique', 'stack', 'sum', 'mean', 'first', 'drop'"
    else:
        choices = "'mean', 'sum', 'max', 'min', 'stack', 'list', 'first', 'drop'"
    advice = [
        f"Set a rule:  {_rule_line(path, '...')}  with {choices},",
        "  instep.weighted_by(...) for a mean over other things than samples, or a function (parts, sizes) -> value.",
    ]
    hints = []
    if 1 in sizes:
        hints.append("If a shard of one sample loses a dim (squeeze), min_shard=2 avoids such shards.")
    if has_two_batch_dims:
        hints.append(
            "If an entry depends on the whole batch, gather its inputs with instep.all_gather(z), or compute it "
            "outside forward, on the merged outputs."
        )
    headline = f"cannot merge {_output_name(path)}: {why}, from shards of {list(sizes)} samples."
    return _problem(path, headline, *advice, hints=hints)


def depends_on_other_samples(path: Path, why: str, sizes: Sequence[int]) -> MergeError:
    """The output of a sample depends on other samples of the batch."""
    first, second = sizes
    return _problem(
        path,
        f"cannot merge {_output_name(path)}: {why}. The trial ran {first} and {second} samples "
        f"separately and all {first + second} together.",
        "Samples interact in forward. Write one of:",
        *INTERACTION_ADVICE,
        f"  {_rule_line(path, '...')}   # 'cat', 'list', 'drop', ...: accept the outputs of the parts",
    )


def no_rule_fits(path: Path, parts: Sequence[Any], why: str, sizes: Sequence[int]) -> MergeError:
    """No merge rule computes the output of the whole batch from the outputs of the parts."""
    error = cannot_merge(path, parts, f"{why}; no sum, mean or constant explains it", sizes)
    interact = "If samples interact in it (a contrastive loss, a variance), none of these is right. Write one of:"
    return change_problem(error, advice=(*error.problems[0].advice, interact, *INTERACTION_ADVICE))


def wrong_weights(path: Path, merged: Any, whole: Any, sizes: Sequence[int]) -> MergeError:
    """The user's `weighted_by` does not give the value of the whole batch."""
    numbers = "another value" if merged.ndim or whole.ndim else f"{merged.item():.6g} instead of {whole.item():.6g}"
    return _problem(
        path,
        f"cannot merge {_output_name(path)}: its rule weighted_by(...) gives {numbers}, tried on {list(sizes)} samples "
        f"of the batch. The weights are not the divisor of a mean, or it is no mean.",
        "Give the divisor of the mean:  "
        f"{_rule_line(path, 'instep.weighted_by(...)')}  with the name of an output or a function of the arguments.",
    )


def conflicting_trials(path: Path, before: str, now: str) -> MergeError:
    """Two trials gave contradictory verdicts."""
    return _problem(
        path,
        f"cannot merge {_output_name(path)}: some samples of the batch show a {before}, others a {now}.",
        f"Set a rule:  {_rule_line(path, 'instep.weighted_by(...)')}  for a mean over other things than samples, or a "
        f"function (parts, sizes) -> value.",
    )


def draws_in_trial(error: MergeError, *, in_evaluation_mode: bool) -> MergeError:
    """An error that a trial of a module that draws random numbers found although draws cannot be the cause."""
    trial = (
        "The trial ran in evaluation mode, without draws that it cannot repeat."
        if in_evaluation_mode
        else "In the trial, each sample drew the same ones in its part and in the whole."
    )
    return add_footer(error, f"forward draws random numbers. {trial}")


def draws_hide_values(error: MergeError) -> MergeError:
    """An error of a merge by shape, because `forward` draws random numbers that a trial cannot repeat."""
    return add_footer(
        error,
        "The probe compared only shapes, because forward draws random numbers that it cannot repeat for a sample (of "
        "Python's random, NumPy or an extension). If this is a mean over samples, the rule is 'mean'; a sum, 'sum'.",
    )


def rules_of_method(error: MergeError, method: str) -> MergeError:
    """An error about the output of another method than `forward`, which has rules of its own."""
    return add_footer(
        error, f"This is an output of {method!r}. Rules for it:  methods={{{method!r}: {{'merge': ...}}}}"
    )


def keys_differ(path: Path, keys: Sequence[Any], index: int, other: Sequence[Any], sizes: Sequence[int]) -> MergeError:
    """The keys of a container differ between replicas."""
    missing = [key for key in keys if key not in set(other)]
    added = [key for key in other if key not in set(keys)]
    differences = [f"has no {missing}"] * bool(missing) + [f"also has {added}"] * bool(added)
    return _problem(
        path,
        f"cannot merge {_output_name(path)}: the first replica has the entries {list(keys)}, replica {index} "
        f"{' and '.join(differences)}, from shards of {list(sizes)} samples.",
        "Always return the same entries, with None for missing values, or set a rule:",
        f"  {_rule_line(path, '...')}  with 'list', 'first', 'drop' or a function (parts, sizes) -> value.",
        can_try=False,
    )


def ambiguous_list(path: Path, dim: int) -> MergeError:
    """A list could hold one entry per sample or be a structure of batched leaves."""
    return _problem(
        path,
        f"cannot determine how to merge {_output_name(path)}: on each replica, both the list and its entries have the "
        f"size of the shard.",
        f"Set a merge rule: 'list' for {_output_name(path)} if it has one entry per sample, or 'cat' for its entries "
        f"({format_path((*path, '*'))!r}) if they are batched in dim {dim}.",
    )


def unregistered_type(path: Path, value: Any) -> MergeError:
    """The type is not registered."""
    name = type(value).__name__
    return MergeError(
        f"cannot merge {_output_name(path)}: {name} is not a registered type.\n"
        f"Write once:\n"
        f"  instep.register({name}, size=lambda v: ..., split=lambda v, sizes: [...], merge=lambda parts: ...)\n"
        f"or set a rule:  {_rule_line(path, '...')}  with 'first', 'list', 'drop' or a function (parts, sizes)."
    )


def attributes_differ(path: Path, parts: Sequence[Any], names: Sequence[str], sizes: Sequence[int]) -> MergeError:
    """Extra attributes of a container, number or string differ between replicas."""
    type_name = type(parts[0]).__name__
    why = f"the attributes {list(names)} of {type_name} differ between replicas, and attributes are not merged"
    error = cannot_merge(path, parts, why, sizes)
    hint = "Or return them as entries of a dictionary: these are merged."
    return change_problem(error, hints=(*error.problems[0].hints, hint), can_try=False)


def no_batch_size(path: Path, value: Any) -> MergeError:
    """A value of a batched type has no batch size, such as a TensorDict of losses."""
    name = type(value).__name__
    return MergeError(
        f"cannot merge {_output_name(path)}: a {name} without a batch size.\n"
        f"Return a dictionary ({name}.to_dict()), whose entries are merged one by one, or set a rule:\n"
        f"  {_rule_line(path, '...')}  with 'list', 'first', 'drop' or a function (parts, sizes) -> value."
    )


def ambiguous_part_sizes(length: int | None, inner: Sequence[set[int | None]]) -> MergeError:
    """The parts are lists of tensors, and nothing else gives their numbers of samples."""
    batched = [next(iter(sizes)) for sizes in inner]
    return MergeError(
        f"cannot determine the number of samples in the parts: each has a list of {length} tensors.\n"
        f"Write one of:\n"
        f"  merge(parts, {[length] * len(batched)})   # one entry per sample\n"
        f"  merge(parts, {batched})   # a structure of batched tensors"
    )


def wrong_divisor(criterion: str, divisor: Any, computed: Any, expected: Any) -> MergeError:
    """The mean of a criterion is not its sum divided by the assumed divisor."""
    return MergeError(
        f"the mean of {criterion} was expected to be its sum divided by {float(divisor):g}, which is "
        f"{float(computed):.6g} for the samples tried, but the criterion returned {float(expected):.6g}.\n"
        "Write one of:\n"
        "  instep.with_loss(net, criterion, weight=lambda output, target: ...)   # the divisor of its mean\n"
        "  loss = criterion(model(x), y)   # outside, on the merged output"
    )


def loss_not_additive() -> MergeError:
    """The losses of the parts of a batch do not add up to the loss of the whole batch."""
    return MergeError(
        "the losses of two parts of the batch do not add up to the loss of both: samples interact in forward or in the "
        "criterion, or weight= is not the divisor of its mean.\n"
        "Write one of:\n"
        f"{_GATHER_LINE}\n"
        "  loss = criterion(model(x), y)   # outside, on the merged output\n"
        "  probe=False   # accept the losses of separate shards"
    )
