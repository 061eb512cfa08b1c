"""This process's stand-in for a replica that lives in a worker.

It is made like any replica, around the source's own memory, so that rules, messages and gradients find what they look
for; what the worker did is set on it when its answer comes. It also notes what the worker has not been told yet.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.driver import DeviceMemory
from instep.locks import ProcessLock
from instep.modes import inference
from instep.replicas.carry import Slot
from instep.replicas.clone import holds_source
from instep.replicas.opaque import is_opaque
from instep.replicas.replica import Pair, Replica
from instep.replicas.tensors import Tensors, Way, leaf_like
from instep.replicas.watch import Changes, Set

_numbers = itertools.count(1)

_outstanding: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_lock = ProcessLock()


def keep(root: nn.Module, call: Any) -> None:
    """Let a call whose gradient may still be asked for hear of changes of its module."""
    with _lock:
        _outstanding.setdefault(root, weakref.WeakSet()).add(call)


def outstanding(root: nn.Module) -> list[Any]:
    """The calls of a module whose gradient may still be asked for."""
    with _lock:
        return list(_outstanding.get(root, ()))


class Views(Tensors):
    """The tensors of a stand-in: state is the source's own memory, until a worker says what it wrote there."""

    def copy(self, source: Tensor) -> Tensor:
        with inference(False), torch.no_grad():
            data = source.detach()
            if isinstance(source, nn.Parameter):
                return leaf_like(source, data)
            data.__dict__ = source.__dict__
            return data


class Shadow(Replica):
    """A replica of another process, as this one sees it."""

    kind_of_tensors = Views
    stands_in = True

    def __init__(
        self, index: int, source: nn.Module, device: torch.device, way: Way, *, home: torch.device, **kwargs: Any
    ) -> None:
        self.place = device
        """The worker's device."""
        self.home = home
        """The source's."""
        self.fetched = False
        """Whether the worker brings the arguments of the next call to its device by itself."""
        self.number = next(_numbers)
        """What the worker knows it by."""
        self.stale = True
        """Whether the worker has to be told the whole module."""
        self.behind = False
        """Whether the worker has to look at values again, even where nobody says that they changed."""
        self.sets: list[Set] = []
        """Attributes that the worker has to be told, if nothing else."""
        dress: Any = kwargs.get("dress")
        self.synchronised: bool | None = None if dress is None else dress.synchronised
        """Whether batch normalisation looks at the whole batch."""
        self.told: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """What the worker at each desk was told of the module."""
        self.slots: SharedMemory | DeviceMemory | None = None
        """Where the worker leaves gradients."""
        self.recipe = partial(type(self), index, source, device, way, home=home, **kwargs)
        """Makes another one."""
        self.lent: list[tuple[int, str, Any]] = []
        """Parts of carried state for the next call: the module's index, the attribute, and the part."""
        self._written: list[Pair] = []
        # Arguments for another accelerator are put where the source is, from where the worker gets them.
        near = home if home.type != "cpu" and device.type != "cpu" else device
        super().__init__(index, source, near, way, home=home, **kwargs)
        self.name = f"replica {index} on {device}"
        self.near = device == home and device.type != "cpu" and way is Way.ALIAS
        """Whether tensors may stay on a device that both processes work on."""

    def takes_from_host(self, chosen: bool) -> bool:
        self.fetched = not chosen and self.place != self.home and self.place.type != "cpu"
        return self.fetched

    def write(self, values: Mapping[int, Tensor]) -> list[Pair]:
        """Take what the worker wrote to state, by the ids of the source's tensors, until `unwrite`."""
        for source, view in self.tensors.state:
            value = values.get(id(source))
            if value is not None:
                view.data = value.to(view.device)
                self._written.append((source, view))
        return list(self._written)

    def unwrite(self) -> None:
        """See the source's own memory again."""
        for source, view in self._written:
            view.data = source.detach()
        self._written = []

    def apply(self, changes: Changes) -> None:
        super().apply(changes)
        for call in outstanding(self.source_modules[0]):
            call.remember(changes)
        plain = all(is_opaque(c.new) or not holds_source(c.new) for c in changes.attributes)
        if changes.contents or not plain or any(change.buffer for change in changes.attributes):
            self.stale = True
        else:
            self.sets += changes.attributes

    def follow_state(self) -> None:
        self.behind = True

    def edited(self) -> None:
        self.stale = True

    def lend(self, slots: Sequence[Slot], parts: Sequence[Any] | None) -> None:
        super().lend(slots, parts)
        places = {id(module): index for index, module in enumerate(self.source_modules)}
        self.lent = []
        if parts is not None:
            self.lent = [(places[id(slot.module)], slot.name, part) for slot, part in zip(slots, parts, strict=True)]
        elif slots:
            self.stale = True
