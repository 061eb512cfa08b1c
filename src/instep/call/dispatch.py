"""One forward on all replicas, joined to the caller's autograd graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from instep.autograd.bridge import BackwardEngine, CallGraph, ReplicaGraph, VersionTracker, as_non_leaf, bridge
from instep.autograd.graph_walk import find_custom_functions, reachable_leaves
from instep.autograd.nested_outputs import flatten_outputs, rebuild_output
from instep.call.shared_arguments import SharedArguments
from instep.devices import move_to_device
from instep.engines.base import Engine, ReplicaCall
from instep.replicas.diff import Changes, ContainerChange
from instep.replicas.object_graph import Contents
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.state.carried import CarriedValue
from instep.replicas.tensors import ParameterSharing
from instep.replicas.write_watch import memory_key
from instep.runtime.ambient import AmbientState
from instep.runtime.rng import ReplicaRng
from instep.structure.shapes import is_plain_tensor
from instep.structure.tree import map_tensors, tensors_in

_first, _second = itemgetter(0), itemgetter(1)
_is_leaf = attrgetter("is_leaf")


@dataclass
class ReplicaDispatch:
    """What goes in: the active replicas, each one's arguments, and what surrounds the call."""

    engine: Engine
    replicas: Sequence[Replica]
    method: str
    ambient: AmbientState
    sync: bool
    streams: ReplicaRng
    """Where the replicas draw random numbers from."""
    sizes: Sequence[int] = ()
    """The samples of each replica's shard."""
    carried: Sequence[CarriedValue] = ()
    """State that each replica gets its samples' part of."""
    shared_arguments: SharedArguments | None = None
    """What all replicas are given whole."""
    argument_ids: Collection[int] = ()
    """The ids of what the caller's arguments hold and replicas may change in place, tensors apart."""
    hooks: range = range(0)
    """The numbers of the hooks that came to be while the replicas ran."""
    find_functions: bool = False
    """Whether to look for functions with a backward of the user's own."""
    functions: Sequence[str] = ()
    """The names of those that were found."""
    retains: bool = False
    """Whether a tensor came out whose gradient `forward` has asked for (`z.retain_grad()`)."""

    def __post_init__(self) -> None:
        self._versions: list[tuple[str, Tensor, int]] = []

    def written_argument(self) -> str | None:
        """The name of an argument that a replica wrote to."""
        return next((name for name, tensor, version in self._versions if tensor._version != version), None)

    def run(self, shards: Sequence[Sequence[Any]], positional: int, names: Sequence[str]) -> list[ReplicaResult]:
        """Every replica's outcome, with outputs that belong to the caller's graph."""
        ways = [_EnteredShards() for _ in shards]
        grad = self.ambient.grad_enabled and not self.ambient.inference_mode
        notes = VersionTracker()
        copies: list[tuple[Tensor, Tensor]] = []
        count = len(names)
        shards = [[*values, *parts] for values, parts in zip(shards, self._carried_shards(), strict=True)]
        if self.engine.joint_graph:
            entered = [_copy_shards(values, notes, copies) for values in shards] if grad else shards
        else:
            entered = [way.enter(values) if grad else values for way, values in zip(ways, shards, strict=True)]
        named = [(name, value) for values in entered for name, value in zip(names, values, strict=False)]
        tensors = [(name, tensor) for name, value in named for tensor in tensors_in(value)]
        self._versions = [(name, tensor, tensor._version) for name, tensor in tensors if not tensor.is_inference()]
        if self.shared_arguments is not None:
            self.shared_arguments.enter([values[:count] for values in entered])
            self.argument_ids = {*self.argument_ids, *self.shared_arguments.ids}
        arguments = [
            (list(values[:positional]), dict(zip(names[positional:], values[positional:count], strict=True)))
            for values in entered
        ]
        if self.carried:
            for replica, values in zip(self.replicas, entered, strict=True):
                replica.assign_shard(self.carried, values[count:])
        first = RemovableHandle.next_id
        outcomes = self.engine.forward(
            ReplicaCall(
                self.replicas,
                arguments,
                self.method,
                self.ambient,
                self.sync,
                self.streams,
                self.sizes,
                [way.inner for way in ways],
                self.argument_ids,
                names,
            )
        )
        self.hooks = range(first, RemovableHandle.next_id)
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            outcome.output = _restore_module_tensors(outcome.output, replica.tensors.sources)
        if grad and self.find_functions:
            self.functions = find_custom_functions(
                tensor for outcome in outcomes for tensor in _result_tensors(outcome)
            )
        if grad and self.engine.joint_graph:
            notes.update(_copy_back(copies))
            self._watch_joint_graph(notes, outcomes)
        elif grad:
            self._bridge_outputs(ways, outcomes)
        return outcomes

    def _carried_shards(self) -> list[list[Any]]:
        """Each replica's part of carried state, on its device."""
        columns = [slot.split(self.sizes) for slot in self.carried]
        return [
            [move_to_device(column[r], replica.device) for column in columns] for r, replica in enumerate(self.replicas)
        ]

    def _watch_joint_graph(self, notes: VersionTracker, outcomes: list[ReplicaResult]) -> None:
        """In a joint graph, look for writes of the caller just before a backward enters a replica."""
        for replica in self.replicas:
            for source, copy in replica.tensors.state:
                notes.track(source, copy)
            for source, held in replica.trainable:
                if held is not source and source.is_leaf:  # what an earlier call left behind must not be kept alive
                    notes.track(source, held)
        for outcome in outcomes:
            for tensor in _result_tensors(outcome):
                if tensor.requires_grad and not tensor.is_leaf:
                    self.retains = self.retains or tensor.retains_grad
                    tensor.register_hook(lambda _: notes.propagate())

    def _bridge_outputs(self, ways: Sequence[_EnteredShards], outcomes: list[ReplicaResult]) -> None:
        """Replace the replicas' tensors that need a gradient by their counterparts in the caller's graph."""
        home = set(map(id, map(_first, self.replicas[0].trainable)))
        found = [[t for t in _result_tensors(outcome) if t.requires_grad and id(t) not in home] for outcome in outcomes]
        written = [way.written_shards(outcome.written_arguments) for way, outcome in zip(ways, outcomes, strict=True)]
        if not any(found) and not any(written):
            return
        self.retains = any(tensor.retains_grad for outputs in found for tensor in outputs)
        for pairs, outputs in zip(written, found, strict=True):
            known = set(map(id, outputs))
            outputs += [made for _, made in pairs if id(made) not in known]
        self._drop_unused_shards(ways, outcomes, found)
        trainable = [replica.trainable for replica in self.replicas]
        sources, leaves = _connected_sources(trainable, found)
        remote = [outcome.remote_call is not None for outcome in outcomes]
        across = [flatten_outputs(outputs, remote=far) for outputs, far in zip(found, remote, strict=True)]
        sides = [
            ReplicaGraph(
                mine, way.leaves, crossing, replica.tensors.guard, replica.name, outcome.context, outcome.remote_call
            )
            for mine, way, crossing, replica, outcome in zip(leaves, ways, across, self.replicas, outcomes, strict=True)
        ]
        span = CallGraph(cast(BackwardEngine, self.engine), sides, sources, self.streams)
        for way in ways:
            span.versions.entries += way.writes.entries
        for replica, mine in zip(self.replicas, leaves, strict=True):
            for source, copy in replica.tensors.state:
                span.versions.track(source, copy)
            if replica.tensors.sharing is ParameterSharing.ALIAS and not replica.tensors.private_weights:
                continue  # an alias shares the counter itself
            for source, leaf in zip(sources, mine, strict=True):
                if (
                    replica.tensors.sharing is not ParameterSharing.ALIAS
                    or id(source) in replica.tensors.private_weights
                ):
                    span.versions.track(source, leaf)
        shards = [shard for way in ways for shard in way.outside]
        made = iter(bridge(span, *sources, *shards))
        bases = []
        for pairs, outcome, outputs, far in zip(written, outcomes, found, remote, strict=True):
            table = {id(t): rebuild_output(t, made, remote=far) for t in outputs}
            _replace_tensors(outcome, table)
            bases += [_write_back(shard, table[id(inner)]) for shard, inner in pairs]
        if bases:
            span.versions.update(bases)

    def _drop_unused_shards(
        self, ways: Sequence[_EnteredShards], outcomes: list[ReplicaResult], found: Sequence[Sequence[Tensor]]
    ) -> None:
        """Shards that belong to a graph of the caller's, which may be gone, take part only where they were used."""
        if not any(way.may_be_freed for way in ways):
            return
        tokens = [token for outcome in outcomes if outcome.context is not None for token in outcome.context.tokens]
        used = reachable_leaves([*(tensor for outputs in found for tensor in outputs), *tokens])
        for way, outcome in zip(ways, outcomes, strict=True):
            pairs = enumerate(zip(way.leaves, way.inner, strict=True))
            kept = [i for i, (leaf, inner) in pairs if id(leaf) in used or id(inner) in outcome.used_arguments]
            way.outside, way.leaves = [way.outside[i] for i in kept], [way.leaves[i] for i in kept]
            if outcome.remote_call is not None:
                outcome.remote_call.keep_inputs(kept)


