"""Lines that an error message may offer, as source code. `lines` tries them on samples of the call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.structure.graph_arguments import GraphArgument
from instep.structure.merge_rules import weighted_by
from instep.structure.problems import Line
from instep.structure.shapes import is_dense
from instep.structure.tree import NUMBER_TYPES, flatten_one_level, is_sequence
from instep.structure.types import handler_for_type
from instep.structure.weights import COMPARISON_OPERATORS

_MAX_VALUES = 12
"""The number of values of one integer argument that are tried as the value to ignore."""
_COMMON_IGNORED = (-100, -1, 255, 0, 1)
_MAX_ENTRIES = 1 << 20
_OPERATOR_NAMES = {"!=": "other than", "==": "equal to", ">": "greater than", ">=": "not less than"}

PLAIN_RULES = {
    "'sum'": "the sum of the replicas' values",
    "'mean'": "a mean over samples",
    "'max'": "the largest",
    "'min'": "the smallest",
}


class Arguments(NamedTuple):
    """The arguments of a call."""

    inputs: Mapping[str, Any]
    """By name, with the batch moved to dim 0."""
    size: int
    """The number of samples."""
    sequences: Collection[str] = ()
    """The names of those that have the samples in dim 1."""


def evaluate(rule: str, module: nn.Module) -> Any:
    """The rule that a line sets. The text itself is evaluated, so that what is tried is what is printed."""
    return eval(rule, {"instep": SimpleNamespace(weighted_by=weighted_by), "torch": torch, "net": module})


def output_lines(whole: Any, name: str, outputs: Any, arguments: Arguments, module: nn.Module) -> Iterator[Line]:
    """Lines that may merge an output or an assigned attribute, most likely first."""
    only_extrema = isinstance(whole, bool) or getattr(whole, "dtype", None) in (torch.bool, bool)
    for rule, comment in PLAIN_RULES.items():
        if not only_extrema or rule in ("'max'", "'min'"):
            yield Line("merge", rule, comment)
    if isinstance(whole, Tensor) and whole.ndim:
        for dim in range(whole.ndim):
            yield Line("merge", f"('cat', {dim})", f"concatenated along dim {dim}")
        if is_dense(whole) and whole.numel():
            for value in dict.fromkeys((0, -100, _last_entry(whole))):
                rule = f"('pad', {value!r})" if value else "'pad'"
                yield Line("merge", rule, "padded to the longest, then concatenated")
    if is_sequence(whole):
        yield Line("merge", "'list'", "the entries of all replicas, one after another")
    if all(map(_is_number, whole if is_sequence(whole) else [whole])):
        yield from _counts_among_outputs(name, outputs)
        yield from (Line("merge", f"instep.weighted_by({rule})", text) for rule, text in _weights(arguments, module))


def state_lines(whole: Any) -> Iterator[Line]:
    """Lines that may merge an attribute whose new value depends on the old one."""
    yield Line("state", "'sum'", "the old value and the sum of the changes")
    yield Line("state", "'mean'", "a mean over samples")
    yield Line("state", "'max'", "the largest")
    yield Line("state", "'min'", "the smallest")
    if not isinstance(whole, NUMBER_TYPES):
        yield Line("state", "'cat'", "concatenated in the order of the samples")


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, *NUMBER_TYPES)) and not getattr(value, "ndim", 0)


def _last_entry(tensor: Tensor) -> Any:
    """The last entry, which is padding if anything is."""
    value = tensor.flatten()[-1].item()
    return value if value == value else 0


def _counts_among_outputs(name: str, outputs: Any, path: str = "") -> Iterator[Line]:
    """Numbers among the outputs that may be the divisor of a mean: `{"loss": ..., "tokens": ...}`."""
    node = flatten_one_level(outputs)
    if node is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _counts_among_outputs(name, child, f"{path}.{key}" if path else str(key))
    elif path and path != name and _is_number(outputs):
        yield Line("merge", f"instep.weighted_by({path!r})", f"a mean that is weighted by the output {path!r}")


def _weights(arguments: Arguments, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Weights of a mean: the source code of a function of the arguments, and what the mean is over."""
    inputs, size, sequences = arguments
    leaves = [
        leaf for name, value in inputs.items() if name.isidentifier() for leaf in _leaves(name, name, value, size)
    ]
    yield from _graph_weights(inputs)
    for name, code, value in leaves:
        weights = (
            _list_weights(code, value)
            if is_sequence(value)
            else _tensor_weights(code, value, "[1:]" if name in sequences else "[..., 1:]")
        )
        yield from ((f"lambda {name}: {weight}", text) for weight, text in weights)
    tables: list[tuple[str, tuple[str, ...], Any]] = [(code, (name,), value) for name, code, value in leaves]
    tables += [(f"net.{name}", (), value) for name, value in _module_tensors(module)]
    for name, code, value in leaves:
        for table, names, weights in tables:
            yield from _class_weights(name, code, value, table, names, weights)


