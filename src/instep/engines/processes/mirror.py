"""The source module as a worker has it: around memory that it shares with the process that started it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from instep.batchnorm import Outfit
from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.orders import Entry, NewModule, Ran, Run, Table
from instep.engines.processes.talk import SOURCE, Tag, as_sent
from instep.errors import EngineError
from instep.modes import inference
from instep.random import Held
from instep.replicas.crew import Crew
from instep.replicas.replica import Outcome, Pair, Replica


class _Known:
    """What a replica has for each tensor of the table."""

    def __init__(self, pairs: Sequence[Pair], tensors: Sequence[Tensor]) -> None:
        self.pairs = pairs
        made = {id(source): made for source, made in pairs}
        self.counterparts = [made.get(id(source), source) for source in tensors]
        self.numbers = {id(tensor): n for both in (tensors, self.counterparts) for n, tensor in enumerate(both)}


class Mirror:
    """One module, its tensors by number, and the replica that is made of it."""

    module: nn.Module
    crew: Crew
    device: torch.device

    def __init__(self, table: Table, fds: Sequence[int]) -> None:
        pairs = zip(table.blocks, fds, strict=False)  # one more is for the gradients
        self._blocks = {number: SharedMemory.attach(fd, nbytes, writable=False) for (number, nbytes), fd in pairs}
        self._storages: dict[tuple[int, int], Tensor] = {}
        self.tensors = [self._rebuild(entry, table.sent) for entry in table.entries]
        self._slots: dict[int, Tensor] = {}
        self._replica: Replica | None = None
        self._last: _Known | None = None
        self.take_in(())
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
        dress = None if order.synchronised is None else Outfit(order.synchronised)
        self.crew = Crew(self.module, [self.device], dress=dress)
        if order.own:
            self.crew.ready()
            self.crew.part(order.own)

    def set(self, sets: Sequence[tuple[int, str, Any]]) -> None:
        """Set attributes of the module, which its replica then follows."""
        modules = self.crew.ready()[0].source_modules
        for index, name, value in sets:
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
        if replica is not self._replica:
            self._replica = replica
            places = {id(tensor): number for number, tensor in enumerate(self.tensors)}
            for source, leaf in replica.trainable:
                leaf.register_post_accumulate_grad_hook(partial(self._leave, places[id(source)]))
        replica.name = f"replica {run.index} on {self.device}"
        if run.lent:
            slots: Any = [SimpleNamespace(module=replica.source_modules[i], name=name) for i, name, _ in run.lent]
            replica.lend(slots, [part for _, _, part in run.lent])
        return replica

    def generators(self, run: Run) -> Held:
        """The generators that the module holds, each with what the replica has in its place, as they are now."""
        held = self.crew.replicas[0].cloner.generators
        if len(held) != len(run.generators):
            raise EngineError(
                "a torch.Generator that is an argument, or that the module was given after its first call, does not "
                "reach worker processes.\nWrite engine='threads'."
            )
        for (source, _), state in zip(held, run.generators, strict=True):
            source.set_state(state)
        return held

    def counterparts(self) -> list[Tensor]:
        """What the replica has for each tensor of the table."""
        return self._known().counterparts

    def numbers(self) -> dict[int, int]:
        """By the id of a tensor, of the module or of the replica: its number."""
        return self._known().numbers

    def _known(self) -> _Known:
        """What the replica has, made anew only when it has other tensors."""
        tensors = self.crew.replicas[0].tensors if self.crew.replicas else None
        pairs = [] if tensors is None else [*tensors.trainable, *tensors.state]
        if self._last is None or len(pairs) != len(self._last.pairs) or not all(map(is_, pairs, self._last.pairs)):
            self._last = _Known(pairs, self.tensors)
        return self._last

    def report(self, outcome: Outcome) -> Ran:
        """What `forward` changed on the replica, in terms that the other process knows; the replica is put back."""
        replica, crew = self.crew.replicas[0], self.crew
        numbers = self.numbers()
        ran = Ran()
        ran.sets = [(change.module, change.name, change.new, change.buffer) for change in outcome.changes.attributes]
        places = {id(made): crew.shelf.places.get(id(source)) for source, _, made in replica.cloner.containers}
        for inside in outcome.changes.contents:
            items = list(_by_place(inside.before.items, inside.after.items))
            ran.contents.append((str(places[id(inside.container)]), inside.after.keys, items))
        ran.written = {numbers[id(source)]: copy.detach().clone() for source, copy in outcome.written}
        ran.apart = {numbers[id(s)]: made.detach() for s, made in replica.trainable if id(s) in crew.apart}
        replica.revert(outcome.changes)
        return ran

    def take_in(self, wanted: Iterable[int]) -> None:
        """A backward begins: gradients of these tensors go to their slots as they come."""
        self._wanted = set(wanted)
        self._filled: set[int] = set()

    def _leave(self, number: int, leaf: Tensor) -> None:
        """Put a gradient into its slot as soon as it is there: it is in the cache, and its memory free for the next."""
        if number not in self._wanted or leaf.grad is None or not self._put(number, leaf.grad):
            return
        leaf.grad = None

    def _put(self, number: int, gradient: Tensor) -> bool:
        slot = self._slots.get(number)
        if slot is None or gradient.layout is not torch.strided or gradient.dtype != slot.dtype:
            return False
        if number in self._filled:  # a backward inside of the backward brought one before
            slot.add_(gradient)
        else:
            slot.copy_(gradient)
            self._filled.add(number)
        return True

    def hand_in(self, gradients: dict[int, Tensor | None]) -> tuple[list[int], dict[int, Tensor]]:
        """The backward is over, and left these; says whose gradients lie in slots, and returns those that have none."""
        left = {n: g for n, g in gradients.items() if g is not None and not self._put(n, g)}
        for number in left.keys() & self._filled:
            left[number] = self._slots[number] + left[number]
        filled = sorted(self._filled - left.keys())
        self.take_in(())
        return filled, left


def _by_place(before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Each item by its place before, in rising order as far as may be; -1 and the item itself for a new one."""
    places: dict[int, list[int]] = {}
    for number, item in enumerate(before):
        places.setdefault(id(item), []).append(number)
    last = -1
    for item in after:
        known = places.get(id(item), [])
        last = next((number for number in known if number > last), known[0] if known else last)
        yield (last, None) if known else (-1, item)


def slot_of(memory: SharedMemory, offset: int, tensor: Tensor) -> Tensor:
    """The place for one tensor's gradient, in the shape of the tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    flat: Tensor = memory.tensor(offset, nbytes).view(tensor.dtype)
    return flat.view(tensor.shape)
