"""A planned call on several replicas, from its shards to the whole output: the algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from instep.batchnorm import Outfit
from instep.crossing import Crossing
from instep.devices import on_output_device, place, stays_on_host
from instep.engines.bearings import Bearings
from instep.engines.protocol import Engine
from instep.errors import MergeError, StateError
from instep.given import Given, is_shared
from instep.locks import surely
from instep.options import Call, Options
from instep.random import RandomState, Streams, Turns, threads_can_draw, times_read
from instep.replicas.ambient import Ambient
from instep.replicas.carry import ALONE, UNSURE, Slot
from instep.replicas.crew import Crew
from instep.replicas.handed import ids_in
from instep.replicas.iterators import only_the_callers
from instep.replicas.rehearse import compare, left_in
from instep.replicas.replica import Outcome, Replica
from instep.replicas.settle import Settler, refuse_writes
from instep.sources import Source
from instep.structure.marks import bare
from instep.structure.plan import SplitPlan
from instep.structure.split import apply_plan
from instep.user_hooks import UserHooks


class _ForTheModule(StateError):
    """Replicas have shown that a call is one for the module itself."""


@dataclass
class Together:
    """Runs the calls of one wrapper on its replicas."""

    module: nn.Module
    devices: Sequence[torch.device]
    output: torch.device
    engine: Engine
    crew: Crew
    settler: Settler
    outfit: Outfit
    options: Options
    alone: Callable[[str, Sequence[Any], Mapping[str, Any]], Any]
    """Runs a call on the module itself."""

    def __post_init__(self) -> None:
        self.hooks = UserHooks(self.module)
        self._turns = Turns()
        self._restructured = self._warned = False
        self._wrote: str | None = None
        """The name of an argument that the last run of replicas wrote to."""
        self._asking: dict[Any, list[Any]] = {}
        """Iterators of the module that its methods ask, by the method and the mode."""
        self._hooking: set[Any] = set()
        """The methods and modes in which hooks are put on tensors."""
        self._one_backward_on_two = self.engine.joint and len({device.type for device in self.devices}) > 1
        """Whether one backward works on an accelerator and on the CPU, at the same time."""
        self._unhooked = -1
        """The number of the crew's stock of modules on which no hooks were found when this call began."""
        self._mixing: set[Any] = set()
        """Those in which a backward of the user's own looks at more than one sample, a gradient is asked for, or one
        backward for all replicas would recompute with numbers of another."""

    def run(self, call: Call) -> Any:
        """What one device would have given; a call that fails leaves everything as it was."""
        self.engine.wait()
        random, before = RandomState(self.devices, apart=self.engine.far), Bearings()
        try:
            result = self._once(call, random)
            self.crew.done()
            return result
        except BaseException:  # no context manager: an interruption could come on the way to it
            later = self.crew.putting_back()
            surely(before.restore, self.crew.restore, self.crew.discard, random.restore)
            self.engine.afterwards(later)
            raise

    def _once(self, call: Call, random: RandomState) -> Any:
        """A call that turns out to be one for the module itself is forgotten: one that wants something of an iterator
        which the module holds, or puts hooks on tensors."""
        try:
            return self._run(call, random)
        except Exception as error:
            if not self.crew.asked and not isinstance(error, _ForTheModule):
                raise
        if self.crew.asked:
            self._note_asked(call)
        self.refuse_again()
        self.crew.restore()
        self.crew.discard()
        random.restore()
        return self._on_source(call)

    def refuse_again(self) -> None:
        """`StateError` before a call is run once more that has written to its arguments: it would do so twice."""
        if self._wrote is not None:
            raise StateError(
                f"forward writes to its argument {self._wrote!r}, and the call has to be run a second time, because of "
                f"what else forward changes: the argument would be changed twice.\n"
                f"Let forward work on a copy: {self._wrote} = {self._wrote}.clone()."
            )

    def _note_asked(self, call: Call) -> None:
        if not self._asking:
            asked = self.crew.asked[0]
            warnings.warn(only_the_callers(asked, self.crew.name_of(asked)), stacklevel=6)
        self._asking.setdefault((call.method, self.module.training), []).extend(self.crew.asked)
        self.crew.asked.clear()

    def _manner(self, call: Call) -> Any:
        return call.method, self.module.training, torch.is_grad_enabled()

    def _puts_hooks(self, call: Call, numbers: range) -> bool:
        """Hooks that `forward` puts on tensors are written for whole batches, like those on modules."""
        found = self.hooks.made(numbers, self._manner(call)) if numbers and self.options.hooks == "whole" else None
        if found is not None:
            self.hooks.tell(found, stacklevel=9)
            self._hooking.add(self._manner(call))
        return found is not None

    def _retains(self, call: Call, crossing: Crossing) -> bool:
        """A gradient that `forward` asks for is that of what the whole batch makes of the tensor."""
        if not crossing.retains or self.options.hooks != "whole":
            return False
        warnings.warn(
            "forward asks for the gradient of a tensor that it keeps or returns (retain_grad()): calls run on one "
            "device, where that is the whole batch's.\nWith hooks='per_replica' they run on all, and it has none.",
            stacklevel=9,
        )
        self._mixing.add(self._manner(call))
        return True

    def _recomputes(self, call: Call, host: Source, read: int) -> bool:
        """Checkpointed regions set the state of the one generator of the CPU again, on two kinds of devices at once."""
        if not self._one_backward_on_two or not host.drawn or times_read() == read:
            return False
        warnings.warn(
            "forward draws on the CPU and reads the state of its generator, as checkpointed regions do: the one "
            "backward of engine='serial' would recompute on an accelerator and on the CPU at the same time, with "
            "numbers of each other. Calls run on one device.\nWith engine='threads' they run on all.",
            stacklevel=9,
        )
        self._mixing.add(self._manner(call))
        return True

    def _mixes(self, call: Call, functions: Sequence[str], carried: Sequence[Slot]) -> bool:
        """Whether a backward of the user's own gives parts of a batch other gradients than the whole."""
        probe, plan = call.known.probe, call.plan
        if probe is None or not functions:
            return False
        place = partial(self._place_one, plan)
        home, values = self.devices[0], call.values
        if probe.gradients_add_up(self.module, home, plan, values, call.positional, place, carried):
            return False
        warnings.warn(
            f"the gradients of a few samples in two parts are not those of the samples together: the backward of "
            f"{' or '.join(functions)} looks at the whole batch. Calls run on one device.\n"
            f"With probe=False they run on all, and it is shown shards.",
            stacklevel=9,
        )
        self._mixing.add(self._manner(call))
        return True

    def _with_hooks(self, call: Call) -> Any:
        """The module itself, as long as it goes on to make hooks."""
        first = RemovableHandle.next_id
        output = self._on_source(call)
        if RemovableHandle.next_id == first:
            self._hooking.discard(self._manner(call))
        return output

    def _is_asking(self, call: Call) -> bool:
        return bool(self._asking) and self.crew.holds(self._asking.get((call.method, self.module.training), ()))

    def _run(
        self,
        call: Call,
        random: RandomState,
        rehearsal: list[Slot] | None = None,
        *,
        slots: Sequence[Slot] = (),
        again: bool = False,
    ) -> Any:
        """The algorithm: split, place, cross, merge, settle.

        A rehearsal cuts some of the slots of carried state, and gives what was left in all of them instead of the last
        step. A call is run `again`, one replica after another, if replicas drew from one generator.
        """
        crew, plan = self.crew, call.plan
        replicas = crew.ready()[: plan.parts]
        # Modules that are not registered are known by now.
        hooked = crew.made != self._unhooked and self.is_hooked()
        manner = self._manner(call)
        if crew.is_tied() or hooked or self._is_asking(call) or manner in self._mixing:
            return self._on_source(call)
        if manner in self._hooking:
            return self._with_hooks(call)
        carried, verdict = self.settler.carry.found(
            self.module, replicas[0].source_modules, plan.sizes, crew.shelf.places, crew.kinds.now, rehearsal
        )
        if verdict == ALONE:
            return self._on_source(call)
        if verdict == UNSURE:
            retry, alone = partial(self._run, call, random, slots=carried), partial(self._on_source, call)
            return compare(carried, retry, partial(self._on_one, call, random, carried), alone, crew, random)
        if rehearsal is None and not again:
            self._probe(call, carried)
        self.outfit.speak(self.module)
        streams = self._streams(random, replicas, again)
        shards = streams.arguments(self._place(plan, apply_plan(plan, call.values)))
        outcomes = self._cross(call, replicas, shards, streams, [slot for slot in carried if slot.module is not None])
        if outcomes is None:
            self.refuse_again()
            random.restore()
            return self._run(call, random, rehearsal, slots=slots, again=again)
        if not streams.in_turn and self._drew_from_one(random):
            self.refuse_again()
            return self._run(call, random, rehearsal, slots=slots, again=True)
        if any(outcome.changes.structure for outcome in outcomes):
            if rehearsal is not None:
                return None
            self.refuse_again()
            self._forget(random)
            return self._on_source(call)
        self._refuse_writes(replicas, outcomes)
        outputs = [on_output_device(outcome.output, self.output) for outcome in outcomes]
        inputs = [dict(zip(plan.names, values, strict=True)) for values in shards]
        if rehearsal is not None:  # nothing is learned from it
            self.refuse_again()
            return call.known.merger.once().merge(outputs, plan.sizes, inputs), left_in(slots, replicas)
        streams.settle()
        merged = call.known.whole(self._merge(call, outputs, inputs, carried))
        rewritten = crew.rewritten(plan.parts)
        changed = any(outcome.changes or outcome.written for outcome in outcomes)
        if changed:
            with self.settler.given(inputs):
                crew.settled(outcomes)
                self.settler.settle(self.module, replicas, outcomes, plan.sizes, crew.shelf.places)
        crew.changed = changed
        for weight, rows in rewritten:
            weight.data.copy_(rows)
        return merged

    def _refuse_writes(self, replicas: Sequence[Replica], outcomes: Sequence[Outcome]) -> None:
        """`StateError` for parameters that `forward` wrote to; whether the module's own hold that depends on where."""
        found = list(zip(replicas, [outcome.refused for outcome in outcomes], strict=True))
        written = [*self.crew.written(), *(tensor for _, theirs in found for tensor in theirs)]
        near = [tensor for replica, theirs in found if replica.near for tensor in theirs]
        refuse_writes(self.module, written, [*self.crew.overwritten, *near])

    def _probe(self, call: Call, carried: Sequence[Slot]) -> None:
        """Before the first call of a structure: a few samples in parts and together say what its outputs mean."""
        probe, plan, kind = call.known.probe, call.plan, self.crew.kinds.now
        if probe is not None:
            home, place = self.devices[0], partial(self._place_one, plan)
            self.settler.found = probe.before(
                self.module, home, plan, call.values, call.positional, kind, place, carried
            )
            last = probe.last
            self.settler.doubted, self.settler.varied, self.settler.constant = last.doubted, last.varied, last.constant

    def _merge(self, call: Call, outputs: list[Any], inputs: list[dict[str, Any]], carried: Sequence[Slot]) -> Any:
        """One output from those of the replicas; where what is known of them does not fit, the probe asks again."""
        probe, plan = call.known.probe, call.plan
        try:
            return call.known.merger.merge(outputs, plan.sizes, inputs)
        except MergeError:
            home, place = self.devices[0], partial(self._place_one, plan)
            if probe is None or not probe.again(self.module, home, plan, call.values, call.positional, place, carried):
                raise
        return call.known.merger.merge(outputs, plan.sizes, inputs)

    def _place_one(self, plan: SplitPlan, shard: Sequence[Any]) -> list[Any]:
        return self._place(plan, [list(shard)])[0]

    def _cross(
        self, call: Call, replicas: Sequence[Replica], shards: Any, streams: Streams, carried: list[Slot]
    ) -> list[Outcome] | None:
        """Every replica's outcome; None if they changed something that they shared, and have their own of it now."""
        crew, engine = self.crew, self.engine
        crew.release(carried, len(replicas))
        ambient = Ambient.capture(self.devices)
        runs, sizes = call.known.runs, call.plan.sizes
        shared = len(replicas) > 1 and is_shared(call.plan, call.values)
        given = Given(call.plan, call.values) if shared else None
        crossing = Crossing(engine, replicas, runs, ambient, crew.behind, streams, sizes, carried, given)
        crossing.look = call.known.probe is not None and torch.is_grad_enabled() and call.known.probe.is_new()
        if engine.far and len(replicas) > 1:
            crossing.theirs = ids_in(call.values)
        read = times_read() if self._one_backward_on_two else 0
        try:
            outcomes = crossing.run(shards, call.positional, call.plan.names)
        except BaseException as error:
            self._wrote = crossing.wrote()
            if given is not None:
                given.put_back()
            if not isinstance(error, Exception) or crew.asked or not crew.part():
                raise
            return None
        self._wrote = crossing.wrote()
        # An iterator may have been asked although nothing was raised: forward can catch that.
        whole = self._puts_hooks(call, crossing.hooks) or self._retains(call, crossing)
        whole = whole or self._recomputes(call, streams.state.host, read)
        if crew.asked or whole or self._mixes(call, crossing.functions, carried):
            if given is not None:
                given.put_back()
            raise _ForTheModule
        if given is not None:
            given.check()
        return None if crew.part([place for outcome in outcomes for place in outcome.parted]) else outcomes

    def _on_one(self, call: Call, random: RandomState, slots: list[Slot]) -> Any:
        """What one replica makes of the whole batch; the module is left as it was, but for draws."""
        replicas = self.crew.ready()[:1]
        streams = self._streams(random, replicas, again=False)
        shards = self._place(call.plan, [list(bare(call.values))])
        ambient, behind = Ambient.capture(self.devices), self.crew.behind
        crossing = Crossing(self.engine, replicas, call.known.runs, ambient, behind, streams)
        output = crossing.run(shards, call.positional, call.plan.names)[0].output
        self._wrote = crossing.wrote()
        self.refuse_again()
        streams.settle()
        return on_output_device(output, self.output), left_in(slots, replicas)

    def _on_source(self, call: Call) -> Any:
        self.crew.done()
        return self.alone(call.method, call.args, call.kwargs)

    def _place(self, plan: SplitPlan, shards: list[list[Any]]) -> list[list[Any]]:
        """Each replica's shards on its device; leaves that are there already are not touched."""
        rules = self.options.place
        keep = stays_on_host(shards[0]) if any(d.type != "cpu" for d in self.devices) else False
        placed = []
        for values, replica in zip(shards, self.crew.replicas, strict=False):
            if replica.takes_from_host(keep or bool(rules)):
                placed.append(values)
                continue
            named = zip(plan.names, values, strict=True)
            placed.append([place(value, (name,), replica.device, keep, rules) for name, value in named])
        return placed

    def _streams(self, random: RandomState, replicas: Sequence[Replica], again: bool) -> Streams:
        """Where the replicas draw from in a call, or in one that is run `again` for drawing from one generator."""
        engine = self.engine
        in_turn = again or engine.in_turn or self._turns.always or replicas[0].cloner.draws
        held = [replica.cloner.generators for replica in replicas]
        return Streams(random, held, own=not engine.joint and threads_can_draw(), in_turn=in_turn)

    def _drew_from_one(self, random: RandomState) -> bool:
        """Whether replicas that ran side by side drew from one generator; if so, the call is forgotten."""
        moved = random.moved()
        self._turns.note(moved)
        if moved:
            random.restore()
            self.crew.discard()
        return moved

    def _forget(self, random: RandomState) -> None:
        """Forget a call in which `forward` changed the structure of its replica.

        Layers or hooks that come to be in the first call do so on the module itself, and are there for the next one.
        """
        random.restore()
        self.crew.discard()
        if self._restructured and not self._warned:
            warnings.warn(
                "forward adds, removes or replaces modules, parameters, hooks, or entries of a list or dictionary that "
                "holds tensors or modules, again and again: such calls run on one device.",
                stacklevel=5,
            )
            self._warned = True
        self._restructured = True

    def is_hooked(self) -> bool:
        """Whether hooks of the user's are there that are to see whole batches."""
        if self.options.hooks != "whole":
            return False
        made = self.crew.made
        found = self.hooks.find(self.crew.modules, made)
        if found is not None:
            self.hooks.tell(found)
        self._unhooked = made if found is None else -1
        return found is not None
