"""The source module as a worker has it: around memory that it shares with the process that started it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from instep.batchnorm import Outfit
from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.bell import Bell, stretches
from instep.engines.processes.bulk import Piece, to_device, to_host
from instep.engines.processes.driver import DeviceMemory
from instep.engines.processes.group import Broken
from instep.engines.processes.hold import open_shared
from instep.engines.processes.orders import Entry, NewModule, NewValues, Ran, Run, Spot, Table
from instep.engines.processes.reducers import make_generator
from instep.engines.processes.talk import SOURCE, Tag, as_sent
from instep.modes import inference
from instep.random import Held
from instep.replicas.crew import Crew
from instep.replicas.equal import equal_tensors
from instep.replicas.handed import by_place
from instep.replicas.replica import Outcome, Pair, Replica
from instep.replicas.tensors import Tensors, have_gradients
from instep.structure.shapes import is_dense


class _Known:
    """What a replica has for each tensor of the table."""

    def __init__(self, pairs: Sequence[Pair], tensors: Sequence[Tensor]) -> None:
        self.pairs = pairs
        made = {id(source): made for source, made in pairs}
        self.counterparts = [made.get(id(source), source) for source in tensors]
        self.numbers = {id(tensor): n for both in (tensors, self.counterparts) for n, tensor in enumerate(both)}


LARGE = 64 * 1024
"""Gradients of so many bytes go to their slots as they come; smaller ones at the end, all at once."""
LOOKS = 3
"""The calls of a method in which writes are looked for that no version tells of."""


class _Unwatched(Tensors):
    """Tensors that no code reaches outside of a call; a hook on each would cost every backward."""

    guarded = False

    def may_have_gradients(self) -> bool:
        return have_gradients(leaf for _, leaf in self.trainable)


class _Lone(Replica):
    """A replica in a process where nothing is done but what it is asked for."""

    kind_of_tensors = _Unwatched


class Mirror:
    """One module, its tensors by number, and the replica that is made of it."""

    module: nn.Module
    crew: Crew

    def __init__(self, table: Table, fds: Sequence[int]) -> None:
        self.device = table.device
        pulled = {entry.spot.block for entry in table.entries if entry.spot is not None and entry.spot.pull}
        self._blocks: dict[int, SharedMemory] = {}
        self._opened = {n: open_shared(handle, nbytes, self.device) for n, nbytes, handle in table.handles}
        for (number, nbytes), fd in zip(table.blocks, fds, strict=False):  # the others are for the gradients
            # What is only copied from need not be copied on write, which accelerators do not take well.
            self._blocks[number] = SharedMemory.attach(fd, nbytes, writable=number in pulled)
        self._storages: dict[tuple[int, int], Tensor] = {}
        self._looks: dict[str, int] = {}
        """By the name of a method: in how many calls nothing was written to an argument unseen."""
        self._pulls: dict[int, list[Piece]] = {}
        """By the number of a block: what is copied from it, and to where."""
        self.tensors = [self._rebuild(entry, table.sent) for entry in table.entries]
        self._slots: dict[int, Tensor] = {}
        self._replica: Replica | None = None
        self.ticket = 0
        """What brought the last values of what is copied from common memory; 0 if nothing else did."""
        self._last: _Known | None = None
        self._bell: Bell | None = None
        nbytes, offsets = table.slots
        self._memory: SharedMemory | DeviceMemory
        if table.slots_handle is None:
            self._memory = SharedMemory.attach(fds[-1], nbytes, writable=True)
        else:
            self._memory = open_shared(table.slots_handle, nbytes, self.device)
        self._offsets = dict(offsets)
        for number, offset in offsets:
            self._slots[number] = slot_of(self._memory, offset, self.tensors[number])
        self._stretches: dict[int, list[tuple[int, Tensor]]] = {}
        """By the number of a tensor: the parts of its slot that are rung for, each with its place among all."""
        if table.bell:
            assert isinstance(self._memory, SharedMemory)
            cut = stretches((number, self.tensors[number]) for number, _ in offsets)
            self._bell = Bell(fds[-2], self._memory, cut)
            for place, (number, start, stop) in enumerate(cut):
                part = self._slots[number].view(-1)[start:stop]
                self._stretches.setdefault(number, []).append((place, part))
        self.take_in(())

    @property
    def opened(self) -> set[int]:
        """The numbers of the blocks of another process's device memory that it has opened."""
        return set(self._opened)

    def _rebuild(self, entry: Entry, sent: Sequence[Tensor]) -> Tensor:
        if entry.spot is None:
            assert entry.value is not None
            data = entry.value.detach()
            data = data.to(self.device) if entry.near else data
        else:
            spot = entry.spot
            key = spot.block, spot.offset
            if key not in self._storages:
                self._storages[key] = self._storage(spot, sent, entry.near)
            storage = self._storages[key].untyped_storage()
            data = torch.empty(0, dtype=spot.dtype, device=self._storages[key].device)
            data.set_(storage, spot.start, spot.size, spot.stride)
        if issubclass(entry.kind, nn.Parameter):
            data = torch.Tensor._make_subclass(entry.kind, data, entry.requires_grad)
        made: Tensor = data.requires_grad_(entry.requires_grad)
        made.__dict__.update(entry.attributes)
        return made

    def _storage(self, spot: Spot, sent: Sequence[Tensor], near: bool) -> Tensor:
        block = self._opened.get(spot.block) or self._blocks.get(spot.block)
        if block is None:
            return sent[spot.offset].to(self.device) if near else sent[spot.offset]
        if not spot.pull:
            return block.tensor(spot.offset, spot.nbytes)
        own = torch.empty(spot.nbytes, dtype=torch.uint8, device=self.device)
        self._pulls.setdefault(spot.block, []).append(Piece(spot.offset, own))
        return own

    def known(self, tag: Tag, tensor: Tensor | None) -> Tensor:
        """A tensor of a message that may be one of the table."""
        return self.tensors[tag[1]] if tag[0] == SOURCE else as_sent(tag, tensor)

    def settle(self, order: NewModule) -> None:
        """Make the replica of a module."""
        self.module, self._generators = order.module, order.generators
        dress = None if order.synchronised is None else Outfit(order.synchronised)
        self._pull()
        self.crew = Crew(self.module, [self.device], dress=dress, kinds=[_Lone], home=order.home)
        if order.own:
            self.crew.ready()
            self.crew.part(order.own)

    def set(self, news: NewValues) -> None:
        """Set attributes of the module, which its replica then follows."""
        self._generators += news.generators
        modules = self.crew.ready()[0].source_modules
        for (index, name), value in zip(news.places, news.values.values(), strict=True):
            modules[index].__dict__[name] = value

    def _pull(self) -> None:
        """Copy what lies in common memory to the device."""
        for number, pieces in self._pulls.items():
            to_device(self._blocks[number], pieces)

    def pieces(self) -> list[Piece]:
        """What is copied from common memory, to which it can come otherwise."""
        return [piece for pieces in self._pulls.values() for piece in pieces]

    def _part_from_source(self, numbers: Iterable[int]) -> None:
        """Give tensors whose values this process is told memory of its own, where theirs is the source's itself.

        Memory of an accelerator that was opened is not copied on write.
        """
        for number in numbers:
            address = self.tensors[number].untyped_storage().data_ptr() if is_dense(self.tensors[number]) else 0
            if not any(storage.data_ptr() == address for storage in self._source_storages()):
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=self.device)
            own = whole.set_(self.tensors[number].untyped_storage()).clone().untyped_storage()
            for tensor in filter(is_dense, self.tensors):
                if tensor.untyped_storage().data_ptr() == address:
                    view = torch.empty(0, dtype=tensor.dtype, device=self.device)
                    tensor.data = view.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _source_storages(self) -> Iterator[Tensor]:
        return (storage for (block, _), storage in self._storages.items() if block in self._opened)

    def ready(self, run: Run) -> Replica:
        """The replica, with everything that has changed since."""
        if run.ticket != 0 and run.ticket != self.ticket:
            raise Broken("the values of the module's tensors did not arrive")
        if run.follow and not run.ticket:
            self._pull()
        if run.fresh:
            self.crew.look_again()
            self._renew(run.fresh)
        replica = self.crew.ready()[0]
        if replica is not self._replica:
            self._replica = replica
            places = {id(tensor): number for number, tensor in enumerate(self.tensors)}
            for source, leaf in replica.trainable:
                if is_dense(source) and source.nbytes >= LARGE:
                    # Python's collector does not see what such a hook holds: held by it, nothing here would ever go.
                    leaf.register_post_accumulate_grad_hook(partial(_leave, weakref.ref(self), places[id(source)]))
        replica.name = f"replica {run.index} on {self.device}"
        if run.lent:
            slots: Any = [SimpleNamespace(module=replica.source_modules[i], name=name) for i, name, _ in run.lent]
            replica.lend(slots, [part for _, _, part in run.lent])
        return replica

    def _renew(self, fresh: Mapping[int, Tensor]) -> None:
        """Take the values that were sent."""
        with torch.no_grad(), inference(False):
            self._part_from_source(fresh)
            for number, value in fresh.items():
                tensor = self.tensors[number]
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.to(tensor.device)

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
        ran = Ran()
        if outcome.written or crew.apart:
            numbers = self.numbers()
            ran.written = {numbers[id(source)]: copy.detach().clone() for source, copy in outcome.written}
            ran.apart = {numbers[id(s)]: made.detach() for s, made in replica.trainable if id(s) in crew.apart}
        if not outcome.changes:
            return ran
        ran.sets = [(change.module, change.name, change.new, change.buffer) for change in outcome.changes.attributes]
        places = {id(made): crew.shelf.places.get(id(source)) for source, _, made in replica.cloner.containers}
        for inside in outcome.changes.contents:
            items = list(by_place(inside.container, inside.before.items, inside.after.items))
            ran.contents.append((str(places[id(inside.container)]), inside.after.keys, items))
        replica.revert(outcome.changes)
        return ran

    def take_in(self, wanted: Iterable[int]) -> None:
        """A backward begins: gradients of these tensors go to their slots as they come."""
        self._wanted = set(wanted)
        self._filled: set[int] = set()
        if self._bell is not None:
            self._bell.begin()

    def leave(self, number: int, leaf: Tensor) -> None:
        """Put a gradient into its slot as soon as it is there: it is in the cache, and its memory free for the next."""
        gradient = leaf.grad
        if gradient is not None and number in self._wanted and self._put(number, gradient):
            leaf.grad = None

    def _put(self, number: int, gradient: Tensor) -> bool:
        if not self._is_for(number, gradient):
            return False
        slot = self._slots[number]
        if number not in self._filled:
            if number in self._stretches:
                self._put_and_ring(number, gradient)
            else:
                slot.copy_(gradient)
            self._filled.add(number)
        elif number in self._stretches:  # a backward inside of the backward brought one before, and it may be read
            return False
        else:
            slot.add_(gradient)
        return True

    def _put_small(self, gradients: dict[int, Tensor]) -> Collection[int]:
        """Put the small ones into their slots, all at once; says which those were."""
        small = {
            number
            for number, gradient in gradients.items()
            if number not in self._filled and self._is_for(number, gradient) and gradient.nbytes < LARGE
        }
        if small:
            torch._foreach_copy_([self._slots[n] for n in small], [gradients[n] for n in small])
            self._filled.update(small)
        return small

    def _is_for(self, number: int, gradient: Tensor) -> bool:
        return self.fits(number, gradient) and self._slots[number].device == gradient.device

    def _put_and_ring(self, number: int, gradient: Tensor) -> None:
        """The other process adds up the first stretches while the next ones are copied."""
        assert self._bell is not None
        flat = gradient.reshape(-1)
        start = 0
        for place, part in self._stretches[number]:
            stop = start + part.numel()
            part.copy_(flat[start:stop])
            self._bell.ring(place)
            start = stop

    def fits(self, number: int, gradient: Tensor) -> bool:
        """Whether a gradient is such as its tensor's slot is made for."""
        slot = self._slots.get(number)
        return slot is not None and gradient.layout is torch.strided and gradient.dtype == slot.dtype

    def hand_in(self, gradients: dict[int, Tensor | None]) -> tuple[list[int], dict[int, Tensor]]:
        """The backward is over, and left these; says whose gradients lie in slots, and returns the others.

        Those are sparse, or they came after a gradient of the same tensor that was rung for.
        """
        here = {n: g for n, g in gradients.items() if g is not None}
        put = self._put_small(here)
        left = {n: g for n, g in here.items() if n not in put and not self._put(n, g)}
        if not left:
            filled = sorted(self._filled)
            self.take_in(())
            return filled, left
        far = [n for n, gradient in left.items() if n not in self._filled and self.fits(n, gradient)]
        if far:  # the slots are on the host
            assert isinstance(self._memory, SharedMemory)
            to_host(self._memory, [Piece(self._offsets[number], left.pop(number)) for number in far])
            self._filled.update(far)
        both = {number for number in left.keys() & self._filled if number not in self._stretches}
        for number in both:
            left[number] = self._slots[number] + left[number]
        filled = sorted(self._filled - both)
        self.take_in(())
        return filled, left


def _leave(mirror: weakref.ref[Mirror], number: int, leaf: Tensor) -> None:
    there = mirror()
    if there is not None:
        there.leave(number, leaf)


def slot_of(memory: SharedMemory | DeviceMemory, offset: int, tensor: Tensor) -> Tensor:
    """The place for one tensor's gradient, in the shape of the tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    flat: Tensor = memory.tensor(offset, nbytes).view(tensor.dtype)
    return flat.view(tensor.shape)
