"""The source module as a worker has it: around memory that it shares with the process that started it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from instep.batchnorm import Outfit
from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.orders import Entry, NewModule, NewValues, Ran, Run, Table
from instep.engines.processes.reducers import make_generator
from instep.engines.processes.talk import SOURCE, Tag, as_sent
from instep.modes import inference
from instep.random import Held
from instep.replicas.crew import Crew
from instep.replicas.equal import equal_tensors
from instep.replicas.handed import by_place
from instep.replicas.replica import Outcome, Replica

LOOKS = 3
"""The calls of a method in which writes are looked for that no version tells of."""


class Mirror:
    """One module, its tensors by number, and the replica that is made of it."""

    module: nn.Module
    crew: Crew
    device: torch.device

    def __init__(self, table: Table, fds: Sequence[int]) -> None:
        pairs = zip(table.blocks, fds, strict=False)  # one more is for the gradients
        self._blocks = {number: SharedMemory.attach(fd, nbytes, writable=False) for (number, nbytes), fd in pairs}
        self._storages: dict[tuple[int, int], Tensor] = {}
        self._looks: dict[str, int] = {}
        """By the name of a method: in how many calls nothing was written to an argument unseen."""
        self.tensors = [self._rebuild(entry, table.sent) for entry in table.entries]
        self._slots: dict[int, Tensor] = {}
        nbytes, offsets = table.slots
        memory = SharedMemory.attach(fds[-1], nbytes, writable=True)
        for number, offset in offsets:
            self._slots[number] = slot_of(memory, offset, self.tensors[number])

    def _rebuild(self, entry: Entry, sent: Sequence[Tensor]) -> Tensor:
        if entry.spot is None:
            assert entry.value is not None
            data = entry.value.detach()
        else:
            spot = entry.spot
            key = spot.block, spot.offset
            if key not in self._storages:
                block = self._blocks.get(spot.block)
                self._storages[key] = sent[spot.offset] if block is None else block.tensor(spot.offset, spot.nbytes)
            storage = self._storages[key].untyped_storage()
            data = torch.empty(0, dtype=spot.dtype).set_(storage, spot.start, spot.size, spot.stride)
        if issubclass(entry.kind, nn.Parameter):
            data = torch.Tensor._make_subclass(entry.kind, data, entry.requires_grad)
        made: Tensor = data.requires_grad_(entry.requires_grad)
        made.__dict__.update(entry.attributes)
        return made

    def known(self, tag: Tag, tensor: Tensor | None) -> Tensor:
        """A tensor of a message that may be one of the table."""
        return self.tensors[tag[1]] if tag[0] == SOURCE else as_sent(tag, tensor)

    def settle(self, order: NewModule) -> None:
        """Make the replica of a module."""
        self.module, self.device = order.module, order.device
        self._generators = order.generators
        dress = None if order.synchronised is None else Outfit(order.synchronised)
        self.crew = Crew(self.module, [self.device], dress=dress)
        if order.own:
            self.crew.ready()
            self.crew.part(order.own)

    def set(self, news: NewValues) -> None:
        """Set attributes of the module, which its replica then follows."""
        self._generators += news.generators
        modules = self.crew.ready()[0].source_modules
        for index, name, value in news.sets:
            modules[index].__dict__[name] = value

    def ready(self, run: Run) -> Replica:
        """The replica, with everything that has changed since."""
        with torch.no_grad(), inference(False):
            for number, value in run.fresh.items():
                tensor = self.tensors[number]
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value
        replica = self.crew.ready()[0]
        replica.name = f"replica {run.index} on {self.device}"
        if run.lent:
            slots: Any = [SimpleNamespace(module=replica.source_modules[i], name=name) for i, name, _ in run.lent]
            replica.lend(slots, [part for _, _, part in run.lent])
        return replica

    def note_arguments(self, method: str, tensors: Sequence[Tensor]) -> Callable[[], dict[int, Tensor]]:
        """What says, when the call is over, which arguments were written to: their values now, by their numbers.

        Writes through `.data` move no version. They are looked for in the first calls of a method, and as long as there
        are any.
        """
        versions = [tensor._version for tensor in tensors]
        before = [tensor.detach().clone() for tensor in tensors] if self._looks.get(method, 0) < LOOKS else None

        def written() -> dict[int, Tensor]:
            moved = {
                i: t.detach() for i, (t, then) in enumerate(zip(tensors, versions, strict=True)) if t._version != then
            }
            if before is not None:
                pairs = enumerate(zip(tensors, before, strict=True))
                hidden = {i: t.detach() for i, (t, then) in pairs if i not in moved and not equal_tensors(t, then)}
                self._looks[method] = 0 if hidden else self._looks.get(method, 0) + 1
                moved |= hidden
            return moved

        return written

    def generators(self, run: Run) -> Held:
        """The caller's generators as they are now, each with what the replica has in its place.

        First those that the module holds, then those among the arguments that several replicas were given.
        """
        for number, state in run.generators.items():
            self._generators[number].set_state(state)
        given = [(make_generator(str(generator.device), state), generator) for state, generator in run.own]
        return [*self.crew.replicas[0].cloner.generators, *given]

    def generator_number(self, source: torch.Generator) -> int | None:
        """The number of a generator of the module."""
        return next((number for number, known in enumerate(self._generators) if known is source), None)

    def counterparts(self) -> list[Tensor]:
        """What the replica has for each tensor of the table."""
        if not self.crew.replicas:
            return self.tensors
        tensors = self.crew.replicas[0].tensors
        made = {id(source): made for source, made in (*tensors.trainable, *tensors.state)}
        return [made.get(id(source), source) for source in self.tensors]

    def numbers(self) -> dict[int, int]:
        """By the id of a tensor, of the module or of the replica: its number."""
        both = (*enumerate(self.tensors), *enumerate(self.counterparts()))
        return {id(tensor): number for number, tensor in both}

    def report(self, outcome: Outcome) -> Ran:
        """What `forward` changed on the replica, in terms that the other process knows; the replica is put back."""
        replica, crew = self.crew.replicas[0], self.crew
        numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        ran = Ran()
        ran.sets = [(change.module, change.name, change.new, change.buffer) for change in outcome.changes.attributes]
        places = {id(made): crew.shelf.places.get(id(source)) for source, _, made in replica.cloner.containers}
        for inside in outcome.changes.contents:
            items = list(by_place(inside.container, inside.before.items, inside.after.items))
            ran.contents.append((str(places[id(inside.container)]), inside.after.keys, items))
        ran.written = {numbers[id(source)]: copy.detach().clone() for source, copy in outcome.written}
        ran.apart = {numbers[id(s)]: made.detach() for s, made in replica.trainable if id(s) in crew.apart}
        replica.revert(outcome.changes)
        return ran

    def hand_in(self, gradients: dict[int, Tensor | None]) -> tuple[list[int], dict[int, Tensor]]:
        """Put gradients into their slots; says whose lie there, and returns those that have no slot."""
        filled: list[int] = []
        others: dict[int, Tensor] = {}
        for number, gradient in gradients.items():
            if gradient is None:
                continue
            slot = self._slots.get(number)
            if slot is None or gradient.layout is not torch.strided or gradient.dtype != slot.dtype:
                others[number] = gradient
            else:
                slot.copy_(gradient)
                filled.append(number)
        return filled, others


def slot_of(memory: SharedMemory, offset: int, tensor: Tensor) -> Tensor:
    """The place for one tensor's gradient, in the shape of the tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    flat: Tensor = memory.tensor(offset, nbytes).view(tensor.dtype)
    return flat.view(tensor.shape)