def _graph_weights(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Numbers of nodes and edges of graphs: rows of arguments that are split between graphs, or of a `Batch`."""
    seen: list[Sequence[int]] = []
    for name, value in inputs.items():
        if not name.isidentifier():
            continue
        if isinstance(value, GraphArgument) and isinstance(value.value, Tensor) and value.bounds not in seen:
            seen.append(value.bounds)
            rows = f"{name}.shape[{value.dim}]" if value.dim else f"len({name})"
            yield f"lambda {name}: {rows}", f"a mean over the rows of {name}, of all graphs"
        elif handler_for_type(type(value)) is not None:
            for count in ("num_nodes", "num_edges"):  # of a torch_geometric Batch
                if isinstance(getattr(value, count, None), int):
                    yield f"lambda {name}: {name}.{count}", f"a mean over {count} of {name}, of all graphs"


def _leaves(name: str, code: str, value: Any, size: int) -> Iterator[tuple[str, str, Any]]:
    """The tensors and lists of samples of an argument: the argument's name, the source code of the leaf, the leaf."""
    if isinstance(value, Tensor):
        if is_dense(value) and not value.is_complex() and not value.is_quantized:
            yield name, code, value
        return
    if is_sequence(value) and len(value) == size:
        yield name, code, value
        return
    node = flatten_one_level(value)
    for key, child in zip(node.keys, node.children, strict=True) if node is not None else ():
        if isinstance(value, (Mapping, list, tuple)) and not hasattr(value, "_fields"):
            if isinstance(key, (str, int)):
                yield from _leaves(name, f"{code}[{key!r}]", child, size)
        elif isinstance(key, str) and hasattr(value, key):
            yield from _leaves(name, f"{code}.{key}", child, size)


def _tensor_weights(code: str, value: Tensor, shift: str) -> Iterator[tuple[str, str]]:
    """Counts of the entries of a tensor: of labels that are not ignored, of unmasked positions, their sum.

    Of the comparisons that select the same entries, only the first is used.
    """
    if not value.ndim or not value.numel() or value.numel() > _MAX_ENTRIES or _lacks_comparisons(value.dtype):
        return
    comparisons = [(">", 0), ("!=", 0), ("==", 0)]
    if not value.is_floating_point():
        ignored = [(operator, number) for number in _likely_ignored(value) for operator in ("!=", "==")]
        comparisons = [*ignored, (">=", 0), *comparisons]
    selected = [COMPARISON_OPERATORS[operator](value, number) for operator, number in comparisons]
    distinct = [
        comparison
        for index, comparison in enumerate(comparisons)
        if not any(torch.equal(selected[index], other) for other in selected[:index])
    ]
    for entries in (code, f"{code}{shift}") if value.ndim > 1 else (code,):
        if value.dtype is torch.bool:
            yield f"{entries}.sum()", f"a mean over the entries of {code} that are True"
            yield f"(~{entries}).sum()", f"a mean over the entries of {code} that are False"
            continue
        for operator, number in distinct:
            count = f"({entries} {operator} {number}).sum()"
            yield count, f"a mean over the entries of {code} {_OPERATOR_NAMES[operator]} {number}"
        yield f"{entries}.sum()", f"a mean that is weighted by {code}"


def _lacks_comparisons(dtype: torch.dtype) -> bool:
    """Whether torch implements few operations for a dtype."""
    return dtype in (torch.uint16, torch.uint32, torch.uint64) or (dtype.is_floating_point and dtype.itemsize < 2)


def _likely_ignored(value: Tensor) -> list[int]:
    """The values of an integer tensor that a loss may ignore, most likely first."""
    present = value.unique().tolist()
    ordered = [*(v for v in _COMMON_IGNORED if v in present), present[0], present[-1], *present]
    return list(dict.fromkeys(ordered))[:_MAX_VALUES]


def _list_weights(code: str, value: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Numbers of boxes, rows or tokens in a list with one entry per sample."""
    first = value[0] if value else None
    if isinstance(first, Tensor) and first.ndim:
        yield f"sum(len(item) for item in {code})", f"a mean over the rows of all entries of {code}"
        yield f"sum(item.numel() for item in {code})", f"a mean over all numbers in {code}"
    elif isinstance(first, (list, str)):
        yield f"sum(len(item) for item in {code})", f"a mean over the items of all entries of {code}"
    elif isinstance(first, Mapping):
        for key, child in first.items():
            if isinstance(key, str) and ((isinstance(child, Tensor) and child.ndim) or isinstance(child, list)):
                yield f"sum(len(item[{key!r}]) for item in {code})", f"a mean over all {key} in {code}"


def _module_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a module with one dim, by name: buffers, parameters and attributes."""
    for prefix, submodule in module.named_modules():
        tables = (submodule._buffers, submodule._parameters, submodule.__dict__)
        for name, value in ((name, value) for table in tables for name, value in table.items()):
            if isinstance(value, Tensor) and value.ndim == 1 and not any(part.isdigit() for part in prefix.split(".")):
                yield (f"{prefix}.{name}" if prefix else name), value


def _class_weights(
    name: str, code: str, target: Any, table: str, table_names: tuple[str, ...], weights: Any
) -> Iterator[tuple[str, str]]:
    """The sum of the class weights of a target: what `cross_entropy(..., weight=...)` divides by."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype is torch.bool or not target.ndim:
        return
    if not isinstance(weights, Tensor) or weights.ndim != 1 or not weights.is_floating_point() or not target.numel():
        return
    outside = target[(target < 0) | (target >= len(weights))].unique().tolist()
    if len(outside) > 1:
        return
    names = ", ".join(dict.fromkeys((name, *table_names)))
    for ignored in outside or ([None, 0] if bool((target == 0).any()) else [None]):
        classes = code if ignored is None else f"{code}[{code} != {ignored}]"
        text = f"a mean that is weighted by {table}" + (" (net is your module)" if not table_names else "")
        yield f"lambda {names}: {table}.to({code}.device)[{classes}].sum()", text
