"""The replicas of one source module, made together and kept abreast of it together."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instep.devices import home_of
from instep.errors import StateError, WrapError
from instep.reduce import send
from instep.replicas.carry import Slot
from instep.replicas.clone import holds_source
from instep.replicas.equal import equal_tensors
from instep.replicas.kind import Kinds
from instep.replicas.memory import Lay, Writes
from instep.replicas.names import module_names, trainable_written
from instep.replicas.renorm import is_used_elsewhere, renormed_weights, rewritten
from instep.replicas.replica import Dress, Outcome, Replica
from instep.replicas.shelf import Shelf
from instep.replicas.tensors import Way
from instep.replicas.watch import STRUCTURE, Changes, Watch


class Crew:
    """One replica a device. `ready` makes them when they are first needed and follows the source at every call."""

    def __init__(
        self,
        source: nn.Module,
        devices: Sequence[torch.device],
        *,
        private: bool = False,
        joint: bool = False,
        dress: Dress | None = None,
        settle_in: Callable[[Iterable[Tensor]], None] | None = None,
        kinds: Sequence[type[Replica]] = (),
        home: torch.device | None = None,
    ) -> None:
        """`home` is the device that the source remembers, if that is another than the first one."""
        self.source = source
        self._settle_in = settle_in
        """Moves the source's tensors to where its replicas can reach them."""
        self._classes = kinds or [Replica] * len(devices)
        self.devices = list(devices)
        self.home = home or self.devices[0]
        near = [d == self.devices[0] or kind.stands_in for d, kind in zip(self.devices, self._classes, strict=True)]
        self.ways = [_way(is_near and not private, joint) for is_near in near]
        self.dress = dress
        self._near = list(self.ways)
        self.frozen = False
        """Whether values are taken as unchanged: nothing is sent or compared."""
        self.changed = False
        """Whether the last call changed state of the module."""
        self.replicas: list[Replica] = []
        self.shelf: Shelf
        """The containers of the source, and which of them replicas share."""
        self._apart: dict[int, Tensor] = {}
        """By their ids, trainable weights that `forward` itself rewrites: each replica has its own."""
        self._tied = False
        self._told = False
        self._own: dict[int, Any] = {}
        """By their ids, containers that each replica has for itself, because `forward` changes them."""
        self.overwritten: list[Tensor] = []
        """Of the tensors that were last found written, those that hold now what `forward` wrote."""
        self.asked: list[Any] = []
        """Iterators of the source that a replica wanted something of."""
        self.made = 0
        """How many times the modules of the source were taken stock of."""
        self._running = False
        self.kinds = Kinds()
        self._edited = False
        """Whether something inside an object that the source holds was changed since the last call."""
        self._watch: Watch | None = None
        self._ahead: Changes | None = None
        """What was found by looking ahead of a call."""
        self._calls = 0
        """How many calls were looked at for writes to trainable tensors."""
        self._values: list[tuple[Tensor, Tensor]] = []
        """Those of the source, with what they held before this call; only now and then."""

    def ready(self) -> list[Replica]:
        """The replicas, with everything that changed on the source since the last call."""
        changes, self._ahead = self.changes() if self._ahead is None else self._ahead, None
        if changes.structure:
            self._make()
        elif changes:
            self._apply(changes)
        if changes or self._edited:
            self.kinds.look(self.replicas[0].source_modules, self._edited)
            if self._edited:
                for replica in self.replicas:
                    replica.edited()
            self._edited = False
        self._renew_links()
        if not self.frozen:
            self._send()
        self._values = self._keep_values()
        self._writes.begin()
        self._running = True
        return self.replicas

    def _keep_values(self) -> list[tuple[Tensor, Tensor]]:
        """What weights hold before the first call, and on the CPU before ever fewer of the later ones.

        A tensor that an earlier call left on the module is none: what becomes of it is state.
        """
        number = self._calls + 1
        often = number == 1 or self.devices[0].type == "cpu"
        if not often or number & self._calls or self.ways[0] not in (Way.ALIAS, Way.SHARE):
            return []
        return [(source, source.detach().clone()) for source, _ in self.replicas[0].trainable if source.is_leaf]

    def is_tied(self) -> bool:
        """Whether a weight that `forward` rewrites is used elsewhere too: only the module itself can run."""
        if self._tied and not self._told:
            self._told = True
            warnings.warn(
                "a weight that keeps below a norm is used elsewhere too, or may be (Embedding(max_norm=...)): calls "
                "run on one device, where every use sees the rows that the whole batch has changed.",
                stacklevel=6,
            )
        return self._tied

    def name_of(self, held: Any) -> str:
        """What an attribute of a module is called that holds this; its type, if it is deeper inside."""
        modules = [module for module in self.source.modules() if any(v is held for v in module.__dict__.values())]
        if not modules:
            return type(held).__name__
        prefix = module_names(self.source, modules[:1])[0]
        name = next(key for key, value in modules[0].__dict__.items() if value is held)
        return f"{prefix}.{name}" if prefix else name

    def holds(self, iterators: Sequence[Any]) -> bool:
        """Whether the source holds one of these."""
        return any(self.replicas[0].cloner.has_own(iterator) for iterator in iterators)

    def part(self, places: Sequence[str] = ()) -> bool:
        """Whether `forward` changed containers that replicas share, here or, at these places, elsewhere.

        Then they are put back, and from now on each replica has its own.
        """
        changed = {id(container): container for container in (*self.restore(), *self.shelf.at(places))}.values()
        if not changed:
            return False
        for container in changed:
            if id(container) in self._own:
                raise StateError(
                    f"forward changes {str(self.shelf.places[id(container)])!r}, which every replica would do once "
                    f"more, and of which no copy can be made for each.\nChange it outside forward."
                )
            self._own[id(container)] = container
        self.discard()
        return True

    def restore(self) -> list[Any]:
        """Put back what `forward` changed in containers that replicas share, and say which those were."""
        found = self.shelf.restore() if self._running else []
        self._running = False  # not before: an interrupted one is called again
        return found

    def putting_back(self) -> Callable[[], object]:
        """What puts the containers of this call back, if its replicas go on after it has failed."""
        return self.shelf.restore if self._running else lambda: None

    def settled(self, outcomes: Sequence[Outcome]) -> None:
        """What these calls of `forward` have set is state, and no setting of the module's."""
        modules = self.replicas[0].source_modules
        changes = [change for outcome in outcomes for change in outcome.changes.attributes]
        if changes:
            self.kinds.are_state([(modules[change.module], change.name) for change in changes], modules)

    def done(self) -> None:
        """The call is over: what changes from now on is the user's doing."""
        self._running = False

    def look_ahead(self) -> None:
        """Look for changes now: `ready` does not have to, if it is known by then that there were no more."""
        self._ahead = self.changes()

    def look_again(self) -> None:
        """What was found by looking ahead may no longer be all."""
        self._ahead = None

    def changes(self) -> Changes:
        """What changed on the source since the last call, apart from values."""
        if self._watch is None or not self._lay.holds():
            return STRUCTURE
        moved = self.shelf.changed()
        if moved:
            self._edited = self._edited or any(id(container) not in self._own for container in moved)
            if any(holds_source(container, self._own) for container in moved):
                return STRUCTURE
            self._stock_shelf()
        return self._watch.look()

    def since(self) -> Changes | None:
        """The same; None where nobody has watched, after a failure or when the replicas were given up."""
        return None if self._watch is None else self.changes()

    @property
    def apart(self) -> Mapping[int, Tensor]:
        """By their ids, trainable weights that `forward` itself rewrites: each replica has its own."""
        return self._apart

    @property
    def behind(self) -> bool:
        """Whether replicas have to look at the source's buffers and other state before they run."""
        return self.changed or not self.frozen

    def written(self) -> list[Tensor]:
        """Trainable tensors of the source that `forward` wrote to since the replicas were last ready.

        Writes through `.data` move no version counter, so the first call of all, and on the CPU those numbered 2, 4, 8
        and so on, are checked by value, and undone.
        """
        self.overwritten = []
        self._calls += 1
        before, self._values = self._values, []
        if before:
            changed = [pair for pair in before if not equal_tensors(*pair)]
            with torch.no_grad():
                for source, value in changed:
                    source.data.copy_(value)
            if changed:
                return [source for source, _ in changed]
        found = self._writes.found()
        self.overwritten = [source for source, held in found if held.data_ptr() == source.data_ptr()]
        return [source for source, _ in found]

    def discard(self) -> None:
        """Make the replicas anew at the next call: after a failure nobody knows what they hold."""
        self._watch = self._ahead = None
        self.replicas = []

    def _apply(self, changes: Changes) -> None:
        """Set on every replica what was set on the source; modules that are new need a new crew."""
        before = len(self.replicas[0].cloner.modules)
        for replica in self.replicas:
            replica.apply(changes)
        same = len(self.replicas[0].cloner.modules) == before
        if same and renormed_weights(self.source.modules()).keys() == self._apart.keys():
            self._take_stock()
        else:
            self._make()

    def _make(self) -> None:
        home, now = self.devices[0], home_of(self.source)
        if now not in (None, home):
            raise WrapError(
                f"the module was moved to {now} after it was wrapped for {home}.\n"
                f"Wrap it anew: instep.DataParallel(model, device_ids=[...])."
            )
        _refuse_sparse(self.source)
        if self._settle_in is not None:
            self._settle_in([*self.source.parameters(), *self.source.buffers()])
        self._apart = renormed_weights(self.source.modules())
        self.ways = [Way.LINK if self._apart and way is Way.SHARE else way for way in self._near]
        places = zip(self.devices, self.ways, strict=True)
        self.replicas = [self._replica(index, *place) for index, place in enumerate(places)]
        self._take_stock()

    @property
    def modules(self) -> list[nn.Module] | None:
        """The modules of the source, registered or not; None before they are known."""
        return self.replicas[0].source_modules if self.replicas else None

    def _take_stock(self) -> None:
        self.made += 1
        self._tied = bool(self._apart) and is_used_elsewhere(self.replicas[0].source_modules, self._apart)
        first = self.replicas[0]
        containers = [(value, items) for value, items, _ in first.cloner.containers]
        trainable, state = ([source for source, _ in pairs] for pairs in (first.trainable, first.tensors.state))
        joint = Way.SHARE in self.ways  # replicas that hold the source's own tensors follow wherever these move
        self._watch = Watch(first.source_modules, containers, [*trainable, *state] if joint else state)
        self._lay = Lay([] if joint else trainable)
        self._stock_shelf()
        self._note_writes()

    def _stock_shelf(self) -> None:
        first = self.replicas[0]
        modules = first.source_modules
        self.shelf = Shelf(modules, module_names(self.source, modules), first.cloner)
        owned = [str(self.shelf.places[key]) for key in self._own if key in self.shelf.places]
        for replica in self.replicas:
            replica.owned, replica.places, replica.look = owned, self.shelf.places, weakref.WeakMethod(self.since)

    def _note_writes(self) -> None:
        pairs = [pair for replica in self.replicas for pair in replica.trainable]
        self._writes = Writes([(source, held) for source, held in pairs if id(source) not in self._apart])

    def _replica(self, index: int, device: torch.device, way: Way) -> Replica:
        shared: dict[str, Any] = {"own": self._own, "apart": self._apart, "asked": self.asked}
        return self._classes[index](index, self.source, device, way, home=self.home, dress=self.dress, **shared)

    def _renew_links(self) -> None:
        """Replicas that are linked to the source's graph are made anew: their tensors belong to one call."""
        for index, way in enumerate(self.ways):
            if way is Way.LINK:
                self.replicas[index] = self._replica(index, self.devices[index], way)
        if Way.LINK in self.ways:
            self._note_writes()

    def _send(self) -> None:
        """Parameters to the replicas that have memory of their own."""
        far = [replica for replica, way in zip(self.replicas, self.ways, strict=True) if way is Way.PRIVATE]
        if far:
            sources = [source for source, _ in far[0].trainable]
            send(sources, [[leaf for _, leaf in replica.trainable] for replica in far])
        if self._apart:
            near = [replica for replica, way in zip(self.replicas, self.ways, strict=True) if way is Way.ALIAS]
            apart = [[pair for pair in replica.trainable if id(pair[0]) in self._apart] for replica in near]
            for pairs in apart:
                send([source for source, _ in pairs], [[leaf for _, leaf in pairs]])

    def rewritten(self, active: int) -> list[tuple[Tensor, Tensor]]:
        """Weights that `forward` itself rewrote rows of, each with its new values."""
        found = []
        for key, weight in self._apart.items():
            copies = [held for replica in self.replicas[:active] for s, held in replica.trainable if id(s) == key]
            try:
                values = rewritten(weight, copies)
            except ValueError:
                raise trainable_written(self.source, [weight]) from None
            if values is not None:
                found.append((weight, values))
        return found

    def release(self, slots: Sequence[Slot], active: int) -> None:
        """Let replicas that have no part in a call forget carried state that the others get parts of."""
        for replica in self.replicas[active:]:
            replica.lend(slots, None)


def _way(near: bool, joint: bool) -> Way:
    if joint:
        return Way.SHARE if near else Way.LINK
    return Way.ALIAS if near else Way.PRIVATE


def _refuse_sparse(source: nn.Module) -> None:
    """`WrapError` for a weight that is sparse itself; gradients may be."""
    for name, parameter in source.named_parameters():
        if parameter.requires_grad and parameter.layout is not torch.strided:
            raise WrapError(
                f"the parameter {name!r} is a {parameter.layout} tensor, which gets new memory whenever it changes: "
                f"replicas would lose sight of it.\n"
                f"Keep its values as a dense parameter, and make it sparse in forward."
            )
