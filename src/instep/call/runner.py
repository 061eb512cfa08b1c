"""Runs one call on the replicas: split, place, forward, merge, state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from instep.call.dispatch import ReplicaDispatch
from instep.call.options import BoundCall, Options
from instep.call.shared_arguments import SharedArguments, has_shared_arguments
from instep.collectives.sync_batchnorm import SyncBatchNormPatch
from instep.devices import has_accelerator_tensors, place, to_output_device
from instep.engines.base import Engine
from instep.errors import MergeError, StateError
from instep.replicas.clone import caller_only_message
from instep.replicas.mutable_arguments import mutable_ids
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.carried import ONE_DEVICE, UNKNOWN, CarriedValue
from instep.replicas.state.merge import StateMerger, check_no_parameter_writes
from instep.replicas.state.rehearse import carried_after_call, compare_runs
from instep.replicas.user_hooks import UserHooks
from instep.runtime.ambient import AmbientState
from instep.runtime.locks import run_uninterrupted
from instep.runtime.rng import (
    CallerGenerator,
    CallerRng,
    ReplicaRng,
    SerializationPolicy,
    rng_state_reads,
    supports_thread_streams,
)
from instep.structure.plan import SplitPlan
from instep.structure.spec import strip_marks
from instep.structure.split import apply_plan


class _RunOnOneDevice(StateError):
    """Replicas have shown that a call is one for the module itself."""


@dataclass
class ParallelRunner:
    """Runs the calls of one wrapper on its replicas."""

    module: nn.Module
    devices: Sequence[torch.device]
    output_device: torch.device
    engine: Engine
    replicas: ReplicaSet
    state_merger: StateMerger
    batchnorm_patch: SyncBatchNormPatch
    options: Options
    run_on_one_device: Callable[[str, Sequence[Any], Mapping[str, Any]], Any]
    """Runs a call on the module itself."""

    def __post_init__(self) -> None:
        self.hooks = UserHooks(self.module)
        self._serialized_draws = SerializationPolicy()
        self._restructured = self._warned = False
        self._written_argument: str | None = None
        """The name of an argument that the last run of replicas wrote to."""
        self._caller_only: dict[Any, list[Any]] = {}
        """Iterators of the module that its methods ask, by the method and the mode."""
        self._tensor_hook_modes: set[Any] = set()
        """The methods and modes in which hooks are put on tensors."""
        self._one_backward_on_two = self.engine.joint_graph and len({device.type for device in self.devices}) > 1
        """Whether one backward works on an accelerator and on the CPU, at the same time."""
        self._unhooked_generation = -1
        """The number of the crew's stock of modules on which no hooks were found when this call began."""
        self._one_device_modes: set[Any] = set()
        """Those in which a backward of the user's own looks at more than one sample, a gradient is asked for, or one
        backward for all replicas would recompute with numbers of another."""

    def run(self, call: BoundCall) -> Any:
        """What one device would have given; a call that fails leaves everything as it was."""
        self.engine.wait_idle()
        random = CallerRng(self.devices, out_of_process=self.engine.out_of_process)
        before = AmbientState.capture()
        try:
            result = self._run_or_one_device(call, random)
            self.replicas.finish_call()
            return result
        except BaseException:  # no context manager: an interruption could come on the way to it
            later = self.replicas.deferred_restore()
            run_uninterrupted(before.restore, self.replicas.restore_containers, self.replicas.discard, random.restore)
            self.engine.add_idle_callback(later)
            raise

    def _run_or_one_device(self, call: BoundCall, random: CallerRng) -> Any:
        """A call that turns out to be one for the module itself is forgotten: one that wants something of an iterator
        which the module holds, or puts hooks on tensors."""
        try:
            return self._run(call, random)
        except Exception as error:
            if not self.replicas.caller_only_accesses and not isinstance(error, _RunOnOneDevice):
                raise
        if self.replicas.caller_only_accesses:
            self._note_caller_only(call)
        self.check_rerun_allowed()
        self.replicas.restore_containers()
        self.replicas.discard()
        random.restore()
        return self._on_one_device(call)

    def check_rerun_allowed(self) -> None:
        """`StateError` before a call is run once more that has written to its arguments: it would do so twice."""
        if self._written_argument is not None:
            raise StateError(
                f"forward writes to its argument {self._written_argument!r}, and the call has to be run a second time, because of "
                f"what else forward changes: the argument would be changed twice.\n"
                f"Let forward work on a copy: {self._written_argument} = {self._written_argument}.clone()."
            )

    def _note_caller_only(self, call: BoundCall) -> None:
        if not self._caller_only:
            asked = self.replicas.caller_only_accesses[0]
            warnings.warn(caller_only_message(asked, self.replicas.attribute_name(asked)), stacklevel=6)
        self._caller_only.setdefault((call.method, self.module.training), []).extend(self.replicas.caller_only_accesses)
        self.replicas.caller_only_accesses.clear()

    def _call_mode(self, call: BoundCall) -> Any:
        return call.method, self.module.training, torch.is_grad_enabled()

    def _registers_tensor_hooks(self, call: BoundCall, numbers: range) -> bool:
        """Hooks that `forward` puts on tensors are written for whole batches, like those on modules."""
        found = (
            self.hooks.remove_tensor_hooks(numbers, self._call_mode(call))
            if numbers and self.options.hooks == "whole"
            else None
        )
        if found is not None:
            self.hooks.warn_once(found, stacklevel=9)
            self._tensor_hook_modes.add(self._call_mode(call))
        return found is not None

    def _retains_grad(self, call: BoundCall, crossing: ReplicaDispatch) -> bool:
        """A gradient that `forward` asks for is that of what the whole batch makes of the tensor."""
        if not crossing.retains or self.options.hooks != "whole":
            return False
        warnings.warn(
            "forward asks for the gradient of a tensor that it keeps or returns (retain_grad()): calls run on one "
            "device, where that is the whole batch's.\nWith hooks='per_replica' they run on all, and it has none.",
            stacklevel=9,
        )
        self._one_device_modes.add(self._call_mode(call))
        return True

    def _recomputes_on_two_device_types(self, call: BoundCall, host: CallerGenerator, read: int) -> bool:
        """Checkpointed regions set the state of the one generator of the CPU again, on two kinds of devices at once."""
        if not self._one_backward_on_two or not host.streams_used or rng_state_reads() == read:
            return False
        warnings.warn(
            "forward draws on the CPU and reads the state of its generator, as checkpointed regions do: the one "
            "backward of engine='serial' would recompute on an accelerator and on the CPU at the same time, with "
            "numbers of each other. Calls run on one device.\nWith engine='threads' they run on all.",
            stacklevel=9,
        )
        self._one_device_modes.add(self._call_mode(call))
        return True

    def _has_batch_dependent_backward(
        self, call: BoundCall, functions: Sequence[str], carried: Sequence[CarriedValue]
    ) -> bool:
        """Whether a backward of the user's own gives parts of a batch other gradients than the whole."""
        probe, plan = call.binding.probe, call.plan
        if probe is None or not functions:
            return False
        place = partial(self._place_shard, plan)
        home, values = self.devices[0], call.values
        if probe.gradients_add_up(self.module, home, plan, values, call.positional, place, carried):
            return False
        warnings.warn(
            f"the gradients of a few samples in two parts are not those of the samples together: the backward of "
            f"{' or '.join(functions)} looks at the whole batch. Calls run on one device.\n"
            f"With probe=False they run on all, and it is shown shards.",
            stacklevel=9,
        )
        self._one_device_modes.add(self._call_mode(call))
        return True

    def _run_with_tensor_hooks(self, call: BoundCall) -> Any:
        """The module itself, as long as it goes on to make hooks."""
        first = RemovableHandle.next_id
        output = self._on_one_device(call)
        if RemovableHandle.next_id == first:
            self._tensor_hook_modes.discard(self._call_mode(call))
        return output

    def _uses_caller_only(self, call: BoundCall) -> bool:
        return bool(self._caller_only) and self.replicas.holds_any(
            self._caller_only.get((call.method, self.module.training), ())
        )

    def _run(
        self,
        call: BoundCall,
        random: CallerRng,
        rehearsal: list[CarriedValue] | None = None,
        *,
        slots: Sequence[CarriedValue] = (),
        again: bool = False,
    ) -> Any:
        """The algorithm: split, place, cross, merge, settle.

        A rehearsal cuts some of the slots of carried state, and gives what was left in all of them instead of the last
        step. A call is run `again`, one replica after another, if replicas drew from one generator.
        """
        crew, plan = self.replicas, call.plan
        replicas = crew.sync()[: plan.parts]
        # Modules that are not registered are known by now.
        hooked = crew.generation != self._unhooked_generation and self.has_user_hooks()
        manner = self._call_mode(call)
        if (
            crew.has_shared_max_norm_weight()
            or hooked
            or self._uses_caller_only(call)
            or manner in self._one_device_modes
        ):
            return self._on_one_device(call)
        if manner in self._tensor_hook_modes:
            return self._run_with_tensor_hooks(call)
        carried, verdict = self.state_merger.carried.select(
            self.module,
            replicas[0].source_modules,
            plan.sizes,
            crew.shared_containers.paths,
            crew.fingerprint.current,
            rehearsal,
        )
        if verdict == ONE_DEVICE:
            return self._on_one_device(call)
        if verdict == UNKNOWN:
            retry, alone = partial(self._run, call, random, slots=carried), partial(self._on_one_device, call)
            return compare_runs(
                carried, retry, partial(self._on_one_replica, call, random, carried), alone, crew, random
            )
        if rehearsal is None and not again:
            self._probe(call, carried)
        self.batchnorm_patch.warn_once(self.module)
        streams = self._streams(random, replicas, again)
        shards = streams.replace_generators(self._place(plan, apply_plan(plan, call.values)))
        outcomes = self._run_replicas(
            call, replicas, shards, streams, [slot for slot in carried if slot.module is not None]
        )
        if outcomes is None:
            self.check_rerun_allowed()
            random.restore()
            return self._run(call, random, rehearsal, slots=slots, again=again)
        if not streams.serialized and self._shared_generator_used(random):
            self.check_rerun_allowed()
            return self._run(call, random, rehearsal, slots=slots, again=True)
        if any(outcome.changes.is_structural for outcome in outcomes):
            if rehearsal is not None:
                return None
            self.check_rerun_allowed()
            self._undo_structure_change(random)
            return self._on_one_device(call)
        self._check_parameter_writes(replicas, outcomes)
        outputs = [to_output_device(outcome.output, self.output_device) for outcome in outcomes]
        inputs = [dict(zip(plan.names, values, strict=True)) for values in shards]
        if rehearsal is not None:  # nothing is learned from it
            self.check_rerun_allowed()
            return call.binding.merger.fresh_copy().merge(outputs, plan.sizes, inputs), carried_after_call(
                slots, replicas
            )
        streams.advance()
        merged = call.binding.finish(self._merge(call, outputs, inputs, carried))
        rewritten = crew.renormed_values(plan.parts)
        changed = any(outcome.changes or outcome.written_state for outcome in outcomes)
        if changed:
            with self.state_merger.using_inputs(inputs):
                crew.record_state_attributes(outcomes)
                self.state_merger.merge_into(self.module, replicas, outcomes, plan.sizes, crew.shared_containers.paths)
        crew.state_changed = changed
        for weight, rows in rewritten:
            weight.data.copy_(rows)
        return merged

    def _check_parameter_writes(self, replicas: Sequence[Replica], outcomes: Sequence[ReplicaResult]) -> None:
        """`StateError` for parameters that `forward` wrote to; whether the module's own hold that depends on where."""
        found = list(zip(replicas, [outcome.written_parameters for outcome in outcomes], strict=True))
        written = [*self.replicas.written_parameters(), *(tensor for _, theirs in found for tensor in theirs)]
        near = [tensor for replica, theirs in found if replica.same_device for tensor in theirs]
        check_no_parameter_writes(self.module, written, [*self.replicas.overwritten_parameters, *near])

    def _probe(self, call: BoundCall, carried: Sequence[CarriedValue]) -> None:
        """Before the first call of a structure: a few samples in parts and together say what its outputs mean."""
        probe, plan, kind = call.binding.probe, call.plan, self.replicas.fingerprint.current
        if probe is not None:
            home, place = self.devices[0], partial(self._place_shard, plan)
            self.state_merger.verdicts = probe.prepare(
                self.module, home, plan, call.values, call.positional, kind, place, carried
            )
            last = probe.last_record
            self.state_merger.unmergeable, self.state_merger.sample_dependent, self.state_merger.constant = (
                last.unmergeable,
                last.sample_dependent,
                last.constant,
            )

    def _merge(
        self, call: BoundCall, outputs: list[Any], inputs: list[dict[str, Any]], carried: Sequence[CarriedValue]
    ) -> Any:
        """One output from those of the replicas; where what is known of them does not fit, the probe asks again."""
        probe, plan = call.binding.probe, call.plan
        try:
            return call.binding.merger.merge(outputs, plan.sizes, inputs)
        except MergeError:
            home, place = self.devices[0], partial(self._place_shard, plan)
            if probe is None or not probe.retry(self.module, home, plan, call.values, call.positional, place, carried):
                raise
        return call.binding.merger.merge(outputs, plan.sizes, inputs)

    def _place_shard(self, plan: SplitPlan, shard: Sequence[Any]) -> list[Any]:
        return self._place(plan, [list(shard)])[0]

    def _run_replicas(
        self,
        call: BoundCall,
        replicas: Sequence[Replica],
        shards: Any,
        streams: ReplicaRng,
        carried: list[CarriedValue],
    ) -> list[ReplicaResult] | None:
        """Every replica's outcome; None if they changed something that they shared, and have their own of it now."""
        crew, engine = self.replicas, self.engine
        crew.release_carried(carried, len(replicas))
        ambient = AmbientState.capture(self.devices)
        runs, sizes = call.binding.replica_method, call.plan.sizes
        shared = len(replicas) > 1 and has_shared_arguments(call.plan, call.values)
        given = SharedArguments(call.plan, call.values) if shared else None
        crossing = ReplicaDispatch(
            engine, replicas, runs, ambient, crew.needs_state_sync, streams, sizes, carried, given
        )
        crossing.find_functions = (
            call.binding.probe is not None and torch.is_grad_enabled() and call.binding.probe.claim_graph_check()
        )
        if engine.out_of_process and len(replicas) > 1:
            crossing.argument_ids = mutable_ids(call.values)
        read = rng_state_reads() if self._one_backward_on_two else 0
        try:
            outcomes = crossing.run(shards, call.positional, call.plan.names)
        except BaseException as error:
            self._written_argument = crossing.written_argument()
            if given is not None:
                given.restore()
            if not isinstance(error, Exception) or crew.caller_only_accesses or not crew.privatize_changed():
                raise
            return None
        self._written_argument = crossing.written_argument()
        # An iterator may have been asked although nothing was raised: forward can catch that.
        whole = self._registers_tensor_hooks(call, crossing.hooks) or self._retains_grad(call, crossing)
        whole = whole or self._recomputes_on_two_device_types(call, streams.caller.cpu, read)
        if crew.caller_only_accesses or whole or self._has_batch_dependent_backward(call, crossing.functions, carried):
            if given is not None:
                given.restore()
            raise _RunOnOneDevice
        if given is not None:
            given.check()
        return (
            None
            if crew.privatize_changed([place for outcome in outcomes for place in outcome.changed_containers])
            else outcomes
        )

    def _on_one_replica(self, call: BoundCall, random: CallerRng, slots: list[CarriedValue]) -> Any:
        """What one replica makes of the whole batch; the module is left as it was, but for draws."""
        replicas = self.replicas.sync()[:1]
        streams = self._streams(random, replicas, again=False)
        shards = self._place(call.plan, [list(strip_marks(call.values))])
        ambient, behind = AmbientState.capture(self.devices), self.replicas.needs_state_sync
        crossing = ReplicaDispatch(self.engine, replicas, call.binding.replica_method, ambient, behind, streams)
        output = crossing.run(shards, call.positional, call.plan.names)[0].output
        self._written_argument = crossing.written_argument()
        self.check_rerun_allowed()
        streams.advance()
        return to_output_device(output, self.output_device), carried_after_call(slots, replicas)

    def _on_one_device(self, call: BoundCall) -> Any:
        self.replicas.finish_call()
        return self.run_on_one_device(call.method, call.args, call.kwargs)

    def _place(self, plan: SplitPlan, shards: list[list[Any]]) -> list[list[Any]]:
        """Each replica's shards on its device; leaves that are there already are not touched."""
        rules = self.options.place
        keep = has_accelerator_tensors(shards[0]) if any(d.type != "cpu" for d in self.devices) else False
        placed = []
        for values, replica in zip(shards, self.replicas.replicas, strict=False):
            if replica.accepts_host_arguments(keep or bool(rules)):
                placed.append(values)
                continue
            named = zip(plan.names, values, strict=True)
            placed.append([place(value, (name,), replica.device, keep, rules) for name, value in named])
        return placed

    def _streams(self, random: CallerRng, replicas: Sequence[Replica], again: bool) -> ReplicaRng:
        """Where the replicas draw from in a call, or in one that is run `again` for drawing from one generator."""
        engine = self.engine
        in_turn = again or engine.serialized or self._serialized_draws.serialize or replicas[0].cloner.shares_generator
        held = [replica.cloner.generators for replica in replicas]
        return ReplicaRng(
            random, held, per_thread=not engine.joint_graph and supports_thread_streams(), serialized=in_turn
        )

    def _shared_generator_used(self, random: CallerRng) -> bool:
        """Whether replicas that ran side by side drew from one generator; if so, the call is forgotten."""
        moved = random.is_shared_generator_used()
        self._serialized_draws.record(moved)
        if moved:
            random.restore()
            self.replicas.discard()
        return moved

    def _undo_structure_change(self, random: CallerRng) -> None:
        """Forget a call in which `forward` changed the structure of its replica.

        Layers or hooks that come to be in the first call do so on the module itself, and are there for the next one.
        """
        random.restore()
        self.replicas.discard()
        if self._restructured and not self._warned:
            warnings.warn(
                "forward adds, removes or replaces modules, parameters, hooks, or entries of a list or dictionary that "
                "holds tensors or modules, again and again: such calls run on one device.",
                stacklevel=5,
            )
            self._warned = True
        self._restructured = True

    def has_user_hooks(self) -> bool:
        """Whether hooks of the user's are there that are to see whole batches."""
        if self.options.hooks != "whole":
            return False
        made = self.replicas.generation
        found = self.hooks.find(self.replicas.modules, made)
        if found is not None:
            self.hooks.warn_once(found)
        self._unhooked_generation = made if found is None else -1
        return found is not None
