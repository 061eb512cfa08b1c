"""Merging of state changes of all replicas into the source module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import MergeError, StateError
from instep.replicas.diff import MISSING, AttributeChange
from instep.replicas.names import TensorOwners, module_names, parameter_write_error
from instep.replicas.object_graph import Contents, read_contents, values_equal, write_contents
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.shared_containers import StatePath
from instep.replicas.state.carried import CarriedState, tensors_by_path
from instep.replicas.state.containers import merge_contents
from instep.replicas.state.rules import (
    StateRule,
    apply_state_rule,
    builtin_rule,
    is_computed_from_parameters,
    is_parameter_cache,
    may_be_shard_size,
)
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.locks import run_uninterrupted
from instep.runtime.modes import set_inference_mode
from instep.structure.merge import Merger
from instep.structure.merge_rules import find_rule
from instep.structure.problems import Problem, set_problems
from instep.structure.shapes import has_batch_dim, is_dense
from instep.structure.tree import NUMBER_TYPES, map_tensors, tensors_in
from instep.structure.verdicts import Verdicts

StateWrite = Callable[[], None]


@dataclass
class StateMerger:
    """Merges state changes of the replicas into one source module, by rule."""

    rules: Mapping[str, StateRule]
    output_merger: Merger
    """The merger of outputs. Its rules apply to tensors that `forward` sets on the module too."""
    on_unmerged: str = "error"
    default_rule: Callable[[nn.Module, str], StateRule | None] | None = None
    """The rule, by module and path, for running statistics without a rule that differ between replicas."""
    list_growth: dict[str, str] = field(default_factory=dict)
    """By path, whether a list grows by one entry per sample or not (`PER_SAMPLE`, `PER_CALL`)."""
    mergers: dict[str, Merger] = field(default_factory=dict)
    """By path, the merger of a tensor that `forward` sets, which remembers its batch dim."""
    verdicts: Mapping[str, Verdicts] = field(default_factory=dict)
    """By path, the probe's verdicts for tensors that `forward` sets on the module."""
    unmergeable: Collection[str] = ()
    """Paths of attributes that no output rule can merge, as the probe has found."""
    sample_dependent: Collection[str] = ()
    """Paths of state whose new value depends on the samples, as the probe has found."""
    constant: Collection[str] = ()
    """Paths of attributes that get the same value for any samples, as the probe has found."""
    inputs: Sequence[Mapping[str, Any]] = ()
    """The arguments of the replicas while the state of their call is merged."""

    def __post_init__(self) -> None:
        self.carried = CarriedState(self.rules)
        self._cached_owners: tuple[weakref.ref[Replica], TensorOwners] | None = None
        self.problems: list[Problem] = []
        """Changes without a rule, found since `merge_into` was called."""

    @contextmanager
    def using_inputs(self, inputs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Set the arguments of the replicas, which some rules use."""
        self.inputs = inputs
        try:
            yield
        finally:
            self.inputs = ()

    def merge_into(
        self,
        source: nn.Module,
        replicas: Sequence[Replica],
        results: Sequence[ReplicaResult],
        sizes: Sequence[int],
        container_paths: Mapping[int, StatePath],
    ) -> None:
        """Apply the changes of all replicas to the source. `container_paths` has the paths of containers by id.

        Raises one `StateError` for all changes without a rule, before it writes anything.
        """
        self.problems = []
        writes = [
            *self._merge_attributes(source, replicas, results, sizes),
            *self._merge_tensors(source, replicas, results, sizes, container_paths),
            *self._merge_containers(replicas, results, sizes, container_paths),
        ]
        if self.problems:
            raise set_problems(StateError(), self.problems)
        run_uninterrupted(*writes)  # all or none: an interruption must not leave half of the state
        for replica, result in zip(replicas, results, strict=True):
            replica.revert(result.changes)

    def _merge_attributes(
        self, source: nn.Module, replicas: Sequence[Replica], results: Sequence[ReplicaResult], sizes: Sequence[int]
    ) -> list[StateWrite]:
        """Merge attributes and buffers that `forward` set."""
        tables = [{(c.module_index, c.name): c for c in result.changes.attributes} for result in results]
        if not any(tables):
            return []
        modules = replicas[0].source_modules
        names = module_names(source, modules)
        origins = [replica.cloner.sources_by_clone_id() for replica in replicas]
        writes = []
        for key in dict.fromkeys(key for table in tables for key in table):
            index, name = key
            if is_parameter_cache(modules[index], name):
                continue
            change = next(table[key] for table in tables if key in table)
            table_of_source = modules[index]._buffers if change.is_buffer else modules[index].__dict__
            old = table_of_source.get(name, MISSING)
            new = [
                table[key].new if key in table else _current_value(replicas[r], change)
                for r, table in enumerate(tables)
            ]
            new = [originals.get(id(value), value) for originals, value in zip(origins, new, strict=True)]
            new = [_map_device(value, replica, replicas[0]) for replica, value in zip(replicas, new, strict=True)]
            path = f"{names[index]}.{name}" if names[index] else name
            if is_computed_from_parameters(modules[index], name):
                value = new[0]
            else:
                value = self.merge_value(StatePath(path), old, new, sizes, builtin_rule(modules[index], name))
            writes.append(_attribute_write(table_of_source, name, _to_device_of(value, old)))
            if path in self.mergers and self.mergers[path].batch_dims:
                self.carried.record(modules[index], name, path, self.mergers[path].batch_dims)
        return writes

    def _merge_tensors(
        self,
        source: nn.Module,
        replicas: Sequence[Replica],
        results: Sequence[ReplicaResult],
        sizes: Sequence[int],
        container_paths: Mapping[int, StatePath],
    ) -> list[StateWrite]:
        """Merge state tensors that `forward` wrote in place."""
        touched = {id(pair[0]): pair[0] for result in results for pair in result.written_state}
        sent: list[dict[int, Tensor]] = [{} for _ in replicas]
        writes: list[StateWrite] = []
        if any(result.statistics for result in results):
            local = next((index for index, replica in enumerate(replicas) if not replica.is_remote), 0)
            statistics = replicas[local].statistics
            if statistics is not None and self._merge_statistics(source, local, replicas, results, sizes, touched):
                writes.append(statistics.write_to_source)
            else:
                sent = _separate_statistics(replicas, results, touched)
        if not touched:
            return writes
        copies = [
            {id(original): copy for original, copy in replica.tensors.state} | values
            for replica, values in zip(replicas, sent, strict=True)
        ]
        pairs, owners = [], self._owners_for(source, replicas[0])
        for key, original in touched.items():
            values = [table[key] for table in copies]
            owner = owners.find(original)
            path = StatePath(owner.path)
            if owner.module is None:
                path = _path_in_container(original, replicas[0], container_paths)
            rule = builtin_rule(owner.module, owner.name)
            if rule is None and self.default_rule is not None:
                rule = self.default_rule(source, owner.path)
                if rule is not None and all(values_equal(value, values[0]) for value in values[1:]):
                    rule = "first"
            pairs.append((original, self.merge_value(path, original, values, sizes, rule)))
        return [*writes, partial(_copy_values, pairs)]

    def _merge_statistics(
        self,
        source: nn.Module,
        local: int,
        replicas: Sequence[Replica],
        results: Sequence[ReplicaResult],
        sizes: Sequence[int],
        touched: Mapping[int, Tensor],
    ) -> bool:
        """Merge running statistics in the blocks of a replica of this process. Returns False if each needs a rule."""
        statistics = replicas[local].statistics
        assert statistics is not None
        if self.rules and statistics.has_user_rule is None:
            owners = self._owners_for(source, replicas[0])
            paths = [StatePath(owners.find(original).path) for original, _ in statistics.pairs]
            statistics.has_user_rule = any(self.state_rule(path) is not None for path in paths)
        if statistics.has_user_rule or not touched.keys().isdisjoint(statistics.keys):
            return False
        return statistics.merge(
            [result.statistics for result in results], sizes, replicas[local].syncs_statistics, local
        )

    def _owners_for(self, source: nn.Module, replica: Replica) -> TensorOwners:
        """The owners of the source's tensors, cached while the replicas are the same."""
        if self._cached_owners is None or self._cached_owners[0]() is not replica:
            self._cached_owners = weakref.ref(replica), TensorOwners(source)
        self._cached_owners[1].invalidate()
        return self._cached_owners[1]

    def _merge_containers(
        self,
        replicas: Sequence[Replica],
        results: Sequence[ReplicaResult],
        sizes: Sequence[int],
        container_paths: Mapping[int, StatePath],
    ) -> list[StateWrite]:
        """Merge containers that `forward` changed in place."""
        if not any(result.changes.containers for result in results):
            return []
        copies = [{id(source): copy for source, _, copy in replica.cloner.containers} for replica in replicas]
        origins = [replica.cloner.sources_by_clone_id() for replica in replicas]
        changed = [{id(change.container): change.after for change in result.changes.containers} for result in results]
        writes: list[StateWrite] = []
        for key, container in {id(source): source for source, _, _ in replicas[0].cloner.containers}.items():
            containers = [table.get(key) for table in copies]
            if not any(id(copy) in table for copy, table in zip(containers, changed, strict=True)):
                continue
            new = []
            for copy, table, originals in zip(containers, changed, origins, strict=True):
                after = table[id(copy)] if id(copy) in table else read_contents(copy)
                keys, items = (tuple(originals.get(id(item), item) for item in part) for part in after)
                new.append(Contents(keys, items))
            path = container_paths.get(key, StatePath("a container without a name"))
            merged = merge_contents(container, path, read_contents(container), new, sizes, self)
            writes.append(partial(write_contents, container, merged))
            if isinstance(container, dict):
                self._record_entries(container, path, merged.keys)
        return writes

    def _record_entries(self, table: dict[Any, Any], path: StatePath, keys: Sequence[Any]) -> None:
        for key in keys:
            name = str(path.child(key))
            if name in self.mergers and self.mergers[name].batch_dims:
                self.carried.record_entry(
                    table, key, path.attribute.rpartition(".")[2], name, self.mergers[name].batch_dims
                )

    def state_rule(self, path: StatePath) -> StateRule | None:
        """The rule of a path: its own, or that of the nearest container around it, up to the attribute."""
        for count in range(len(path.keys), -1, -1):
            where = str(StatePath(path.attribute, path.keys[:count]))
            found = next((rule for pattern, rule in self.rules.items() if fnmatchcase(where, pattern)), None)
            if found is not None:
                return found
        return None

    def merge_value(
        self, path: StatePath, old: Any, new: list[Any], sizes: Sequence[int], builtin: StateRule | None = None
    ) -> Any:
        """The merged value of an attribute or container entry. `builtin` is the rule of a layer of torch."""
        rule, name = self.state_rule(path) or builtin, str(path)
        if rule == "cat" and all(any(True for _ in tensors_in(value)) for value in new):
            return self._merge_output(path, new, sizes)
        if rule is not None:
            return apply_state_rule(rule, old, new, sizes, name, entry=bool(path.keys))
        if all(value is old for value in new):
            return old
        if name in self.unmergeable and not self._is_named_output(path):
            return self.reject(path, new)
        if name in self.verdicts:
            return self._merge_output(path, new, sizes)
        if self._is_named_output(path) and all(map(_has_values, new)):
            return self._merge_output(path, new, sizes)
        constant = self.is_constant(path)
        if all(values_equal(value, new[0]) for value in new) or (constant and _equal_ignoring_graph(new)):
            if values_equal(old, new[0]) or constant or not self._may_be_per_shard(path, old, new[0], sizes):
                return new[0]
            if name not in self.mergers:
                return self.reject(path, new)
        if self._is_output(path, old, new, sizes):
            return self._merge_output(path, new, sizes)
        return self.reject(path, new)

    def _may_be_per_shard(self, path: StatePath, old: Any, new: Any, sizes: Sequence[int]) -> bool:
        """Whether a value that is equal on all replicas may differ from that for the whole batch."""
        if self.is_sample_dependent(path) or may_be_shard_size(old, new, sizes):
            return True
        return self._may_follow_batch(str(path), old, new, sizes[0])

    def is_constant(self, path: StatePath) -> bool:
        """Whether state gets the same value for any samples, as the probe has found."""
        return str(path.without_indices()) in self.constant

    def is_sample_dependent(self, path: StatePath) -> bool:
        """Whether the new value of state depends on the samples, as the probe has found."""
        return str(path.without_indices()) in self.sample_dependent

    def _may_follow_batch(self, name: str, old: Any, new: Any, size: int) -> bool:
        """Whether tensors that are equal on all replicas may have one row per sample of a shard (zeros, ones)."""
        tensors = list(tensors_in(new))
        if tensors and name in self.mergers and self.mergers[name].batch_dims:
            return True
        if size < 2 or (isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape):
            return False
        dim = self.output_merger.dim
        return any(tensor.ndim > dim and tensor.shape[dim] == size for tensor in tensors)

    def reject(self, path: StatePath, new: list[Any]) -> Any:
        """Record a problem, or warn, for a change without a rule. Returns the first replica's value."""
        name = str(path.without_indices())
        different = "to a different value on each replica"
        if all(values_equal(value, new[0]) for value in new):
            different = "to a value that may depend on the size of a replica's shard"
        if self.on_unmerged == "warn":
            warn_caller(f"forward changed {name!r} {different}. The first replica's value is kept.")
            return new[0]
        cat = "" if _is_scalar(new[0]) else "'cat' (lists and sets, in the order of the samples), "
        advice = (
            f"If its new value depends on the old one, set a rule for {name!r} in state: 'sum' (the old value and the "
            f"sum of the changes: counters, totals), 'mean' (weighted by samples), {cat}'max', 'min', 'first' or a "
            "function.",
            "If forward assigns it without reading the old value, set the rule in merge, as for an output. If it "
            "combines samples, gather them in forward with instep.all_gather.",
            "on_unmerged_state='warn' keeps the first replica's value.",
        )
        headline = f"forward changed {name!r} {different}, and no state rule is set for it."
        self.problems.append(Problem(name, headline, advice, keyword="state"))
        return new[0]

    def output_rule(self, path: StatePath) -> Any:
        """The output rule of a path: its own, or that of the nearest container around it."""
        for count in range(len(path.keys), -1, -1):
            rule = find_rule(self.output_merger.rules, (*path.attribute.split("."), *path.keys[:count]))
            if rule is not None:
                return rule
        return None

    def _is_named_output(self, path: StatePath) -> bool:
        """Whether `merge=` names this path or a container around it."""
        paths = ((*path.attribute.split("."), *path.keys[:count]) for count in range(len(path.keys) + 1))
        return any(find_rule(self.output_merger.path_rules, keys) is not None for keys in paths)

    def _is_output(self, path: StatePath, old: Any, new: list[Any], sizes: Sequence[int]) -> bool:
        """Whether a value is merged like an output: it requires a gradient, or has a batch dim or an output rule.

        A tensor that had the same shape before the call is state, unless it had a batch dim in an earlier call.
        """
        if self.output_rule(path) is not None:
            return True
        tensors = [list(tensors_in(value)) for value in new]
        if any(tensor.requires_grad for found in tensors for tensor in found):
            return True
        merger = self.mergers.get(str(path))
        same_shape = [v for v in new if isinstance(v, Tensor) and isinstance(old, Tensor) and v.shape == old.shape]
        if same_shape and (merger is None or not merger.batch_dims):
            return False
        counts = set(map(len, tensors))
        if counts == {0} or len(counts) > 1:
            return False
        return all(_any_batch_dim([tensor.shape for tensor in leaf], sizes) for leaf in zip(*tensors, strict=True))

    def _merge_output(self, path: StatePath, new: list[Any], sizes: Sequence[int]) -> Any:
        name = str(path)
        device = next((t.device for value in new for t in tensors_in(value)), None)
        values = [map_tensors(lambda t: t.to(device), value) for value in new]
        rule = self.output_rule(path)
        if name not in self.mergers:
            self.mergers[name] = Merger(self.output_merger.dim, rules={} if rule is None else {"*": rule})
        merger = self.mergers[name]
        try:
            merger.set_verdicts(self.verdicts.get(name, {}))
            merged = merger.merge(values, sizes, self.inputs)
        except MergeError as error:
            if not error.problems:
                raise StateError(
                    f"forward set {name!r} to tensors that cannot be merged: {error}\n"
                    f"Write a rule, as for an output:  merge={{{name!r}: ...}}"
                ) from error
            reason = error.problems[0].headline.partition(": ")[2]
            self.problems.append(
                Problem(
                    str(path.without_indices()),
                    f"forward set {name!r} to tensors that cannot be merged: {reason}",
                    (f"Write a rule, as for an output:  merge={{{str(path.without_indices())!r}: ...}}",),
                    keyword="state",
                )
            )
            return new[0]
        if isinstance(rule, tuple) and rule[0] == "cat":  # the dim of the rule
            merger.batch_dims.update({where: (tensor.ndim, rule[1]) for where, tensor in tensors_by_path(merged)})
        return merged


def _separate_statistics(
    replicas: Sequence[Replica], results: Sequence[ReplicaResult], touched: dict[int, Tensor]
) -> list[dict[int, Tensor]]:
    """Add running statistics to the written tensors. Returns, for each replica, those that its process has sent.

    Synchronized statistics that were not sent are the first replica's, unless its forward has written them otherwise.
    """
    first, own = results[0].statistics, {id(original): copy for original, copy in replicas[0].tensors.state}
    originals = {id(original): original for original, _ in replicas[0].tensors.state}
    found = []
    for replica, result in zip(replicas, results, strict=True):
        written = result.statistics
        values: dict[int, Tensor] = {}
        if written is not None:
            touched.update((key, originals[key]) for key in written.keys)
            values = written.split(originals) if replica.is_remote else {}
            if not written.blocks and first is not None and not first.by_user:
                values = {key: own[key] for key in written.keys}
        found.append(values)
    return found


def _path_in_container(tensor: Tensor, replica: Replica, container_paths: Mapping[int, StatePath]) -> StatePath:
    """The path of a tensor that is an item of a container."""
    for container, contents, _ in replica.cloner.containers:
        for index, item in enumerate(contents.items):
            if item is tensor and id(container) in container_paths:
                return container_paths[id(container)].child(contents.keys[index] if contents.keys else index)
    return StatePath("a tensor without a name")


def _any_batch_dim(shapes: Sequence[torch.Size], sizes: Sequence[int]) -> bool:
    """Whether some dim of the tensors has the size of the shard on each replica."""
    return any(has_batch_dim(shapes, sizes, len(shapes[0]), dim) for dim in range(len(shapes[0])))


def check_no_parameter_writes(source: nn.Module, written: Sequence[Tensor], overwritten: Sequence[Tensor] = ()) -> None:
    """Raise `StateError` if `forward` wrote to trainable tensors. The `overwritten` ones have the new values."""
    if written:
        raise parameter_write_error(source, written, overwritten)


def _current_value(replica: Replica, change: AttributeChange) -> Any:
    _, module = replica.cloner.modules[change.module_index]
    return (module._buffers if change.is_buffer else module.__dict__).get(change.name, MISSING)


def _map_device(value: Any, replica: Replica, first: Replica) -> Any:
    """Replace the replica's device by the first replica's (`self.device = x.device`)."""
    return first.device if isinstance(value, torch.device) and value == replica.device else value


def _to_device_of(value: Any, old: Any) -> Any:
    return value.to(old.device) if isinstance(value, Tensor) and isinstance(old, Tensor) else value


def _attribute_write(table: dict[str, Any], name: str, value: Any) -> StateWrite:
    def write() -> None:
        table[name] = value

    return write


def _copy_values(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values to tensors of the source, without incrementing version counters."""
    with torch.no_grad(), set_inference_mode(False):
        dense = [(original, value) for original, value in pairs if original.shape == value.shape and is_dense(original)]
        if dense:
            torch._foreach_copy_([original.data for original, _ in dense], [value.detach() for _, value in dense])
        for original, value in pairs:
            if original.shape != value.shape:
                original.data = value.to(original.device, original.dtype, copy=True)
            elif not is_dense(original):
                original.data.copy_(value)


def _equal_ignoring_graph(values: Sequence[Any]) -> bool:
    """Whether values are equal, if the graphs of their tensors are ignored."""
    detached = [map_tensors(Tensor.detach, value) for value in values]
    return all(values_equal(value, detached[0]) for value in detached)


def _has_values(value: Any) -> bool:
    """Whether a value is a number or contains tensors."""
    number = isinstance(value, NUMBER_TYPES) and not isinstance(value, bool)
    return number or any(True for _ in tensors_in(value))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) or (isinstance(value, Tensor) and not value.ndim)
