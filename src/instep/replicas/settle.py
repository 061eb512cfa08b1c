"""What `forward` changed on the replicas, brought together and set on the source: by equality, or by rule.

Everything is decided before anything is written, so that a `StateError` leaves the source as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import MergeError, StateError
from instep.replicas.derived import is_cache, is_derived
from instep.replicas.equal import equal
from instep.replicas.replica import Outcome, Replica
from instep.replicas.watch import MISSING
from instep.structure.merge import Merger
from instep.structure.rules import rule_for
from instep.structure.tree import map_tensors, tensors_in
from instep.structure.verdicts import Verdicts

StateRule = str | Callable[..., Any]
RULES = ("sum", "mean", "max", "min", "first")
Write = Callable[[], None]


@dataclass
class Settler:
    """Brings state changes home for one source module."""

    rules: Mapping[str, StateRule]
    outputs: Merger
    """The rules of outputs, for tensors that `forward` left on the module."""
    unmerged: str = "error"
    found: Mapping[str, Verdicts] = field(default_factory=dict)
    """By dotted name: what trials said of the tensors that `forward` sets on the module."""
    inputs: Sequence[Mapping[str, Any]] = ()
    """The arguments of the replicas, for as long as their call is settled."""

    def settle(
        self, source: nn.Module, replicas: Sequence[Replica], outcomes: Sequence[Outcome], sizes: Sequence[int]
    ) -> bool:
        """Set on the source what `forward` changed, and say whether that was anything."""
        if not any(outcome.changes or outcome.written for outcome in outcomes):
            return False
        modules = replicas[0].source_modules
        names = module_names(source, modules)
        writes = [
            *self._attributes(modules, names, replicas, outcomes, sizes),
            *self._tensors(source, replicas, outcomes, sizes),
        ]
        for write in writes:
            write()
        for replica, outcome in zip(replicas, outcomes, strict=True):
            replica.revert(outcome.changes)
        return True

    def _attributes(
        self,
        modules: list[nn.Module],
        names: list[str],
        replicas: Sequence[Replica],
        outcomes: Sequence[Outcome],
        sizes: Sequence[int],
    ) -> list[Write]:
        """Attributes and buffers that `forward` set to another object."""
        tables = [{(c.module, c.name): c for c in outcome.changes.attributes} for outcome in outcomes]
        writes = []
        for key in dict.fromkeys(key for table in tables for key in table):
            index, name = key
            if is_cache(modules[index], name):
                continue
            change = next(table[key] for table in tables if key in table)
            holder = modules[index]._buffers if change.buffer else modules[index].__dict__
            old = holder.get(name, MISSING)
            new = [table[key].new if key in table else _held(replicas[r], change) for r, table in enumerate(tables)]
            path = f"{names[index]}.{name}" if names[index] else name
            derived = is_derived(modules[index], name)
            value = new[0] if derived else self._merge(path, old, new, sizes)
            writes.append(_setter(holder, name, _home(value, old)))
        return writes

    def _tensors(
        self, source: nn.Module, replicas: Sequence[Replica], outcomes: Sequence[Outcome], sizes: Sequence[int]
    ) -> list[Write]:
        """State tensors that `forward` wrote in place."""
        touched = {id(pair[0]): pair[0] for outcome in outcomes for pair in outcome.written}
        copies = [{id(original): copy for original, copy in replica.tensors.state} for replica in replicas]
        writes = []
        for key, original in touched.items():
            values = [table[key] for table in copies]
            path = tensor_name(source, original)
            merged = self._merge(path, original, values, sizes)
            writes.append(_copier(original, merged))
        return writes

    def _merge(self, path: str, old: Any, new: list[Any], sizes: Sequence[int]) -> Any:
        rule = next((rule for pattern, rule in self.rules.items() if fnmatchcase(path, pattern)), None)
        if rule is not None:
            return apply_state_rule(rule, old, new, sizes, path)
        if path in self.found:
            return self._merge_output(path, new, sizes)
        if all(equal(value, new[0]) for value in new) and not _is_count(old, new[0], sizes):
            return new[0]
        if self._is_output(path, old, new, sizes):
            return self._merge_output(path, new, sizes)
        if self.unmerged == "warn":
            warnings.warn(f"{path} was changed differently by each replica; the first one's is kept.", stacklevel=2)
            return new[0]
        raise StateError(
            f"forward changed {path!r} differently on each replica, and no rule says what the whole would have.\n"
            f"Write one of:\n"
            f"  state={{{path!r}: 'sum'}}    # old + the sum of the changes: counters, running totals\n"
            f"  state={{{path!r}: 'mean'}}   # weighted by samples; or 'max', 'min', 'first', a function\n"
            f"  on_unmerged_state='warn'   # keep the first replica's and say so"
        )

    def _is_output(self, path: str, old: Any, new: list[Any], sizes: Sequence[int]) -> bool:
        """Whether an attribute is one more output: it needs a gradient, follows the batch, or has an output's rule.

        A tensor that had this very shape before the call is state, whatever the size of a shard happens to be.
        """
        if rule_for(self.outputs.rules, tuple(path.split("."))) is not None and path not in self.rules:
            return True
        tensors = [list(tensors_in(value)) for value in new]
        if any(tensor.requires_grad for mine in tensors for tensor in mine):
            return True
        if isinstance(old, Tensor) and any(isinstance(value, Tensor) and value.shape == old.shape for value in new):
            return False
        dim = self.outputs.dim
        return all(
            mine and all(tensor.ndim > dim and tensor.shape[dim] == size for tensor in mine)
            for mine, size in zip(tensors, sizes, strict=True)
        )

    def _merge_output(self, path: str, new: list[Any], sizes: Sequence[int]) -> Any:
        device = next((t.device for value in new for t in tensors_in(value)), None)
        near = [map_tensors(lambda t: t.to(device), value) for value in new]
        rule = rule_for(self.outputs.rules, tuple(path.split(".")))
        try:
            merger = Merger(self.outputs.dim, rules={} if rule is None else {"*": rule})
            merger.use(self.found.get(path, {}))
            return merger.merge(near, sizes, self.inputs)
        except MergeError as error:
            raise StateError(
                f"forward left a tensor at {path!r} that cannot be merged: {error}\n"
                f"Name it as an output:  merge={{{path!r}: ...}}"
            ) from error


_TRAINABLE = (
    "forward wrote to the trainable parameter {path!r}, which every replica would do once more.\n"
    "Change it outside forward (after optimizer.step()), or make it a buffer and give it a state rule."
)


def refuse_writes(source: nn.Module, written: Sequence[Tensor]) -> None:
    """`StateError` if `forward` wrote to trainable tensors of the source."""
    if written:
        raise StateError(_TRAINABLE.format(path=tensor_name(source, written[0])))


def apply_state_rule(rule: StateRule, old: Any, new: list[Any], sizes: Sequence[int], path: str) -> Any:
    """The whole's new value under a rule."""
    if callable(rule):
        return rule(old, new, list(sizes))
    if rule == "first":
        return new[0]
    if rule == "sum":
        if old is MISSING or old is None:
            raise StateError(f"state={{{path!r}: 'sum'}} needs a value from before the call: set it in __init__.")
        device = old.device if isinstance(old, Tensor) else None
        total = old
        for value in new:
            total = total + ((value.to(device) if device is not None else value) - old)
        return total
    try:
        return Merger.of(rule).merge(_together(new), sizes)
    except MergeError as error:
        raise StateError(f"state={{{path!r}: {rule!r}}} cannot be applied: {error}") from error