def _restore_module_tensors(output: Any, sources: Mapping[int, Tensor]) -> Any:
    """An output in which the replica's counterparts of weights and buffers are the module's own: no part of a batch."""
    if any(id(tensor) in sources for tensor in tensors_in(output)):
        return map_tensors(lambda tensor: sources.get(id(tensor), tensor), output)
    return output


@dataclass
class _EnteredShards:
    """How one replica's shards enter its graph."""

    outside: list[Tensor] = field(default_factory=list)
    """Shards that need a gradient, in the caller's graph."""
    leaves: list[Tensor] = field(default_factory=list)
    """What stands for them inside."""
    inner: list[Tensor] = field(default_factory=list)
    """What the replica sees of them."""
    writes: VersionTracker = field(default_factory=VersionTracker)
    may_be_freed: bool = False
    """Whether some of the shards belong to a graph that an earlier backward may have freed."""
    _pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def written_shards(self, made: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Shards of the caller's graph that the replica, or one elsewhere, wrote to, each with what was made of it."""
        written = [pair for pair in self._pairs if pair[1]._version or id(pair[1]) in made]
        pairs = [(shard, made.get(id(inner), inner)) for shard, inner in written]
        return [pair for pair in pairs if pair[1].requires_grad]

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """The values as the replica sees them: memory shared, version counters and graph their own."""
        needing = [tensor for value in values for tensor in tensors_in(value) if tensor.requires_grad]
        table: dict[int, Tensor] = {}
        if needing:
            self._add_leaves(needing, table)
        return [map_tensors(lambda tensor: self._enter_tensor(tensor, table), value) for value in values]

    def _add_leaves(self, needing: Sequence[Tensor], table: dict[int, Tensor]) -> None:
        """Leaves for the shards that need a gradient, and what the replica sees of each."""
        self.outside = list({id(tensor): tensor for tensor in needing}.values())
        self.leaves = [tensor.detach().requires_grad_() for tensor in self.outside]
        dense = [leaf for leaf in self.leaves if is_plain_tensor(leaf)]
        self.may_be_freed = any(not _base_tensor(tensor).is_leaf for tensor in self.outside)
        if self.may_be_freed:  # each by itself: which of them are used is asked of the graph
            inner = iter([as_non_leaf(leaf)[0] for leaf in dense])
        else:
            inner = iter(as_non_leaf(*dense)) if dense else iter(())
        for outside, leaf in zip(self.outside, self.leaves, strict=True):
            table[id(outside)] = next(inner) if is_plain_tensor(leaf) else leaf
        self.inner = [table[id(outside)] for outside in self.outside]
        pairs = zip(self.outside, self.inner, strict=True)
        self._pairs = [pair for pair in pairs if pair[0]._base is not None and not pair[0]._base.is_leaf]
        for outside in self.outside:
            self.writes.track(_base_tensor(outside), table[id(outside)])

    def _enter_tensor(self, tensor: Tensor, table: dict[int, Tensor]) -> Tensor:
        made = table.get(id(tensor))
        if made is not None:
            return made
        if not is_plain_tensor(tensor) or tensor.is_inference():
            return tensor
        made = table[id(tensor)] = tensor.data
        self.writes.track(_base_tensor(tensor), made)
        return made


def _base_tensor(shard: Tensor) -> Tensor:
    """The tensor of the caller that a shard is a view of."""
    return shard._base if shard._base is not None else shard


def _copy_shards(values: Sequence[Any], notes: VersionTracker, copies: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """Shards of a joint graph, copied: what one replica writes in place is no business of the others.

    A batch that was given twice is one copy.
    """
    known: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        reading = memory_key(tensor)
        if reading in known:
            return known[reading]
        made = tensor.clone()
        if reading is not None:
            known[reading] = made
        copies.append((tensor, made))
        notes.track(_base_tensor(tensor), made)
        return made

    return [map_tensors(copy, value) for value in values]


def _copy_back(copies: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Write to the caller's tensors what replicas wrote to their own parts, as one device would have.

    Gives the tensors whose history has changed thereby.
    """
    held = Counter(id(tensor) for tensor, _ in copies)
    bases = []
    for tensor, made in copies:
        mine = held[id(tensor)] == 1 and not tensor.is_inference()
        if not mine or not is_plain_tensor(tensor) or not made._version or tensor.shape != made.shape:
            continue
        if not tensor.requires_grad:
            tensor.data.copy_(made.detach())
        elif tensor._base is not None and not tensor._base.is_leaf:
            bases.append(_write_back(tensor, made))
    return bases


def _write_back(shard: Tensor, made: Tensor) -> Tensor:
    """Let the tensor that a shard is a view of come, where the shard lies, from what a replica made of it."""
    base = _base_tensor(shard)
    if shard.shape == made.shape:
        base.as_strided(shard.shape, shard.stride(), shard.storage_offset()).copy_(made)
    return base


def _result_tensors(outcome: ReplicaResult) -> list[Tensor]:
    """Output tensors of a replica, and tensors that it set on itself; each once."""
    found = list(tensors_in(outcome.output))
    for value in _assigned_values(outcome.changes):
        found.extend(tensors_in(value))
    return list({id(tensor): tensor for tensor in found}.values())


def _assigned_values(changes: Changes) -> Iterator[Any]:
    """What a replica set on itself, or put into its containers."""
    yield from (change.new for change in changes.attributes)
    for inside in changes.containers:
        before = set(map(id, inside.before.items))
        yield from (item for item in inside.after.items if id(item) not in before)


def _replace_tensors(outcome: ReplicaResult, table: dict[int, Tensor]) -> None:
    def swap(tensor: Tensor) -> Tensor:
        return table.get(id(tensor), tensor)

    outcome.output = map_tensors(swap, outcome.output)
    if any(id(t) in table for value in _assigned_values(outcome.changes) for t in tensors_in(value)):
        attributes = [change._replace(new=map_tensors(swap, change.new)) for change in outcome.changes.attributes]
        contents = [_replace_in_container(swap, inside) for inside in outcome.changes.containers]
        outcome.changes = Changes(outcome.changes.is_structural, attributes, contents)


def _replace_in_container(swap: Callable[[Tensor], Tensor], inside: ContainerChange) -> ContainerChange:
    """A container's new contents in the caller's graph; what it held before stays what it was."""
    before = set(map(id, inside.before.items))
    items = tuple(item if id(item) in before else map_tensors(swap, item) for item in inside.after.items)
    return inside._replace(after=Contents(inside.after.keys, items))


def _connected_sources(
    pairs: Sequence[Sequence[tuple[Tensor, Tensor]]], outputs: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The sources that belong to the bridge, and each replica's leaves for them.

    A tensor that an earlier call left on the module belongs to that call's graph, which may be gone; it takes part only
    where this call has really used it.
    """
    sources = list(map(_first, pairs[0]))
    if all(map(_is_leaf, sources)):
        return sources, [list(map(_second, side)) for side in pairs]
    doubtful = [index for index, source in enumerate(sources) if not source.is_leaf]
    used = set().union(*(reachable_leaves(tensors) for tensors in outputs))
    unused = {index for index in doubtful if not any(id(side[index][1]) in used for side in pairs)}
    kept = [index for index in range(len(pairs[0])) if index not in unused]
    return [sources[index] for index in kept], [[side[index][1] for index in kept] for side in pairs]
