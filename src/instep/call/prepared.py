"""Prepared calls: the parts of a call that do not change from call to call, made once.

A call is prepared when an earlier call with the same plan, on the same replicas, has run on all devices without
anything unusual. `ReplicaDispatch` is the specification. A `PreparedDispatch` gives the same results with fewer steps:
it knows that the arguments are plain tensors and values, and which tensors of the module take part. What its forward
shows to be unusual is handed to a `ReplicaDispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from instep.autograd.bridge import BackwardEngine, CallGraph, ReplicaGraph, VersionTracker, bridge
from instep.call.dispatch import ReplicaDispatch, has_local_effects
from instep.call.options import MethodBinding
from instep.call.shared_arguments import has_shared_arguments
from instep.engines.base import Arguments, Engine, PreparedRun, ReplicaCall
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.tensors import ParameterSharing
from instep.runtime.ambient import AmbientGuard, AmbientState, is_current_device
from instep.runtime.rng import ReplicaRng
from instep.runtime.torch_private import RegisteredHooks
from instep.structure.plan import SplitPlan
from instep.structure.tree import flatten_one_level

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_get_device = attrgetter("device")
_MAX_PREPARED = 64
"""Prepared calls of one wrapper. Each batch size has its own plan."""
_MAX_OTHER_STATES = 8
"""Calls in another ambient state after which a new prepared run replaces that of the old state."""
_MAX_LOST_RUNS = 3
"""Calls that did not fit their prepared run, after which a wrapper has none: the general path runs them again."""


class PreparedCall:
    """What calls with one plan, on the same replicas, have in common."""

    def __init__(self, plan: SplitPlan, replicas: Sequence[Replica], generation: int) -> None:
        self.plan = plan
        self.generation = generation
        """The generation of the replica set. Another one has other tensors or modules."""
        self.replicas = list(replicas)
        self._on_cpu = replicas[0].device.type == "cpu"
        self.sources = [source for source, _ in replicas[0].trainable]
        """The module's trainable tensors, the inputs of the bridge."""
        self.leaves = [[leaf for _, leaf in replica.trainable] for replica in replicas]
        """Each replica's leaves for them."""
        self.state = [pair for replica in replicas for pair in replica.tensors.state]
        """The module's other tensors, each with a replica's copy."""
        self.run: PreparedRun | None = None
        """Runs such calls in fewer steps, if the engine can."""
        self.ambient_guard: AmbientGuard
        """Tells whether this thread is in the ambient state of the call that `run` was made for."""
        self.ambient: AmbientState | None = None
        """The ambient state of that call."""
        self.other_states = 0
        """How many calls in a row have had another ambient state."""
        self._own_ids = frozenset(
            {*map(id, self.sources), *(key for replica in replicas for key in replica.tensors.sources)}
        )

    @property
    def run_and_ambient(self) -> tuple[PreparedRun, AmbientState]:
        """The prepared run and its ambient state, if there is one."""
        assert self.run is not None
        assert self.ambient is not None
        return self.run, self.ambient

    def is_current(self, replicas: Sequence[Replica], generation: int) -> bool:
        """Whether the replicas are those that the call was prepared for."""
        same_count = len(replicas) == len(self.replicas)
        return generation == self.generation and same_count and all(map(is_, replicas, self.replicas))

    def collect_outputs(self, output: Any, tensors: list[Tensor]) -> bool:
        """Append the tensors of an output. Returns False if it holds anything else than plain tensors and values.

        They may be in any container that the general path takes apart too.
        """
        cls = type(output)
        if cls is Tensor:
            if not _is_dense(output, self._on_cpu) or id(output) in self._own_ids:
                return False
            tensors.append(output)
            return True
        if cls is dict:
            return all(self.collect_outputs(item, tensors) for item in output.values())
        if cls is list or cls is tuple:
            return all(self.collect_outputs(item, tensors) for item in output)
        if cls in _SCALARS:
            return True
        node = flatten_one_level(output)
        return node is not None and all(self.collect_outputs(item, tensors) for item in node.children)