def check_state_rule(pattern: str, rule: Any) -> None:
    """Refuse a rule that does not exist, when it is given."""
    if not callable(rule) and rule not in RULES:
        raise StateError(
            f"state={{{pattern!r}: {rule!r}}}: write one of {', '.join(RULES)} or a function (old, new, sizes)."
        )


def _together(values: list[Any]) -> list[Any]:
    device = values[0].device if isinstance(values[0], Tensor) else None
    return values if device is None else [value.to(device) for value in values]


def _held(replica: Replica, change: Any) -> Any:
    _, module = replica.cloner.modules[change.module]
    return (module._buffers if change.buffer else module.__dict__).get(change.name, MISSING)


def _is_count(old: Any, new: Any, sizes: Sequence[int]) -> bool:
    """Whether a number grew by the samples of a shard: equal on even shards, and still not what the whole would get."""
    if sizes[0] < 2 or isinstance(new, bool) or type(old) is not type(new):
        return False
    if isinstance(new, Tensor):
        return not (new.ndim or old.ndim or new.requires_grad) and bool(new - old == sizes[0])
    return isinstance(new, (int, float)) and new - old == sizes[0]


def _home(value: Any, old: Any) -> Any:
    return value.to(old.device) if isinstance(value, Tensor) and isinstance(old, Tensor) else value


def _setter(holder: dict[str, Any], name: str, value: Any) -> Write:
    def write() -> None:
        holder[name] = value

    return write


def _copier(original: Tensor, value: Tensor) -> Write:
    def write() -> None:
        with torch.no_grad(), torch.inference_mode(False):
            original.data.copy_(value)

    return write


def module_names(source: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """The dotted name of each module; its class for one that is not registered."""
    known = {id(module): name for name, module in source.named_modules()}
    return [known.get(id(module), type(module).__name__) for module in modules]


def tensor_name(source: nn.Module, tensor: Tensor) -> str:
    """The dotted name of a tensor that some module of the source holds."""
    for prefix, module in source.named_modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for name, value in table.items():
                if value is tensor:
                    return f"{prefix}.{name}" if prefix else name
    return "a tensor that no module holds by name"
