"""A planned call on several replicas, from its shards to the whole output: the algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from instep.batchnorm import Outfit
from instep.crossing import Crossing
from instep.devices import on_output_device, place, stays_on_host
from instep.engines.bearings import Bearings
from instep.engines.protocol import Engine
from instep.locks import surely
from instep.options import Call, Options
from instep.random import RandomState, Streams, Turns, threads_can_draw
from instep.replicas.ambient import Ambient
from instep.replicas.carry import ALONE, UNSURE, Slot
from instep.replicas.crew import Crew
from instep.replicas.rehearse import compare, left_in
from instep.replicas.replica import Outcome, Replica
from instep.replicas.settle import Settler, refuse_writes
from instep.structure.marks import bare
from instep.structure.plan import SplitPlan
from instep.structure.split import apply_plan
from instep.user_hooks import UserHooks


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

    def run(self, call: Call) -> Any:
        """What one device would have given; a call that fails leaves everything as it was."""
        self.engine.wait()
        random, before = RandomState(self.devices), Bearings()
        try:
            result = self._run(call, random)
            self.crew.done()
            return result
        except BaseException:  # no context manager: an interruption could come on the way to it
            later = self.crew.putting_back()
            surely(before.restore, self.crew.restore, self.crew.discard, random.restore)
            self.engine.afterwards(later)
            raise

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
        if crew.is_tied() or self.is_hooked():  # modules that are not registered are known by now
            return self._on_source(call)
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
            random.restore()
            return self._run(call, random, rehearsal, slots=slots, again=again)
        if not streams.in_turn and self._drew_from_one(random):
            return self._run(call, random, rehearsal, slots=slots, again=True)
        if any(outcome.changes.structure for outcome in outcomes):
            if rehearsal is not None:
                return None
            self._forget(random)
            return self._on_source(call)
        refuse_writes(self.module, crew.written())
        outputs = [on_output_device(outcome.output, self.output) for outcome in outcomes]
        inputs = [dict(zip(plan.names, values, strict=True)) for values in shards]
        if rehearsal is not None:  # nothing is learned from it
            return call.known.merger.once().merge(outputs, plan.sizes, inputs), left_in(slots, replicas)
        streams.settle()
        merged = call.known.whole(call.known.merger.merge(outputs, plan.sizes, inputs))
        rewritten = crew.rewritten(plan.parts)
        with self.settler.given(inputs):
            crew.settled(outcomes)
            crew.changed = self.settler.settle(self.module, replicas, outcomes, plan.sizes, crew.shelf.places)
        for weight, rows in rewritten:
            weight.data.copy_(rows)
        return merged

    def _probe(self, call: Call, carried: Sequence[Slot]) -> None:
        """Before the first call of a structure: a few samples in parts and together say what its outputs mean."""
        probe, plan, kind = call.known.probe, call.plan, self.crew.kinds.now
        if probe is not None:
            home, place = self.devices[0], partial(self._place_one, plan)
            self.settler.found = probe.before(
                self.module, home, plan, call.values, call.positional, kind, place, carried
            )
            self.settler.doubted = probe.last.doubted

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
        crossing = Crossing(engine, replicas, runs, ambient, crew.behind, streams, sizes, carried)
        try:
            outcomes = crossing.run(shards, call.positional, call.plan.names)
        except Exception:
            if not crew.part():
                raise
            return None
        return None if crew.part([place for outcome in outcomes for place in outcome.parted]) else outcomes

    def _on_one(self, call: Call, random: RandomState, slots: list[Slot]) -> Any:
        """What one replica makes of the whole batch; the module is left as it was, but for draws."""
        replicas = self.crew.ready()[:1]
        streams = self._streams(random, replicas, again=False)
        shards = self._place(call.plan, [list(bare(call.values))])
        ambient, behind = Ambient.capture(self.devices), self.crew.behind
        crossing = Crossing(self.engine, replicas, call.known.runs, ambient, behind, streams)
        output = crossing.run(shards, call.positional, call.plan.names)[0].output
        streams.settle()
        return on_output_device(output, self.output), left_in(slots, replicas)

    def _on_source(self, call: Call) -> Any:
        self.crew.done()
        return self.alone(call.method, call.args, call.kwargs)

    def _place(self, plan: SplitPlan, shards: list[list[Any]]) -> list[list[Any]]:
        """Each replica's shards on its device; leaves that are there already are not touched."""
        rules = self.options.place
        keep = stays_on_host(shards[0]) if any(d.type != "cpu" for d in self.devices) else False
        return [
            [place(value, (name,), device, keep, rules) for name, value in zip(plan.names, values, strict=True)]
            for values, device in zip(shards, self.devices, strict=False)
        ]

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
        found = self.hooks.find(self.crew.modules, self.crew.made)
        if found is not None:
            self.hooks.tell(found)
        return found is not None