class PreparedCalls:
    """The prepared calls of one wrapper."""

    enabled = True
    """Whether calls are prepared. Tests compare both ways."""

    def __init__(self, engine: Engine, devices: Sequence[torch.device], *, places_arguments: bool) -> None:
        """`places_arguments` is whether the user has chosen devices of arguments."""
        is_known = {device.type for device in devices} in ({"cpu"}, {"cuda"})
        self._engine, self._on_cpu = engine, devices[0].type == "cpu"
        self._supported = is_known and not engine.joint_graph and not engine.serialized and not places_arguments
        self._calls: dict[tuple[int, bool], PreparedCall] = {}
        self._last_generation = -1
        """The generation of the replica set in the last call that was recorded."""
        self._lost_runs = 0
        """How many prepared runs have turned out not to fit a call."""

    def find(
        self,
        plan: SplitPlan,
        values: Sequence[Any],
        replicas: Sequence[Replica],
        generation: int,
        ambient: AmbientState,
    ) -> PreparedCall | None:
        """The prepared call for these arguments, if there is one and nothing it relies on has changed."""
        prepared = self._calls.get((id(plan), ambient.grad_enabled))
        if prepared is None or not self.enabled:
            return None
        if not prepared.is_current(replicas, generation):
            self._calls.clear()  # they would keep the old replicas alive
            return None
        return prepared if ambient.is_ordinary and all(map(is_plain, values, repeat(self._on_cpu))) else None

    def find_run(self, plan: SplitPlan, values: Sequence[Any]) -> PreparedCall | None:
        """The prepared call with a prepared run for these arguments, in the ambient state of this thread.

        Whether the replicas are still those that it was prepared for is not checked.
        """
        prepared = self._calls.get((id(plan), torch.is_grad_enabled()))
        if prepared is None or prepared.run is None or not self.enabled:
            return None
        if not prepared.run.is_valid:
            prepared.run = None
            return None
        if not all(map(is_plain, values, repeat(self._on_cpu))):
            return None
        is_same_state = prepared.ambient_guard.is_current()
        prepared.other_states = 0 if is_same_state else prepared.other_states + 1
        return prepared if is_same_state else None

    def dispatch(
        self,
        prepared: PreparedCall,
        binding: MethodBinding,
        replicas: ReplicaSet,
        ambient: AmbientState,
        rng: ReplicaRng,
        run: PreparedRun | None,
    ) -> PreparedDispatch:
        """One forward of a prepared call, by its prepared run if there is one."""
        return PreparedDispatch(
            prepared,
            self._engine,
            binding.replica_method,
            ambient,
            replicas.needs_state_sync,
            rng,
            select_output=binding.merger.without_dropped,
            check_local_effects=replicas.check_local_effects,
            prepare_run=self.prepare_run,
            prepared_run=run,
        )

    def clear(self) -> None:
        """Forget all prepared calls."""
        self._calls.clear()

    def count_lost_run(self) -> None:
        """Count a call that has to run again because it did not fit its prepared run."""
        self._lost_runs += 1

    def prepare_run(self, prepared: PreparedCall, call: ReplicaCall, results: Sequence[ReplicaResult]) -> None:
        """Let the engine prepare for further calls like this one."""
        if prepared.run is not None and prepared.other_states < _MAX_OTHER_STATES:
            return
        if self._lost_runs >= _MAX_LOST_RUNS or call.ambient.compiler is not None:
            return
        device = call.replicas[0].device
        if not is_current_device(device):  # no guard would say that the state is the same
            return
        run, prepared.other_states = self._engine.prepare(call, results), 0
        if run is not None:  # without the context variables of this call
            prepared.ambient_guard, prepared.ambient = (
                AmbientGuard(device),
                replace(call.ambient, context_vars=Context()),
            )
        prepared.run = run  # last: an interruption may come before

    def record(
        self,
        plan: SplitPlan,
        values: Sequence[Any],
        replicas: Sequence[Replica],
        generation: int,
        ambient: AmbientState,
    ) -> None:
        """Prepare calls like this one, which ran without anything unusual, unless the module was changed before it."""
        if not self._supported or not self.enabled:
            return
        changed, self._last_generation = generation != self._last_generation, generation
        if changed:  # a module that is changed before every call is not prepared
            self._calls.clear()
            return
        if (
            ambient.is_ordinary
            and all(map(is_plain, values, repeat(self._on_cpu)))
            and not has_shared_arguments(plan, values)
            and all(map(_has_shared_leaves, replicas))
        ):
            if len(self._calls) >= _MAX_PREPARED:
                self._calls.clear()
            self._calls[id(plan), ambient.grad_enabled] = PreparedCall(plan, replicas, generation)


def _has_shared_leaves(replica: Replica) -> bool:
    """Whether every trainable tensor of a replica is a leaf in the memory of the module's leaf."""
    tensors = replica.tensors
    is_alias = tensors.sharing is ParameterSharing.ALIAS and not tensors.private_weights
    return is_alias and all(source.is_leaf for source, _ in tensors.trainable)


