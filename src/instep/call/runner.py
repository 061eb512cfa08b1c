"""Runs one call on the replicas: bind, plan, split, place, forward, merge, update state."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from instep.call.dispatch import ReplicaDispatch
from instep.call.local_batches import join_batches
from instep.call.loss import NoTorchMean
from instep.call.one_device import (
    CARRIED_STATE,
    CPU_CHECKPOINT_RNG,
    CUSTOM_BACKWARD,
    TENSOR_HOOK,
    UNCHECKED_REASONS,
    OneDevice,
    Reason,
    carried_state_advice,
)
from instep.call.options import BoundCall, MethodBinding, Options
from instep.call.prepared import PreparedCall, PreparedCalls, PreparedDispatch
from instep.call.shared_arguments import SharedArguments, has_shared_arguments
from instep.call.transaction import Transaction
from instep.call.verdict import ACCEPTED, ForwardVerdict
from instep.collectives.sync_batchnorm import SyncBatchNormPatch
from instep.devices import has_accelerator_tensors, place, to_output_device
from instep.engines.base import Engine, PreparedRun
from instep.engines.thread_pool import is_replica_thread
from instep.errors import EngineError, LostExchange, MergeError, RankFailure, StateError, StructureError
from instep.probe.probe import Outcome, has_sequence_first_layers
from instep.probe.readings import merge_message, reading_line, split_message, try_readings
from instep.probe.trial_call import TrialCall
from instep.replicas.mutable_arguments import mutable_ids
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.carried import CarriedSelection, CarriedValue
from instep.replicas.state.merge import StateMerger, check_no_parameter_writes
from instep.runtime.ambient import AmbientState
from instep.runtime.locks import ForkSafeLock
from instep.runtime.modes import active_compiler, call_compiled
from instep.runtime.rng import CallerRng, ReplicaRng, SerializationPolicy, supports_thread_streams
from instep.runtime.torch_private import RegisteredHooks
from instep.structure.graph_arguments import EDGES, list_of_graphs_notes, mark_graphs, rows_of_graphs_notes
from instep.structure.merge_messages import rules_of_method
from instep.structure.plan import SplitPlan
from instep.structure.problems import SplitLine
from instep.structure.spec import strip_marks
from instep.structure.split import apply_plan

DIM_1_NOTE = (
    "If the samples are in dim 1, as in sequences [T, B], write (tried on samples of this batch: it gives the value of "
    "one device):"
)


@dataclass
class ParallelRunner:
    """Runs the calls of one wrapper."""

    module: nn.Module
    devices: Sequence[torch.device]
    output_device: torch.device
    engine: Engine
    replicas: ReplicaSet
    state_merger: StateMerger
    batchnorm_patch: SyncBatchNormPatch
    options: Options
    methods: dict[str, MethodBinding] = field(default_factory=dict)
    """Bindings of the methods that were called, with what the probe knows about each."""

    def __post_init__(self) -> None:
        self.one_device = OneDevice(self.module, self.replicas, self.options.hooks)
        self.serialization = SerializationPolicy()
        self.lock = ForkSafeLock(self.replicas.discard)
        devices = [*self.devices, self.output_device]
        self.prepared_calls = PreparedCalls(self.engine, devices, places_arguments=bool(self.options.place))
        self.keeps_cpu = self.devices[0].type == self.output_device.type == "cpu" and not self.options.place
        """Whether arguments and outputs of a call on one device stay where they are."""
        self._written_argument: str | None = None
        """Name of an argument that the last forward on the replicas wrote to."""

    def binding(self, method: str) -> MethodBinding:
        """How arguments of a method get names, plans and merge rules."""
        found = self.methods.get(method)
        if found is None:
            found = self.methods[method] = MethodBinding(self.module, method, self.options, len(self.devices))
        return found

    def _rebind_loss(self, call: BoundCall, *, sums_mean: bool) -> BoundCall:
        """The call with a new binding of `with_loss`, which later calls use too. The plan stays."""
        if not sums_mean:
            call.binding.reject_torch_mean()
        count = len(self.devices)
        binding = MethodBinding(self.module, call.method, self.options, count, sums_mean=sums_mean)
        binding.planner = call.binding.planner
        self.methods[call.method] = binding
        self.prepared_calls.clear()  # they run another method
        return replace(call, binding=binding)

    def bind(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], local_sizes: tuple[int, ...] = ()
    ) -> BoundCall:
        """A call with the names of its arguments and its split plan."""
        binding = self.binding(method)
        names, values = binding.bind(args, kwargs)
        if EDGES in names:
            values = mark_graphs(names, values, binding.planner.in_dims, binding.planner.dim)
        plan = self._plan(binding, names, values, local_sizes)
        return BoundCall(method, binding, plan, values, len(args), local_sizes)

    def _plan(
        self, binding: MethodBinding, names: Sequence[str], values: Sequence[Any], local_sizes: tuple[int, ...]
    ) -> SplitPlan:
        plan = binding.plan(names, values, self.options.cost)
        return replace(plan, sizes=local_sizes, split_fns=[]) if local_sizes else plan

    def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What one device would return. A call that fails leaves the module, gradients and RNG as they were."""
        sizes: tuple[int, ...] = ()
        if self.options.batches == "local" and len(self.devices) > 1 and not is_replica_thread():
            args, kwargs, sizes = join_batches(self.engine, self.binding(method), args, kwargs)
        reason = self.one_device.before()
        if reason not in UNCHECKED_REASONS:
            self.engine.begin_call(method, args, kwargs, "" if reason is None else reason.name)
        if reason is not None:
            self.one_device.record(reason, method)
            return self.run_on_one_device(method, args, kwargs)
        call = self.bind(method, args, kwargs, sizes)
        if self.one_device.for_plan(call.plan):
            return self.run_on_one_device(method, args, kwargs)
        with self.lock:
            self.engine.wait_idle()
            self._written_argument = None
            if (prepared := self.prepared_calls.find_run(call.plan, call.values)) is not None:
                was_run, output = self._run_prepared(call, prepared)
                if was_run:
                    return output
            with self._transaction(AmbientState.capture(self.devices)) as transaction:
                try:
                    return self._run(call, transaction)
                except (MergeError, StateError) as error:
                    self._complete_error(error, method, args, kwargs)
                    raise

    def _transaction(self, ambient: AmbientState) -> Transaction:
        """What a call in this ambient state restores if it fails or runs again."""
        rng = CallerRng(self.devices, out_of_process=self.engine.out_of_process)
        return Transaction(self.replicas, self.engine, ambient, rng, self.check_rerun_allowed)

    def _complete_error(
        self, error: MergeError | StateError, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Add what to write to the error of a failed call."""
        if error.problems:  # bound again: the probe may have chosen another reading of the arguments
            self._add_tried_lines(error, self.bind(method, args, kwargs))
        if isinstance(error, MergeError) and method != "forward":
            rules_of_method(error, method)

    def _add_tried_lines(self, error: MergeError | StateError, call: BoundCall) -> None:
        """Add the lines that solve the problems of a failed call to its error, if there is a probe to try them."""
        probe, planner = call.binding.probe, call.binding.planner
        if probe is not None:
            other = planner.plan_with(call.plan.names, call.values, dim=1)
            in_dim_1 = None if other is None else self._trial_call(replace(call, plan=other), ())
            probe.add_tried_lines(error, self._trial_call(call, ()), self.state_merger, in_dim_1)

    def _run(self, call: BoundCall, transaction: Transaction) -> Any:
        serialize = reading_chosen = repeated = probed = False
        if call.binding.infers_torch_mean:
            call = self._rebind_loss(call, sums_mean=True)
        compare_weights = call.binding.writes_arguments  # before such a call: it cannot run again
        while True:  # one pass, unless the probe chooses another reading, or replicas must not run concurrently
            plan = call.plan
            self._check_own_output(plan.parts)
            replicas = self.replicas.sync()[: plan.parts]
            if reason := self.one_device.for_module(call.method):
                return self._on_one_device(call, reason)
            selection = self._select_carried(call, replicas)
            if selection.one_device or selection.unchecked:
                return self._run_with_carried_state(call, selection)
            carried = selection.split
            if not probed:
                other = self._probe(call, replicas, carried, reading_chosen, compare_weights)
                if other is not None:
                    call, reading_chosen = other, True
                    continue
            probe = call.binding.probe
            self.batchnorm_patch.warn_once(probe is not None and probe.last_record.calls_batch_norm)
            rng = self._replica_rng(transaction.rng, replicas, serialize)
            shards: Sequence[Sequence[Any]] = apply_plan(plan, call.values)
            prepared = None if carried or rng.serialized else self._find_prepared(call, replicas, transaction.ambient)
            dispatch: ReplicaDispatch | PreparedDispatch
            if prepared is None or not self.keeps_cpu:
                shards = self._place(plan, shards, replicas)
            if prepared is None:
                shards = rng.replace_generators(shards)
                dispatch = self._dispatch(call, replicas, transaction.ambient, rng, carried)
            else:
                dispatch = self._prepared_dispatch(prepared, call, transaction.ambient, rng)
            results, verdict = self._agreed_forward(call, dispatch, shards)
            if verdict == ACCEPTED:
                break
            if verdict.changed_containers:
                self.replicas.privatize(verdict.changed_containers)
            if verdict.one_device:
                self.one_device.record(verdict.one_device, call.method)  # before the rollback, which may fail
            transaction.rollback()
            if verdict.one_device:
                return self._on_one_device(call, verdict.one_device)
            serialize, probed, repeated = verdict.serialize or serialize, verdict.serialize, True
            compare_weights = verdict.compare_weights or compare_weights
            if verdict.infer_loss:
                call, reading_chosen = self._rebind_loss(call, sums_mean=False), False
        merged = self._finish(call, dispatch, shards, results, rng, carried)
        if prepared is None and not (
            repeated or carried or rng.serialized or any(result.changes for result in results)
        ):
            self.prepared_calls.record(plan, call.values, replicas, self.replicas.generation, transaction.ambient)
        return merged

    def _run_prepared(self, call: BoundCall, prepared: PreparedCall) -> tuple[bool, Any]:
        """Run a call by its prepared run, if nothing that it relies on has changed. Returns whether it was run."""
        (run, ambient), plan, probe = prepared.run_and_ambient, call.plan, call.binding.probe
        replicas = self.replicas.sync()[: plan.parts]
        if not prepared.is_current(replicas, self.replicas.generation) or not run.can_run():
            return False, None
        needs_more = call.binding.writes_arguments or call.binding.infers_torch_mean or self.serialization.serialize
        if needs_more or self.one_device.for_module(call.method) or self.state_merger.carried.is_used:
            return False, None
        if probe is not None and not probe.prepare_known(plan, call.values, self.replicas.fingerprint.current):
            return False, None
        with self._transaction(ambient) as transaction:
            rng = self._replica_rng(transaction.rng, replicas, serialize=False)
            shards: Sequence[Sequence[Any]] = apply_plan(plan, call.values)
            if not self.keeps_cpu:
                shards = self._place(plan, shards, replicas)
            dispatch = self._prepared_dispatch(prepared, call, ambient, rng, run)
            results, verdict = self._agreed_forward(call, dispatch, shards)
            if verdict != ACCEPTED:
                run.is_valid = False
                self.prepared_calls.count_lost_run()
                transaction.rollback()
                return False, None
            try:
                return True, self._finish(call, dispatch, shards, results, rng)
            except (MergeError, StateError) as error:
                self._complete_error(error, call.method, call.args, call.kwargs)
                raise

    def _finish(
        self,
        call: BoundCall,
        dispatch: ReplicaDispatch | PreparedDispatch,
        shards: Sequence[Sequence[Any]],
        results: Sequence[ReplicaResult],
        rng: ReplicaRng,
        carried: Sequence[CarriedValue] = (),
    ) -> Any:
        """Merge the outputs of a forward and update the module. Returns the output."""
        outputs = [result.output for result in results]
        devices = dispatch.output_devices if isinstance(dispatch, PreparedDispatch) else None
        if devices is None or not devices <= {self.output_device}:
            outputs = [to_output_device(output, self.output_device) for output in outputs]
        inputs = [dict(zip(call.plan.names, shard, strict=True)) for shard in shards]
        rng.advance()
        merged = call.binding.finish(self._merge(call, outputs, inputs, carried))
        self._update_state(dispatch.replicas, results, inputs, call.plan)
        self.replicas.finish_call()
        return merged

    def known_reason(self, call: BoundCall) -> Reason | None:
        """The reason why this call would run on one device, if it is known before the call; for `explain`."""
        if reason := self.one_device.explain(call.method, call.plan):
            return reason
        carried = self.state_merger.carried
        if not carried.values:
            return None
        containers = self.replicas.shared_containers.paths
        modules = self.replicas.modules or list(self.module.modules())
        needed = carried.needs_one_device(modules, call.plan.sizes, containers, self._call_key(call))
        return CARRIED_STATE if needed else None

    def describe_trial(self, call: BoundCall) -> str:
        """How the probe tried such calls; empty without a probe."""
        if call.binding.probe is None:
            return ""
        record = call.binding.probe.find_record(call.plan, call.values, self.replicas.fingerprint.current)
        return "not tried yet" if record is None else record.summary

    def describe_readings(self, call: BoundCall) -> list[str]:
        """The options that select each reading of an undecided call, in the order of its trials.

        Raises the error of the call if none fits the sizes.
        """
        if call.plan.undecided is None:
            return []
        groups = call.binding.planner.other_plans(call.plan.names, call.values)
        if not groups:
            raise call.plan.undecided
        return [reading_line(plan) for group in groups for plan in group]

    def _call_key(self, call: BoundCall) -> tuple[int, str]:
        return self.replicas.fingerprint.current, call.method

    def _select_carried(self, call: BoundCall, replicas: Sequence[Replica]) -> CarriedSelection:
        """State of the previous call that forward may read: what can be split like the batch, and what cannot."""
        return self.state_merger.carried.select(
            self.module,
            replicas[0].source_modules,
            call.plan.sizes,
            self.replicas.shared_containers.paths,
            self._call_key(call),
        )

    def _run_with_carried_state(self, call: BoundCall, selection: CarriedSelection) -> Any:
        """Run a call on one device that reads, or may read, state of the previous call that cannot be split."""
        run = partial(self._on_one_device, call, CARRIED_STATE.without_warning())
        if selection.one_device:
            return run()
        output, read = self.state_merger.carried.run_and_detect_reads(selection.unchecked, self._call_key(call), run)
        if read:
            trial = self._trial_call(call, read)
            advice = carried_state_advice(call.binding.probe, trial, read)
            self.one_device.record(CARRIED_STATE.format(path=read[0].path, advice=advice), call.method)
        return output

    def _probe(
        self,
        call: BoundCall,
        replicas: Sequence[Replica],
        carried: Sequence[CarriedValue],
        reading_chosen: bool,
        compare_weights: bool,
    ) -> BoundCall | None:
        """Before the first call of a structure, find out on a few samples how outputs and attributes merge.

        Returns the call with another plan if trials have chosen another reading of its arguments. `reading_chosen` is
        whether the plan of this call was chosen so.
        """
        probe, merger = call.binding.probe, self.state_merger
        if probe is None:
            return None
        if call.plan.undecided is not None:
            return self._choose_reading(call, replicas, call.plan.undecided)
        trial_call, fingerprint = self._trial_call(call, carried), self.replicas.fingerprint.current
        try:
            probe.prepare(trial_call, fingerprint, compare_weights=compare_weights)
        except MergeError as error:
            if (other := self._with_other_loss(call, carried)) is not None:
                return other
            if reading_chosen:
                raise
            return self._choose_reading(call, replicas, error)
        record = probe.last_record
        if not reading_chosen and record.status == "failed" and not record.readings_tried:
            record.readings_tried = True
            if (other := self._choose_reading(call, replicas)) is not None:
                return other
        merger.verdicts, merger.unmergeable = record.attributes, record.unmergeable
        merger.sample_dependent, merger.constant = record.sample_dependent, record.constant
        return None

    def _with_other_loss(self, call: BoundCall, carried: Sequence[CarriedValue]) -> BoundCall | None:
        """After a failed trial: the call with its loss as a sum over a divisor, or as an inferred value instead."""
        if call.binding.sums_mean:
            return self._rebind_loss(call, sums_mean=False)
        if not call.binding.returns_torch_mean:
            return None
        other = self._rebind_loss(call, sums_mean=True)
        assert other.binding.probe is not None
        try:
            other.binding.probe.prepare(self._trial_call(other, carried), self.replicas.fingerprint.current)
        except MergeError:
            self._rebind_loss(other, sums_mean=False)
            return None
        return other

    def _choose_reading(
        self, call: BoundCall, replicas: Sequence[Replica], error: StructureError | MergeError | None = None
    ) -> BoundCall | None:
        """The call with the only reading of its arguments under which parts and whole agree. Later calls use it too.

        If no reading or several agree, raises `error`, which says why sizes alone do not decide, or returns None.
        """
        binding, names, probe = call.binding, call.plan.names, call.binding.probe
        assert probe is not None

        def trial_call(plan: SplitPlan) -> TrialCall | None:
            other = replace(call, plan=plan)
            selection = self._select_carried(other, replicas)
            can_split = not (selection.one_device or selection.unchecked)
            return self._trial_call(other, selection.split) if can_split else None

        known = None if call.plan.undecided else call.plan
        groups = binding.planner.other_plans(
            names, call.values, known, failed=error is None, sequence_first=has_sequence_first_layers(self.module)
        )
        undecided = call.plan.undecided is not None
        tried = try_readings(probe, groups, trial_call, accept_unproven=undecided)
        if len(tried.agreeing) == 1:
            binding.planner.keep(tried.agreeing[0])
            return replace(call, plan=self._plan(binding, names, call.values, call.local_sizes))
        if error is None:
            return None

        agreeing = [line for plan in tried.agreeing if (line := self._line_for(call, plan))]
        if isinstance(error, MergeError):
            raise merge_message(error, agreeing)
        outcomes: dict[SplitLine, Outcome | None] = {}
        for line in error.problem.lines if error.problem is not None else ():
            plan = binding.planner.plan_with(names, call.values, in_dims={line.path: line.spec})
            other = None if plan is None else trial_call(plan)
            outcomes[line] = None if other is None else probe.try_reading(other)
        raise split_message(error, agreeing, outcomes, self._note_on_dim_1(call))

    def _line_for(self, call: BoundCall, plan: SplitPlan) -> str:
        """The line that selects the reading of a plan; empty if the call would be split in another way with it."""
        line, planner = reading_line(plan), call.binding.planner
        option = line.partition("   #")[0]
        in_dims = None if option == "dim=1" else ast.literal_eval(option.removeprefix("in_dims="))
        found = planner.plan_with(plan.names, call.values, dim=1 if in_dims is None else None, in_dims=in_dims)
        return line if found is not None and found.placements == plan.placements else ""

    def _note_on_dim_1(self, call: BoundCall) -> str:
        """The line to write if the arguments are sequences `[T, B]` whose outputs need rules too; empty without one."""
        plan, probe = call.binding.planner.plan_with(call.plan.names, call.values, dim=1), call.binding.probe
        if plan is None or probe is None:
            return ""
        rules = probe.rules_in_dim_1(self._trial_call(replace(call, plan=plan), ()), self.state_merger)
        return f"{DIM_1_NOTE}\n  dim=1, {rules}" if rules else ""

    def _trial_call(self, call: BoundCall, carried: Sequence[CarriedValue]) -> TrialCall:
        place_shard = partial(self._place_shard, call.plan)
        return TrialCall(self.module, self.devices[0], call.plan, call.values, call.positional, place_shard, carried)

    def _dispatch(
        self,
        call: BoundCall,
        replicas: Sequence[Replica],
        ambient: AmbientState,
        rng: ReplicaRng,
        carried: Sequence[CarriedValue],
    ) -> ReplicaDispatch:
        """One forward of the replicas, ready to run."""
        self.replicas.release_carried(carried, len(replicas))
        probe, several = call.binding.probe, len(replicas) > 1
        shares = several and has_shared_arguments(call.plan, call.values)
        return ReplicaDispatch(
            self.engine,
            replicas,
            call.binding.replica_method,
            ambient,
            self.replicas.needs_state_sync,
            rng,
            call.plan.sizes,
            carried,
            SharedArguments(call.plan, call.values) if shares else None,
            mutable_ids(call.values) if several and self.engine.out_of_process else (),
            call.binding.merger.without_dropped,
            self.replicas.check_local_effects,
            find_functions=probe is not None and ambient.grad_enabled and probe.claim_graph_check(),
        )

    def _find_prepared(
        self, call: BoundCall, replicas: Sequence[Replica], ambient: AmbientState
    ) -> PreparedCall | None:
        """The prepared call for this one, unless something has to be looked for in its graph."""
        probe = call.binding.probe
        if probe is not None and ambient.grad_enabled and not probe.last_record.graph_checked:
            return None
        return self.prepared_calls.find(call.plan, call.values, replicas, self.replicas.generation, ambient)

    def _prepared_dispatch(
        self,
        prepared: PreparedCall,
        call: BoundCall,
        ambient: AmbientState,
        rng: ReplicaRng,
        run: PreparedRun | None = None,
    ) -> PreparedDispatch:
        self.replicas.release_carried((), len(prepared.replicas))
        return self.prepared_calls.dispatch(prepared, call.binding, self.replicas, ambient, rng, run)

    def _agreed_forward(
        self, call: BoundCall, dispatch: ReplicaDispatch | PreparedDispatch, shards: Sequence[Sequence[Any]]
    ) -> tuple[list[ReplicaResult], ForwardVerdict]:
        """Every replica's result, and the verdict of all ranks on it."""
        failure: BaseException | None = None
        try:
            results, verdict = self._forward(call, dispatch, shards)
        except (RankFailure, KeyboardInterrupt):  # all ranks have it
            raise
        except BaseException as error:
            failure, results, verdict = error, [], ForwardVerdict(failed=True)
        try:
            return results, self.engine.agree(verdict, failure)
        finally:
            failure = None  # breaks the cycle with this frame

    def _forward(
        self, call: BoundCall, dispatch: ReplicaDispatch | PreparedDispatch, shards: Sequence[Sequence[Any]]
    ) -> tuple[list[ReplicaResult], ForwardVerdict]:
        """Every replica's result, and whether it can be used."""
        try:
            results = dispatch.run(shards, call.positional, call.plan.names)
        except BaseException as error:
            self._written_argument = dispatch.written_argument()
            dispatch.restore_shared_arguments()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, LostExchange):
                return [], ForwardVerdict(retry=True)
            if isinstance(error, NoTorchMean):
                return [], ForwardVerdict(infer_loss=True)
            if reason := self.one_device.take_caller_only_access(call.method):
                return [], ForwardVerdict(one_device=reason)
            if not (containers := self.replicas.restore_changed()):
                if hasattr(error, "add_note"):
                    for note in self._failure_notes(call, error):
                        error.add_note(note)
                raise
            return [], ForwardVerdict(changed_containers=tuple(containers))
        self._written_argument = dispatch.written_argument()
        if self._written_argument is not None:
            call.binding.writes_arguments = True
        if reason := self._reason_in_results(call, dispatch):
            dispatch.restore_shared_arguments()
            return results, ForwardVerdict(one_device=reason)
        dispatch.check_shared_arguments()
        containers = self.replicas.restore_changed()
        containers += [path for result in results for path in result.remote.changed_containers]
        if containers:
            return results, ForwardVerdict(changed_containers=tuple(containers))
        if not dispatch.rng.serialized and self._used_shared_generator(dispatch.rng.caller):
            return results, ForwardVerdict(serialize=True)
        if any(result.changes.is_structural for result in results):
            return results, ForwardVerdict(one_device=self.one_device.record_structure_change())
        if call.binding.probe is not None and call.binding.probe.weights_disagree(call.plan.sizes):
            return results, ForwardVerdict(compare_weights=True)
        self._check_parameter_writes(dispatch.replicas, results)
        return results, ACCEPTED

    def _failure_notes(self, call: BoundCall, error: Exception) -> Iterator[str]:
        """What to write if `forward` failed because of how its arguments were split."""
        names, values = call.plan.names, call.values
        if isinstance(error, AttributeError):
            yield from list_of_graphs_notes(names, values)
        if type(error) in (RuntimeError, ValueError, IndexError):  # not a subclass, such as torch.OutOfMemoryError
            yield from rows_of_graphs_notes(names, values)
            probe = call.binding.probe
            if probe is not None and probe.last_record.status == "failed" and (note := self._note_on_dim_1(call)):
                yield note

    def _reason_in_results(self, call: BoundCall, dispatch: ReplicaDispatch | PreparedDispatch) -> Reason | None:
        """A reason for one device that only the forward could show."""
        reason = (
            self.one_device.take_caller_only_access(call.method)  # forward may have caught the exception
            or self.one_device.remove_registered_hooks(dispatch.hook_ids)
            or self.one_device.retained_grad(dispatch.retains_grad)
        )
        if reason is not None:
            return reason
        if dispatch.read_rng_state and dispatch.rng.caller.cpu.streams_used:
            return CPU_CHECKPOINT_RNG
        probe, functions = call.binding.probe, dispatch.custom_functions
        if functions and probe and not probe.gradients_add_up(self._trial_call(call, dispatch.carried)):
            return CUSTOM_BACKWARD.format(functions=" or ".join(functions))
        return None

    def _merge(
        self, call: BoundCall, outputs: list[Any], inputs: list[dict[str, Any]], carried: Sequence[CarriedValue]
    ) -> Any:
        """One output from the replicas' outputs. Where the probe's verdicts do not fit them, it tries this batch."""
        if self.engine.own_output is not None:
            return outputs[self.engine.own_output]
        probe, merger = call.binding.probe, call.binding.merger
        try:
            return merger.merge(outputs, call.plan.sizes, inputs)
        except MergeError as error:
            if probe is None:
                raise
            if not probe.retry(self._trial_call(call, carried)):
                raise probe.explain_failed_merge(error) from None
        return merger.merge(outputs, call.plan.sizes, inputs)

    def _check_parameter_writes(self, replicas: Sequence[Replica], results: Sequence[ReplicaResult]) -> None:
        """`StateError` for trainable parameters that forward wrote to."""
        written = self.replicas.find_written_parameters()
        by_replica = [
            (replica, result.remote.written_parameters) for replica, result in zip(replicas, results, strict=True)
        ]
        written += [tensor for _, found in by_replica for tensor in found]
        if not written:
            return
        in_place = [tensor for replica, found in by_replica if replica.same_device for tensor in found]
        check_no_parameter_writes(self.module, written, [*self.replicas.overwritten_parameters, *in_place])

    def _update_state(
        self,
        replicas: Sequence[Replica],
        results: Sequence[ReplicaResult],
        inputs: list[dict[str, Any]],
        plan: SplitPlan,
    ) -> None:
        """Apply what the replicas' forwards changed to the module, by rule."""
        renormed = self.replicas.renormed_values(plan.parts)
        changed = any(result.changes or result.written_state or result.statistics for result in results)
        if changed:
            with self.state_merger.using_inputs(inputs):
                self.replicas.record_state_attributes(results)
                paths = self.replicas.shared_containers.paths
                self.state_merger.merge_into(self.module, replicas, results, plan.sizes, paths)
        self.replicas.state_changed = changed
        for weight, rows in renormed:
            weight.data.copy_(rows)

    def _place(
        self, plan: SplitPlan, shards: Sequence[Sequence[Any]], replicas: Sequence[Replica]
    ) -> Sequence[Sequence[Any]]:
        """Each replica's arguments on its device; leaves that are there already are not touched."""
        rules = self.options.place
        keep_cpu = has_accelerator_tensors(shards[0]) if any(d.type != "cpu" for d in self.devices) else False
        placed: list[Sequence[Any]] = []
        for values, replica in zip(shards, replicas, strict=True):
            if replica.accepts_host_arguments(keep_cpu or bool(rules)):
                placed.append(values)
            else:
                named = zip(plan.names, values, strict=True)
                placed.append([place(value, (name,), replica.device, keep_cpu, rules) for name, value in named])
        return placed

    def _place_shard(self, plan: SplitPlan, shard: Sequence[Any]) -> list[Any]:
        return list(self._place(plan, [shard], self.replicas.replicas[:1])[0])

    def _replica_rng(self, caller: CallerRng, replicas: Sequence[Replica], serialize: bool) -> ReplicaRng:
        """The random streams of the replicas."""
        serialized = (
            serialize or self.engine.serialized or self.serialization.serialize or replicas[0].cloner.shares_generator
        )
        pairs = [replica.cloner.generators for replica in replicas]
        per_thread = not self.engine.joint_graph and supports_thread_streams()
        return ReplicaRng(caller, pairs, per_thread=per_thread, serialized=serialized)

    def _used_shared_generator(self, caller: CallerRng) -> bool:
        """Whether replicas that ran concurrently drew from one generator."""
        used = caller.is_shared_generator_used()
        self.serialization.record(used)
        return used

    def _on_one_device(self, call: BoundCall, reason: Reason) -> Any:
        self.one_device.record(reason, call.method)
        self.replicas.finish_call()
        with RegisteredHooks() as hooks:
            output = self.run_on_one_device(call.method, call.args, call.kwargs)
        if reason.name == TENSOR_HOOK.name:
            self.one_device.ran_with_hooks(call.method, registered=bool(hooks.ids))
        return output

    def run_on_one_device(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The module itself, on the first device."""
        function = self.module if method == "forward" else getattr(self.module, method)
        args, kwargs = strip_marks(args), strip_marks(kwargs)
        if not is_replica_thread():
            self._check_own_output(1)
        if self.keeps_cpu or is_replica_thread():
            return call_compiled(active_compiler(), function, args, kwargs)
        device, rules = self.devices[0], self.options.place
        if device.type != "cpu" or rules:
            names, values = self.binding(method).bind(args, kwargs)
            keep_cpu = has_accelerator_tensors(values)
            moved = [place(value, (name,), device, keep_cpu, rules) for name, value in zip(names, values, strict=True)]
            args, kwargs = moved[: len(args)], dict(zip(names[len(args) :], moved[len(args) :], strict=True))
        output = call_compiled(active_compiler(), function, args, kwargs)
        return output if self.output_device == device else to_output_device(output, self.output_device)

    def _check_own_output(self, parts: int) -> None:
        """`EngineError` if each rank gets the outputs of its own samples, and some rank has none in this call."""
        if self.engine.own_output is not None and parts < len(self.devices):
            raise EngineError(
                f"gather='sharded': this call runs on {parts} of {len(self.devices)} ranks (print(model.explain(...)) "
                f"shows why), so that the other ranks have no samples of their own.\n"
                f"Use gather='all', or larger batches."
            )

    def check_rerun_allowed(self) -> None:
        """`StateError` if the call must run again and has written to an argument, which would be written twice."""
        name = self._written_argument
        if name is not None:
            raise StateError(
                f"forward writes to its argument {name!r} in place, and the call has to run a second time: the "
                f"argument would be changed twice.\n"
                f"Write to a copy in forward: {name} = {name}.clone()."
            )
