"""The generators of one forward in a worker: set before it, and asked after it what was drawn from."""

from __future__ import annotations

from itertools import compress

import torch

from instep.engines.processes import dice
from instep.engines.processes.mirror import Mirror
from instep.engines.processes.orders import Ran, Run
from instep.random import RandomState, Streams, threads_can_draw
from instep.sources import seed_of


class Draws:
    """Where a replica draws from, as the process that asks for a forward has said."""

    def __init__(self, run: Run, mirror: Mirror) -> None:
        self._run, self._mirror = run, mirror
        self._held = mirror.generators(run)
        self._lone = [generator.get_state() for generator in run.lone]
        if run.dice is not None:
            dice.seed(seed_of(run.dice, run.index))
        torch.default_generator.manual_seed(seed_of(run.seed, run.index))  # for whoever asks for it by name
        state = self._state = RandomState([mirror.device] * run.count, apart=True)
        state.host.fix(run.seed)
        if state.home is not state.host:
            state.home.fix(run.home_seed)
        self.streams = Streams(state, [self._held] * run.count, own=threads_can_draw(), in_turn=run.in_turn)

    def note(self, ran: Ran) -> None:
        """Say what was drawn from."""
        run, state = self._run, self._state
        ran.by_name = not run.in_turn and state.host.moved()
        self.streams.settle()
        ran.drawn_home = state.home is not state.host and state.home.drawn
        ran.drawn = state.host.drawn or ran.by_name
        if self._held:
            self._note_held(ran)
        if self._lone:
            pairs = enumerate(zip([generator.get_state() for generator in run.lone], self._lone, strict=True))
            ran.moved = {i: now for i, (now, then) in pairs if not now.equal(then)}

    def _note_held(self, ran: Ran) -> None:
        """Of the module's generators first, and then of those among the arguments."""
        drawn = [self._state.add(source).drawn for source, _ in self._held]
        split = len(drawn) - len(self._run.own)
        ran.drawn_own = [i for i, moved in enumerate(drawn[split:]) if moved]
        numbers = (self._mirror.generator_number(source) for source, _ in compress(self._held[:split], drawn))
        ran.drawn_held = [number for number in numbers if number is not None]