def is_plain(value: Any, on_cpu: bool) -> bool:
    """Whether an argument is a dense tensor without a gradient, a scalar, or a list, tuple or dictionary of them.

    For replicas `on_cpu`, only tensors on the CPU are plain.
    """
    cls = type(value)
    if cls is Tensor:
        return not value.requires_grad and _is_dense(value, on_cpu) and not value.is_inference()
    if cls in _SCALARS:
        return True
    if cls is list or cls is tuple:
        return _SCALARS.issuperset(map(type, value)) or all(map(is_plain, value, repeat(on_cpu)))
    return cls is dict and all(map(is_plain, value.values(), repeat(on_cpu)))


def _is_dense(tensor: Tensor, on_cpu: bool) -> bool:
    is_known = tensor.is_cpu or (tensor.is_cuda and not on_cpu)
    return is_known and tensor.layout is torch.strided and not tensor.is_nested


class PreparedDispatch:
    """One forward of a prepared call. Its interface is that of `ReplicaDispatch`."""

    carried = ()
    custom_functions = ()
    read_rng_state = False

    def __init__(
        self,
        prepared: PreparedCall,
        engine: Engine,
        method: str,
        ambient: AmbientState,
        sync_state: bool,
        rng: ReplicaRng,
        *,
        select_output: Callable[[Any], Any],
        check_local_effects: Callable[[], bool],
        prepare_run: Callable[[PreparedCall, ReplicaCall, Sequence[ReplicaResult]], None],
        prepared_run: PreparedRun | None,
    ) -> None:
        """With a prepared run, that runs the replicas. It raises `LostExchange` if the call has to run without it."""
        self._prepared, self._engine, self._method = prepared, engine, method
        self._select_output, self._prepare_run = select_output, prepare_run
        self._check_local_effects = check_local_effects
        self.replicas = prepared.replicas
        self._prepared_run = prepared_run
        self._ambient, self._sync_state, self.rng = ambient, sync_state, rng
        self._versions: list[list[tuple[Tensor, int, Tensor]]] = []
        """For each replica, the entries of a `VersionTracker` for its arguments."""
        self._watched: list[tuple[str, Tensor, int]] = []
        """The tensors among the arguments, with the names of the arguments and their versions before the call."""
        self._general: ReplicaDispatch | None = None
        self._hook_ids: set[int] = set()
        self._retains_grad = False
        self.output_devices: set[torch.device] | None = None
        """The devices of the outputs' tensors; None if the outputs hold anything else than plain tensors and values."""

    @property
    def hook_ids(self) -> set[int]:
        return self._hook_ids

    @property
    def retains_grad(self) -> bool:
        return self._retains_grad if self._general is None else self._general.retains_grad

    def written_argument(self) -> str | None:
        """The name of an argument that a replica wrote to in place."""
        return next((name for name, tensor, version in self._watched if tensor._version != version), None)

    def restore_shared_arguments(self) -> None:
        """Nothing to do: replicas share no argument that can be written to."""

    def check_shared_arguments(self) -> None:
        """Nothing to do: replicas share no argument that can be written to."""

    def run(self, shards: Sequence[Sequence[Any]], positional: int, names: Sequence[str]) -> list[ReplicaResult]:
        """Run the replicas. Tensors in the results belong to the caller's graph."""
        prepared_run = self._prepared_run
        rows = self._enter_shards(shards, positional, names)
        with RegisteredHooks() as hooks:
            if prepared_run is not None:
                results = prepared_run.forward(rows, self.rng)
            else:
                call = self._replica_call(rows, names)
                results = self._engine.forward(call)
        if self._ambient.grad_enabled and hooks.ids:
            self._hook_ids = hooks.ids
        outputs = self._plain_tensors(results)
        if outputs is None:
            self._general = self._general_dispatch()
            self._general.leave(results)
            return results
        if prepared_run is None and not self._hook_ids:
            self._prepare_run(self._prepared, call, results)
        if self._ambient.grad_enabled:
            self._bridge_outputs(results, outputs, prepared_run or self._engine)
        return results

    def _replica_call(self, rows: Sequence[Arguments], names: Sequence[str]) -> ReplicaCall:
        return ReplicaCall(
            self._prepared.replicas,
            rows,
            self._method,
            self._ambient,
            self._sync_state,
            self.rng,
            self._prepared.plan.sizes,
            [()] * len(rows),
            (),
            names,
            self._select_output,
            partial(has_local_effects, self._check_local_effects),
            has_plain_arguments=True,
        )

    def _enter_shards(self, shards: Sequence[Sequence[Any]], positional: int, names: Sequence[str]) -> list[Arguments]:
        rows = [self._enter(shard, names, self._ambient.grad_enabled) for shard in shards]
        keywords = names[positional:]
        return [(row[:positional], dict(zip(keywords, row[positional:], strict=True))) for row in rows]

    def _enter(self, values: Sequence[Any], names: Sequence[str], records_graph: bool) -> list[Any]:
        """The values that one replica receives. Their tensors share memory and have version counters of their own."""
        self._versions.append([])
        return [self._enter_value(value, name, records_graph) for value, name in zip(values, names, strict=True)]

    def _enter_value(self, value: Any, name: str, records_graph: bool) -> Any:
        cls = type(value)
        if cls is Tensor:
            if not records_graph:
                self._watched.append((name, value, value._version))
                return value
            base = value._base
            outside = value if base is None else base
            inside = value.data
            self._versions[-1].append((outside, outside._version, inside))
            self._watched.append((name, inside, 0))
            return inside
        if cls is dict:
            return {key: self._enter_value(item, name, records_graph) for key, item in value.items()}
        if cls is list or cls is tuple:
            return cls([x if type(x) in _SCALARS else self._enter_value(x, name, records_graph) for x in value])
        return value

    def _plain_tensors(self, results: Sequence[ReplicaResult]) -> list[list[Tensor]] | None:
        """Each replica's output tensors that need a gradient; None if the results need a `ReplicaDispatch`."""
        found: list[list[Tensor]] = []
        devices: set[torch.device] = set()
        for result in results:
            tensors: list[Tensor] = []
            remote = result.remote
            is_ordinary = not (result.changes or remote.changed_containers or remote.written_arguments)
            if not is_ordinary or not self._prepared.collect_outputs(result.output, tensors):
                return None
            devices.update(map(_get_device, tensors))
            needing = [tensor for tensor in tensors if tensor.requires_grad]
            found.append(list({id(tensor): tensor for tensor in needing}.values()) if len(needing) > 1 else needing)
        self.output_devices = devices
        return found

    def _bridge_outputs(
        self, results: Sequence[ReplicaResult], outputs: list[list[Tensor]], engine: BackwardEngine
    ) -> None:
        """Replace tensors of the replicas' graphs in the results by their counterparts in the caller's graph.

        `engine` runs their backward.
        """
        if not any(outputs):
            return
        prepared = self._prepared
        self._retains_grad = any(tensor.retains_grad for tensors in outputs for tensor in tensors)
        graphs = [
            ReplicaGraph(
                leaves, [], list(tensors), replica.tensors.guard, replica.name, result.context, result.remote.graph
            )
            for leaves, tensors, replica, result in zip(
                prepared.leaves, outputs, prepared.replicas, results, strict=True
            )
        ]
        entries = [entry for row in self._versions for entry in row]
        entries += [(source, source._version, copy) for source, copy in prepared.state if not source.is_inference()]
        graph = CallGraph(engine, graphs, prepared.sources, self.rng, VersionTracker(entries))
        bridged = iter(bridge(graph, *prepared.sources))
        for result, tensors in zip(results, outputs, strict=True):
            table = {id(tensor): next(bridged) for tensor in tensors}
            if table:
                result.output = _replace(result.output, table)

    def _general_dispatch(self) -> ReplicaDispatch:
        """A dispatch in the state after its forward."""
        dispatch = ReplicaDispatch(
            self._engine,
            self._prepared.replicas,
            self._method,
            self._ambient,
            self._sync_state,
            self.rng,
            self._prepared.plan.sizes,
        )
        dispatch.resume_after_forward(self._versions)
        return dispatch


def _replace(value: Any, table: dict[int, Tensor]) -> Any:
    """A plain structure with tensors replaced by id."""
    cls = type(value)
    if cls is Tensor:
        return table.get(id(value), value)
    if cls is dict:
        return {key: _replace(item, table) for key, item in value.items()}
    if cls is list or cls is tuple:
        return cls([_replace(item, table) for item in value])
    node = None if cls in _SCALARS else flatten_one_level(value)
    return value if node is None else node.unflatten([_replace(item, table) for item in node.children])
