"""One forward on all replicas, connected to the caller's autograd graph.

With `engine='serial'` the replicas record into the caller's own graph (a joint graph). With other engines each replica
records a graph of its own: shards enter it as new leaves, and one autograd node (`instep.autograd.bridge`) connects the
outputs and leaves of all replicas to the caller's graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

from instep.autograd.bridge import CallGraph, ReplicaGraph, VersionTracker, as_non_leaf, bridge
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
from instep.replicas.write_watch import WriteDetector, memory_key
from instep.runtime.ambient import AmbientState
from instep.runtime.rng import ReplicaRng, rng_state_reads
from instep.runtime.torch_private import RegisteredHooks, register_own_hook
from instep.structure.shapes import is_plain_tensor
from instep.structure.tree import map_tensors, tensors_in

_first, _second = itemgetter(0), itemgetter(1)
_is_leaf = attrgetter("is_leaf")


@dataclass
class ReplicaDispatch:
    """One forward of the active replicas."""

    engine: Engine
    replicas: Sequence[Replica]
    method: str
    ambient: AmbientState
    sync_state: bool
    """Whether the engine copies buffers and other state from the module to the replicas first."""
    rng: ReplicaRng
    sizes: Sequence[int] = ()
    """Number of samples in each replica's shard."""
    carried: Sequence[CarriedValue] = ()
    """State of the previous call that is split like the batch."""
    shared_arguments: SharedArguments | None = None
    """Arguments that every replica receives whole; None if there are none that can be written to."""
    argument_ids: Collection[int] = ()
    """Ids of mutable objects, other than tensors, in the arguments."""
    select_output: Callable[[Any], Any] | None = None
    """Returns an output without what is not merged."""
    check_local_effects: Callable[[], bool] | None = None
    """Returns whether a forward in this process changed what the replicas share."""
    find_functions: bool = False
    """Whether to look for custom autograd functions in the graphs of the outputs."""

    hook_ids: Collection[int] = field(default=(), init=False)
    """Ids of the handles of hooks that were registered while the replicas ran with gradients, except by instep."""
    custom_functions: Sequence[str] = field(default=(), init=False)
    """Names of the custom autograd functions that were found."""
    retains_grad: bool = field(default=False, init=False)
    """Whether forward called `retain_grad()` on a tensor that it returns or keeps."""
    read_rng_state: bool = field(default=False, init=False)
    """Whether code of a joint graph on the CPU and an accelerator read the state of the CPU's default generator."""

    def __post_init__(self) -> None:
        self._records_graph = self.ambient.grad_enabled and not self.ambient.inference_mode
        self._inputs = [_GraphInputs() for _ in self.replicas]
        self._joint_inputs = _JointInputs()
        self._argument_writes: WriteDetector[str] = WriteDetector([], [])

    def written_argument(self) -> str | None:
        """The name of an argument that a replica wrote to in place."""
        return next(iter(self._argument_writes.written()), None)

    def restore_shared_arguments(self) -> None:
        """Undo the replicas' changes of arguments that every replica receives whole."""
        if self.shared_arguments is not None:
            self.shared_arguments.restore()

    def check_shared_arguments(self) -> None:
        """`StructureError` if a replica changed an argument that every replica receives whole."""
        if self.shared_arguments is not None:
            self.shared_arguments.check()

    def run(self, shards: Sequence[Sequence[Any]], positional: int, names: Sequence[str]) -> list[ReplicaResult]:
        """Run the replicas. Tensors in the results belong to the caller's graph."""
        values = self._enter_graph(self._append_carried(shards))
        arguments = [list(row[: len(names)]) for row in values]
        self._watch_arguments(arguments, names)
        self._assign_carried([row[len(names) :] for row in values])
        results = self._forward(arguments, positional, names)
        self.leave(results)
        return results

    def leave(self, results: Sequence[ReplicaResult]) -> None:
        """Connect the results of a forward to the module's tensors and to the caller's graph."""
        self._restore_module_tensors(results)
        if self._records_graph:
            self._find_custom_functions(results)
            self._leave_graph(results)

    def resume_after_forward(self, versions: Sequence[Sequence[tuple[Tensor, int, Tensor]]]) -> None:
        """Continue a forward that ran elsewhere. `versions` are entries of a `VersionTracker` for each replica."""
        for inputs, entries in zip(self._inputs, versions, strict=True):
            inputs.versions.entries += entries

    def _append_carried(self, shards: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Each replica's arguments followed by its shard of carried state, which enters the graph with them."""
        columns = [value.split(self.sizes) for value in self.carried]
        return [
            [*shard, *(move_to_device(column[index], replica.device) for column in columns)]
            for index, (shard, replica) in enumerate(zip(shards, self.replicas, strict=True))
        ]

    def _enter_graph(self, shards: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """The values that the replicas receive for these shards."""
        if not self._records_graph:
            return shards
        if self.engine.joint_graph:
            return [self._joint_inputs.enter(shard) for shard in shards]
        return [inputs.enter(shard) for inputs, shard in zip(self._inputs, shards, strict=True)]

    def _watch_arguments(self, arguments: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
        """Record the state of the arguments, to detect in-place writes by the replicas."""
        named = [(name, value) for values in arguments for name, value in zip(names, values, strict=True)]
        tensors = [(name, tensor) for name, value in named for tensor in tensors_in(value)]
        self._argument_writes = WriteDetector.from_pairs(tensors)
        if self.shared_arguments is not None:
            self.shared_arguments.enter(arguments)
            self.argument_ids = {*self.argument_ids, *self.shared_arguments.ids}

    def _assign_carried(self, shards: Sequence[Sequence[Any]]) -> None:
        if self.carried:
            attributes = [value.attribute for value in self.carried]
            for replica, shard in zip(self.replicas, shards, strict=True):
                replica.assign_shard(attributes, shard)

    def _forward(self, arguments: Sequence[list[Any]], positional: int, names: Sequence[str]) -> list[ReplicaResult]:
        """Run the engine, and note which hooks were registered meanwhile."""
        call = ReplicaCall(
            self.replicas,
            [(row[:positional], dict(zip(names[positional:], row[positional:], strict=True))) for row in arguments],
            self.method,
            self.ambient,
            self.sync_state,
            self.rng,
            self.sizes,
            [inputs.inputs for inputs in self._inputs],
            self.argument_ids,
            names,
            self.select_output,
            self._has_local_effects,
        )
        count_reads = self.engine.joint_graph and len({replica.device.type for replica in self.replicas}) > 1
        state_reads = rng_state_reads() if count_reads else 0
        with RegisteredHooks() as hooks:
            results = self.engine.forward(call)
        if self._records_graph and hooks.ids:
            self.hook_ids = hooks.ids
        self.read_rng_state = count_reads and rng_state_reads() != state_reads
        return results

    def _has_local_effects(self, result: ReplicaResult) -> bool:
        """Whether the forward of a replica had an effect that only its process can see."""
        if self.find_functions or self.shared_arguments is not None:
            return True
        if self.check_local_effects is None:
            return retains_grad(result)
        return has_local_effects(self.check_local_effects, result)

    def _restore_module_tensors(self, results: Sequence[ReplicaResult]) -> None:
        """Replace replicas' parameters and buffers in outputs by the module's own."""
        for replica, result in zip(self.replicas, results, strict=True):
            sources = replica.tensors.sources
            if any(id(tensor) in sources for tensor in tensors_in(result.output)):
                result.output = map_tensors(_replacement(sources), result.output)

    def _find_custom_functions(self, results: Sequence[ReplicaResult]) -> None:
        if self.find_functions:
            self.custom_functions = find_custom_functions(
                tensor for result in results for tensor in _result_tensors(result)
            )

    def _leave_graph(self, results: Sequence[ReplicaResult]) -> None:
        """Connect the results to the caller's graph."""
        if self.engine.joint_graph:
            self._joint_inputs.write_back()
            self._track_joint_graph(results)
        else:
            self._bridge_outputs(results)

    def _track_joint_graph(self, results: Sequence[ReplicaResult]) -> None:
        """Detect the caller's in-place writes just before backward enters a replica's part of the joint graph."""
        versions = self._joint_inputs.versions
        for replica in self.replicas:
            for source, copy in replica.tensors.state:
                versions.track(source, copy)
            for source, copy in replica.trainable:
                if copy is not source and source.is_leaf:  # a non-leaf would keep the graph of an earlier call alive
                    versions.track(source, copy)
        for result in results:
            for tensor in _result_tensors(result):
                if tensor.requires_grad and not tensor.is_leaf:
                    self.retains_grad = self.retains_grad or tensor.retains_grad
                    register_own_hook(tensor, lambda _: versions.propagate())

    def _bridge_outputs(self, results: Sequence[ReplicaResult]) -> None:
        """Replace tensors of the replicas' graphs in the results by their counterparts in the caller's graph."""
        outputs = self._outputs_with_grad(results)
        written = [
            inputs.written_shards(result.remote.written_arguments)
            for inputs, result in zip(self._inputs, results, strict=True)
        ]
        if not any(outputs) and not any(written):
            return
        self.retains_grad = any(tensor.retains_grad for tensors in outputs for tensor in tensors)
        for tensors, pairs in zip(outputs, written, strict=True):
            ids = set(map(id, tensors))
            tensors += [value for _, value in pairs if id(value) not in ids]
        self._drop_unused_shards(results, outputs)
        graph = self._call_graph(results, outputs)
        bridged = iter(bridge(graph, *graph.sources, *(shard for inputs in self._inputs for shard in inputs.shards)))
        written_bases = []
        for result, tensors, pairs in zip(results, outputs, written, strict=True):
            remote = result.remote.graph is not None
            table = {id(tensor): rebuild_output(tensor, bridged, remote=remote) for tensor in tensors}
            _replace_tensors(result, table)
            written_bases += [_write_to_base(shard, table[id(value)]) for shard, value in pairs]
        if written_bases:
            graph.versions.update(written_bases)

    def _outputs_with_grad(self, results: Sequence[ReplicaResult]) -> list[list[Tensor]]:
        """Each replica's result tensors that need a gradient, without the module's own."""
        sources = set(map(id, map(_first, self.replicas[0].trainable)))
        return [
            [tensor for tensor in _result_tensors(result) if tensor.requires_grad and id(tensor) not in sources]
            for result in results
        ]

    def _drop_unused_shards(self, results: Sequence[ReplicaResult], outputs: Sequence[Sequence[Tensor]]) -> None:
        """Disconnect shards that no output depends on, if backward may already have freed the graph of a shard."""
        if not any(inputs.may_be_freed for inputs in self._inputs):
            return
        tokens = [token for result in results if result.context is not None for token in result.context.tokens]
        used = reachable_leaves([*(tensor for tensors in outputs for tensor in tensors), *tokens])
        for inputs, result in zip(self._inputs, results, strict=True):
            kept = inputs.keep_used(used, result.remote.used_arguments)
            if result.remote.graph is not None:
                result.remote.graph.keep_inputs(kept)

    def _call_graph(self, results: Sequence[ReplicaResult], outputs: Sequence[Sequence[Tensor]]) -> CallGraph:
        """What the bridge needs for backward: the replicas' graphs, and the tensors whose versions it checks."""
        sources, leaves = _connected_sources([replica.trainable for replica in self.replicas], outputs)
        graphs = [
            ReplicaGraph(
                replica_leaves,
                inputs.leaves,
                flatten_outputs(tensors, remote=result.remote.graph is not None),
                replica.tensors.guard,
                replica.name,
                result.context,
                result.remote.graph,
            )
            for replica_leaves, inputs, tensors, replica, result in zip(
                leaves, self._inputs, outputs, self.replicas, results, strict=True
            )
        ]
        graph = CallGraph(self.engine, graphs, sources, self.rng)
        for inputs in self._inputs:
            graph.versions.entries += inputs.versions.entries
        for replica, replica_leaves in zip(self.replicas, leaves, strict=True):
            _track_module_tensors(graph.versions, replica, sources, replica_leaves)
        return graph


@dataclass
class _GraphInputs:
    """The tensors among one replica's arguments, as inputs of the replica's own graph."""

    shards: list[Tensor] = field(default_factory=list)
    """Shards that need a gradient, in the caller's graph."""
    leaves: list[Tensor] = field(default_factory=list)
    """A leaf of the replica's graph for each shard."""
    inputs: list[Tensor] = field(default_factory=list)
    """What forward receives for each shard: a non-leaf, so that forward may write to it in place."""
    versions: VersionTracker = field(default_factory=VersionTracker)
    may_be_freed: bool = False
    """Whether a shard belongs to a graph that an earlier backward may have freed."""
    _non_leaf_views: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Shards that are views of non-leaf tensors, each with its input. Writes to them have a history."""

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """The values with inputs in place of tensors. They share memory but have their own version counters."""
        needing = [tensor for value in values for tensor in tensors_in(value) if tensor.requires_grad]
        table: dict[int, Tensor] = {}
        if needing:
            self._add_leaves(needing, table)
        return [map_tensors(lambda tensor: self._enter_tensor(tensor, table), value) for value in values]

    def written_shards(self, remote_values: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Shards of the caller's graph that forward wrote to, each with its new value.

        `remote_values` are the new values from a replica in another process, by the id of the input.
        """
        written = [pair for pair in self._non_leaf_views if pair[1]._version or id(pair[1]) in remote_values]
        pairs = [(shard, remote_values.get(id(value), value)) for shard, value in written]
        return [pair for pair in pairs if pair[1].requires_grad]

    def keep_used(self, used_leaves: Collection[int], used_inputs: Collection[int]) -> list[int]:
        """Drop shards whose leaf and input are not among these ids. Returns the indices of the others."""
        pairs = enumerate(zip(self.leaves, self.inputs, strict=True))
        kept = [i for i, (leaf, value) in pairs if id(leaf) in used_leaves or id(value) in used_inputs]
        self.shards, self.leaves = [self.shards[i] for i in kept], [self.leaves[i] for i in kept]
        return kept

    def _add_leaves(self, needing: Sequence[Tensor], table: dict[int, Tensor]) -> None:
        """Create leaves and inputs for shards that need a gradient; `table` maps shard ids to inputs."""
        self.shards = list({id(tensor): tensor for tensor in needing}.values())
        self.leaves = [shard.detach().requires_grad_() for shard in self.shards]
        plain = [leaf for leaf in self.leaves if is_plain_tensor(leaf)]
        self.may_be_freed = any(not _base_tensor(shard).is_leaf for shard in self.shards)
        if self.may_be_freed:  # one node for each, so that the graph shows which of them are used
            non_leaves = iter([as_non_leaf(leaf)[0] for leaf in plain])
        else:
            non_leaves = iter(as_non_leaf(*plain)) if plain else iter(())
        self.inputs = [next(non_leaves) if is_plain_tensor(leaf) else leaf for leaf in self.leaves]
        for shard, value in zip(self.shards, self.inputs, strict=True):
            table[id(shard)] = value
            self.versions.track(_base_tensor(shard), value)
            if shard._base is not None and not shard._base.is_leaf:
                self._non_leaf_views.append((shard, value))

    def _enter_tensor(self, tensor: Tensor, table: dict[int, Tensor]) -> Tensor:
        value = table.get(id(tensor))
        if value is not None:
            return value
        if not is_plain_tensor(tensor) or tensor.is_inference():
            return tensor
        value = table[id(tensor)] = tensor.data
        self.versions.track(_base_tensor(tensor), value)
        return value


@dataclass
class _JointInputs:
    """Copies of all replicas' shards in the caller's graph, so that a replica's in-place writes stay in its shard."""

    versions: VersionTracker = field(default_factory=VersionTracker)
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Shards, each with its copy."""

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """One replica's values with copies in place of tensors. Tensors of the same memory get one copy."""
        copies: dict[Any, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            key = memory_key(tensor)
            if key in copies:
                return copies[key]
            clone = tensor.clone()
            if key is not None:
                copies[key] = clone
            self._copies.append((tensor, clone))
            self.versions.track(_base_tensor(tensor), clone)
            return clone

        return [map_tensors(copy, value) for value in values]

    def write_back(self) -> None:
        """Apply the replicas' in-place writes to the caller's tensors, as one device would have."""
        occurrences = Counter(id(tensor) for tensor, _ in self._copies)
        bases = []
        for tensor, copy in self._copies:
            is_shared = occurrences[id(tensor)] > 1
            if is_shared or tensor.is_inference() or not is_plain_tensor(tensor):
                continue
            if not copy._version or tensor.shape != copy.shape:
                continue
            if not tensor.requires_grad:
                tensor.data.copy_(copy.detach())
            elif tensor._base is not None and not tensor._base.is_leaf:
                bases.append(_write_to_base(tensor, copy))
        self.versions.update(bases)


def _base_tensor(shard: Tensor) -> Tensor:
    """The caller's tensor that a shard is a view of."""
    return shard._base if shard._base is not None else shard


def _write_to_base(shard: Tensor, value: Tensor) -> Tensor:
    """Write a shard's new value to the tensor that it is a view of, with its history. Returns that tensor."""
    base = _base_tensor(shard)
    if shard.shape == value.shape:
        base.as_strided(shard.shape, shard.stride(), shard.storage_offset()).copy_(value)
    return base


def _track_module_tensors(
    versions: VersionTracker, replica: Replica, sources: Sequence[Tensor], leaves: Sequence[Tensor]
) -> None:
    """Track the module's tensors whose counterparts on a replica have version counters of their own."""
    for source, copy in replica.tensors.state:
        versions.track(source, copy)
    is_alias, private = replica.tensors.sharing is ParameterSharing.ALIAS, replica.tensors.private_weights
    if is_alias and not private:
        return
    for source, leaf in zip(sources, leaves, strict=True):
        if not is_alias or id(source) in private:
            versions.track(source, leaf)


def _connected_sources(
    trainable: Sequence[Sequence[tuple[Tensor, Tensor]]], outputs: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The module's tensors that are inputs of the bridge, and each replica's leaves for them.

    A non-leaf that an earlier call left on the module belongs to a graph that may be freed. It is an input only if an
    output of this call depends on it.
    """
    sources = list(map(_first, trainable[0]))
    if all(map(_is_leaf, sources)):
        return sources, [list(map(_second, pairs)) for pairs in trainable]
    used = set().union(*(reachable_leaves(tensors) for tensors in outputs))
    kept = [
        index
        for index, source in enumerate(sources)
        if source.is_leaf or any(id(pairs[index][1]) in used for pairs in trainable)
    ]
    return [sources[index] for index in kept], [[pairs[index][1] for index in kept] for pairs in trainable]


def has_local_effects(check_local_effects: Callable[[], bool], result: ReplicaResult) -> bool:
    """Whether the forward of a replica changed what the replicas share, or called `retain_grad()`."""
    return check_local_effects() or retains_grad(result)


def retains_grad(result: ReplicaResult) -> bool:
    """Whether forward called `retain_grad()` on a tensor that it returns or keeps."""
    return any(tensor.retains_grad for tensor in _result_tensors(result) if tensor.grad_fn is not None)


def _result_tensors(result: ReplicaResult) -> list[Tensor]:
    """The distinct tensors that a replica returned or assigned to attributes and containers of its module."""
    found = list(tensors_in(result.output))
    for value in _assigned_values(result.changes):
        found.extend(tensors_in(value))
    return list({id(tensor): tensor for tensor in found}.values())


def _assigned_values(changes: Changes) -> Iterator[Any]:
    """New values of attributes, and new items of containers."""
    yield from (change.new for change in changes.attributes)
    for change in changes.containers:
        before = set(map(id, change.before.items))
        yield from (item for item in change.after.items if id(item) not in before)


def _replacement(table: Mapping[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: table.get(id(tensor), tensor)


def _replace_tensors(result: ReplicaResult, table: Mapping[int, Tensor]) -> None:
    """Replace tensors of a result by id."""
    replace = _replacement(table)
    result.output = map_tensors(replace, result.output)
    if any(id(tensor) in table for value in _assigned_values(result.changes) for tensor in tensors_in(value)):
        attributes = [change._replace(new=map_tensors(replace, change.new)) for change in result.changes.attributes]
        containers = [_replace_in_container(replace, change) for change in result.changes.containers]
        result.changes = Changes(result.changes.is_structural, attributes, containers)


def _replace_in_container(replace: Callable[[Tensor], Tensor], change: ContainerChange) -> ContainerChange:
    """Replace tensors in the new items of a container; items that it had before stay."""
    before = set(map(id, change.before.items))
    items = tuple(item if id(item) in before else map_tensors(replace, item) for item in change.after.items)
    return change._replace(after=Contents(change.after.keys, items))
