"""Merging of state changes of all replicas into the source module."""

from __future__ import annotations

import warnings
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
from instep.replicas.diff import MISSING
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
from instep.runtime.locks import run_uninterrupted
from instep.runtime.modes import set_inference_mode
from instep.structure.merge import Merger
from instep.structure.merge_rules import find_rule
from instep.structure.shapes import has_batch_dim, is_dense
from instep.structure.tree import map_tensors, tensors_in
from instep.structure.verdicts import Verdicts

StateWrite = Callable[[], None]


@dataclass
class StateMerger:
    """Brings state changes home for one source module."""

    rules: Mapping[str, StateRule]
    output_merger: Merger
    """The rules of outputs, for tensors that `forward` left on the module."""
    on_unmerged: str = "error"
    default_rule: Callable[[nn.Module, str], StateRule | None] | None = None
    """The rule for state that torch's own layers keep, by its path, where the user gave none and replicas differ; where
    they do not, it is theirs."""
    list_growth: dict[str, str] = field(default_factory=dict)
    """What lists that grew turned out to be: one entry per sample, or not."""
    mergers: dict[str, Merger] = field(default_factory=dict)
    """By path, what merges a tensor that was left there, and remembers the dim that follows the batch."""
    verdicts: Mapping[str, Verdicts] = field(default_factory=dict)
    """By dotted name: what trials said of the tensors that `forward` sets on the module."""
    unmergeable: Collection[str] = ()
    """Dotted names of attributes of which trials said that no rule of outputs makes the whole's from the parts'."""
    sample_dependent: Collection[str] = ()
    """Places of state that trials saw to become another for other samples: alike on replicas, they are shards'."""
    constant: Collection[str] = ()
    """Dotted names of attributes that trials saw to become the same for any number of samples."""
    inputs: Sequence[Mapping[str, Any]] = ()
    """The arguments of the replicas, for as long as their call is settled."""

    def __post_init__(self) -> None:
        self.carried = CarriedState(self.rules)
        self._cached_owners: tuple[weakref.ref[Replica], TensorOwners] | None = None

    @contextmanager
    def using_inputs(self, inputs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """The arguments of the replicas, which some rules look at."""
        self.inputs = inputs
        try:
            yield
        finally:
            self.inputs = ()

    def merge_into(
        self,
        source: nn.Module,
        replicas: Sequence[Replica],
        outcomes: Sequence[ReplicaResult],
        sizes: Sequence[int],
        places: Mapping[int, StatePath],
    ) -> None:
        """Set on the source what `forward` changed; `places` says where each container of the source is."""
        writes = [
            *self._merge_attributes(source, replicas, outcomes, sizes),
            *self._merge_tensors(source, replicas, outcomes, sizes, places),
            *self._merge_containers(replicas, outcomes, sizes, places),
        ]
        run_uninterrupted(*writes)  # all or none: an interruption in between would leave the state of no call
        for replica, outcome in zip(replicas, outcomes, strict=True):
            replica.revert(outcome.changes)

    def _merge_attributes(
        self, source: nn.Module, replicas: Sequence[Replica], outcomes: Sequence[ReplicaResult], sizes: Sequence[int]
    ) -> list[StateWrite]:
        """Attributes and buffers that `forward` set to another object."""
        tables = [{(c.module_index, c.name): c for c in outcome.changes.attributes} for outcome in outcomes]
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
            holder = modules[index]._buffers if change.is_buffer else modules[index].__dict__
            old = holder.get(name, MISSING)
            new = [
                table[key].new if key in table else _current_value(replicas[r], change)
                for r, table in enumerate(tables)
            ]
            new = [known.get(id(value), value) for known, value in zip(origins, new, strict=True)]
            new = [_map_device(value, replica, replicas[0]) for replica, value in zip(replicas, new, strict=True)]
            path = f"{names[index]}.{name}" if names[index] else name
            derived = is_computed_from_parameters(modules[index], name)
            value = (
                new[0]
                if derived
                else self.merge_value(StatePath(path), old, new, sizes, builtin_rule(modules[index], name))
            )
            writes.append(_attribute_write(holder, name, _to_device_of(value, old)))
            if path in self.mergers and self.mergers[path].batch_dims:
                self.carried.record(modules[index], name, path, self.mergers[path].batch_dims)
        return writes

    def _merge_tensors(
        self,
        source: nn.Module,
        replicas: Sequence[Replica],
        outcomes: Sequence[ReplicaResult],
        sizes: Sequence[int],
        places: Mapping[int, StatePath],
    ) -> list[StateWrite]:
        """State tensors that `forward` wrote in place."""
        touched = {id(pair[0]): pair[0] for outcome in outcomes for pair in outcome.written_state}
        if not touched:
            return []
        copies = [{id(original): copy for original, copy in replica.tensors.state} for replica in replicas]
        pairs, owners = [], self._owners_for(source, replicas[0])
        for key, original in touched.items():
            values = [table[key] for table in copies]
            owner = owners.find(original)
            place = (
                StatePath(owner.path) if owner.module is not None else _path_in_container(original, replicas[0], places)
            )
            known = builtin_rule(owner.module, owner.name)
            usual = self.default_rule(source, owner.path) if known is None and self.default_rule is not None else None
            if usual is not None:
                known = "first" if all(values_equal(value, values[0]) for value in values[1:]) else usual
            pairs.append((original, self.merge_value(place, original, values, sizes, known)))
        return [partial(_copy_values, pairs)]

    def _owners_for(self, source: nn.Module, replica: Replica) -> TensorOwners:
        """Who holds the tensors of the source; as long as its replicas are the same, modules keep their names."""
        if self._cached_owners is None or self._cached_owners[0]() is not replica:
            self._cached_owners = weakref.ref(replica), TensorOwners(source)
        self._cached_owners[1].invalidate()
        return self._cached_owners[1]

    def _merge_containers(
        self,
        replicas: Sequence[Replica],
        outcomes: Sequence[ReplicaResult],
        sizes: Sequence[int],
        places: Mapping[int, StatePath],
    ) -> list[StateWrite]:
        """Containers that `forward` changed in place."""
        if not any(outcome.changes.containers for outcome in outcomes):
            return []
        counterparts = [{id(source): made for source, _, made in replica.cloner.containers} for replica in replicas]
        origins = [replica.cloner.sources_by_clone_id() for replica in replicas]
        changed = [{id(inside.container): inside.after for inside in o.changes.containers} for o in outcomes]
        writes: list[StateWrite] = []
        for key, container in {id(source): source for source, _, _ in replicas[0].cloner.containers}.items():
            made = [table.get(key) for table in counterparts]
            if not any(id(one) in table for one, table in zip(made, changed, strict=True)):
                continue
            new = []
            for one, table, known in zip(made, changed, origins, strict=True):
                after = table[id(one)] if id(one) in table else read_contents(one)
                new.append(Contents(_to_source_objects(after.keys, known), _to_source_objects(after.items, known)))
            place = places.get(key, StatePath("a container that no module holds by name"))
            merged = merge_contents(container, place, read_contents(container), new, sizes, self)
            writes.append(partial(write_contents, container, merged))
            if isinstance(container, dict):
                self._record_entries(container, place, merged.keys)
        return writes

    def _record_entries(self, table: dict[Any, Any], place: StatePath, keys: Sequence[Any]) -> None:
        for key in keys:
            path = str(place.child(key))
            if path in self.mergers and self.mergers[path].batch_dims:
                self.carried.record_entry(
                    table, key, place.attribute.rpartition(".")[2], path, self.mergers[path].batch_dims
                )

    def state_rule(self, place: StatePath) -> StateRule | None:
        """The rule of a place: its own, or that of what it is in, up to the attribute."""
        for count in range(len(place.keys), -1, -1):
            where = str(StatePath(place.attribute, place.keys[:count]))
            found = next((rule for pattern, rule in self.rules.items() if fnmatchcase(where, pattern)), None)
            if found is not None:
                return found
        return None

    def merge_value(
        self, place: StatePath, old: Any, new: list[Any], sizes: Sequence[int], known: StateRule | None = None
    ) -> Any:
        """The whole's value of an attribute, or of an entry of a container; `known` is a rule of torch's own layer."""
        rule, path = self.state_rule(place) or known, str(place)
        if rule == "cat" and all(any(True for _ in tensors_in(value)) for value in new):
            return self._merge_output(place, new, sizes)
        if rule is not None:
            return apply_state_rule(rule, old, new, sizes, path, entry=bool(place.keys))
        if all(value is old for value in new):
            return old
        if path in self.unmergeable and not self._is_named_output(place):
            return self.reject(place, new)
        if path in self.verdicts:
            return self._merge_output(place, new, sizes)
        if self._is_named_output(place) and all(any(True for _ in tensors_in(value)) for value in new):
            return self._merge_output(place, new, sizes)
        fixed = self.is_constant(place)
        if all(values_equal(value, new[0]) for value in new) or (fixed and _equal_ignoring_graph(new)):
            if values_equal(old, new[0]) or fixed or not self._may_be_per_shard(place, old, new[0], sizes):
                return new[0]
            if path not in self.mergers:
                return self.reject(place, new)
        if self._is_output(place, old, new, sizes):
            return self._merge_output(place, new, sizes)
        return self.reject(place, new)

    def _may_be_per_shard(self, place: StatePath, old: Any, new: Any, sizes: Sequence[int]) -> bool:
        """Whether what is alike on every replica may still be a shard's, and not what the whole would get."""
        if self.is_sample_dependent(place) or may_be_shard_size(old, new, sizes):
            return True
        return self._may_follow_batch(str(place), old, new, sizes[0])

    def is_constant(self, place: StatePath) -> bool:
        """Whether trials saw a place of state become the same for any number of samples."""
        return str(place.without_indices()) in self.constant

    def is_sample_dependent(self, place: StatePath) -> bool:
        """Whether trials saw a place of state become another for other samples."""
        return str(place.without_indices()) in self.sample_dependent

    def _may_follow_batch(self, path: str, old: Any, new: Any, size: int) -> bool:
        """Whether tensors that are alike on every replica may hold the samples of a shard each: zeros, or ones."""
        tensors = list(tensors_in(new))
        if tensors and path in self.mergers and self.mergers[path].batch_dims:
            return True
        if size < 2 or (isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape):
            return False
        dim = self.output_merger.dim
        return any(tensor.ndim > dim and tensor.shape[dim] == size for tensor in tensors)

    def reject(self, place: StatePath, new: list[Any]) -> Any:
        """`StateError` for changes that no rule explains; or the first replica's value, and a warning."""
        path = str(place.without_indices())
        alike = all(values_equal(value, new[0]) for value in new)
        how = "by what may come from the size of a shard, alike" if alike else "differently"
        if self.on_unmerged == "warn":
            warnings.warn(f"{path} was changed {how} by each replica; the first one's is kept.", stacklevel=2)
            return new[0]
        joined = f"  state={{{path!r}: 'cat'}}    # joined in the order of the samples: lists and sets that grew\n"
        raise StateError(
            f"forward changed {path!r} {how} on each replica, and no rule says what the whole would have.\n"
            f"Write one of:\n"
            f"  state={{{path!r}: 'sum'}}    # old + the sum of the changes: counters, running totals\n"
            f"  state={{{path!r}: 'mean'}}   # weighted by samples; or 'max', 'min', 'first', a function\n"
            f"{'' if _is_scalar(new[0]) else joined}"
            f"  z = instep.all_gather(z)   # inside forward, if it comes from samples that meet\n"
            f"  on_unmerged_state='warn'   # keep the first replica's and say so"
        )

    def output_rule(self, place: StatePath) -> Any:
        """The rule that a place has as an output: its own, or that of what it is in."""
        for count in range(len(place.keys), -1, -1):
            rule = find_rule(self.output_merger.rules, (*place.attribute.split("."), *place.keys[:count]))
            if rule is not None:
                return rule
        return None

    def _is_named_output(self, place: StatePath) -> bool:
        """Whether `merge=` names this very place, or what it is in."""
        paths = ((*place.attribute.split("."), *place.keys[:count]) for count in range(len(place.keys) + 1))
        return any(find_rule(self.output_merger.path_rules, path) is not None for path in paths)

    def _is_output(self, place: StatePath, old: Any, new: list[Any], sizes: Sequence[int]) -> bool:
        """Whether an attribute is one more output: it needs a gradient, follows the batch, or has an output's rule.

        A tensor that had this very shape before the call is state, whatever the size of a shard happens to be, unless
        it was seen to follow the batch in an earlier one.
        """
        if self.output_rule(place) is not None:
            return True
        tensors = [list(tensors_in(value)) for value in new]
        if any(tensor.requires_grad for mine in tensors for tensor in mine):
            return True
        known = self.mergers.get(str(place))
        kept = [v for v in new if isinstance(v, Tensor) and isinstance(old, Tensor) and v.shape == old.shape]
        if kept and (known is None or not known.batch_dims):
            return False
        counts = set(map(len, tensors))
        if counts == {0} or len(counts) > 1:
            return False
        return all(_any_dim_follows([tensor.shape for tensor in leaf], sizes) for leaf in zip(*tensors, strict=True))

    def _merge_output(self, place: StatePath, new: list[Any], sizes: Sequence[int]) -> Any:
        path = str(place)
        device = next((t.device for value in new for t in tensors_in(value)), None)
        near = [map_tensors(lambda t: t.to(device), value) for value in new]
        rule = self.output_rule(place)
        if path not in self.mergers:
            self.mergers[path] = Merger(self.output_merger.dim, rules={} if rule is None else {"*": rule})
        merger = self.mergers[path]
        try:
            merger.set_verdicts(self.verdicts.get(path, {}))
            merged = merger.merge(near, sizes, self.inputs)
        except MergeError as error:
            raise StateError(
                f"forward left a tensor at {path!r} that cannot be merged: {error}\n"
                f"Name it as an output:  merge={{{path!r}: ...}}"
            ) from error
        if isinstance(rule, tuple) and rule[0] == "cat":  # a dim that was said needs no finding, and is kept too
            merger.batch_dims.update({where: (tensor.ndim, rule[1]) for where, tensor in tensors_by_path(merged)})
        return merged


def _path_in_container(tensor: Tensor, replica: Replica, places: Mapping[int, StatePath]) -> StatePath:
    """Where a tensor is that no module holds by name: the container it is in, and its key there."""
    for container, contents, _ in replica.cloner.containers:
        for index, item in enumerate(contents.items):
            if item is tensor and id(container) in places:
                return places[id(container)].child(contents.keys[index] if contents.keys else index)
    return StatePath("a tensor that no module holds by name")


def _to_source_objects(items: Sequence[Any], origins: Mapping[int, Any]) -> tuple[Any, ...]:
    """Items of a replica's container, with the source's own objects where they stand for one."""
    return tuple(origins.get(id(item), item) for item in items)


def _any_dim_follows(shapes: Sequence[torch.Size], sizes: Sequence[int]) -> bool:
    """Whether some dim of the replicas' tensors has the size of the shard on each of them."""
    return any(has_batch_dim(shapes, sizes, len(shapes[0]), dim) for dim in range(len(shapes[0])))


def check_no_parameter_writes(source: nn.Module, written: Sequence[Tensor], overwritten: Sequence[Tensor] = ()) -> None:
    """`StateError` if `forward` wrote to trainable tensors of the source, or in their place to a replica's.

    Those that are `overwritten` hold now what it wrote.
    """
    if written:
        raise parameter_write_error(source, written, overwritten)


def _current_value(replica: Replica, change: Any) -> Any:
    _, module = replica.cloner.modules[change.module]
    return (module._buffers if change.is_buffer else module.__dict__).get(change.name, MISSING)


def _map_device(value: Any, replica: Replica, first: Replica) -> Any:
    """The first replica's device, where a replica has noted its own (`self.device = x.device`)."""
    return first.device if isinstance(value, torch.device) and value == replica.device else value


def _to_device_of(value: Any, old: Any) -> Any:
    return value.to(old.device) if isinstance(value, Tensor) and isinstance(old, Tensor) else value


def _attribute_write(holder: dict[str, Any], name: str, value: Any) -> StateWrite:
    def write() -> None:
        holder[name] = value

    return write


def _copy_values(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors of the source their values, without moving their version counters."""
    with torch.no_grad(), set_inference_mode(False):
        alike = [(original, value) for original, value in pairs if original.shape == value.shape and is_dense(original)]
        if alike:
            torch._foreach_copy_([original.data for original, _ in alike], [value.detach() for _, value in alike])
        for original, value in pairs:
            if original.shape != value.shape:
                original.data = value.to(original.device, original.dtype, copy=True)
            elif not is_dense(original):
                original.data.copy_(value)


def _equal_ignoring_graph(values: Sequence[Any]) -> bool:
    """Whether values are equal, whatever graphs their tensors belong to: what weights alone make has one on each."""
    bare = [map_tensors(Tensor.detach, value) for value in values]
    return all(values_equal(value, bare[0]) for value in bare)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) or (isinstance(value, Tensor) and not value.ndim)
