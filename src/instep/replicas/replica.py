"""One replica: a counterpart of the source module that is made once and then kept abreast of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.replicas.clone import REGISTRIES, Cloner
from instep.replicas.tensors import Tensors
from instep.replicas.watch import MISSING, Changes, Set, Watch

Slot = tuple[Any, Any]
"""A container of the replica and the key or index under which it holds a tensor."""


class Replica:
    """The module on one device, with its own tensors; everything else is the source's own objects."""

    def __init__(self, index: int, source: nn.Module, device: torch.device, *, alias: bool, share: bool) -> None:
        self.index = index
        self.device = device
        self.tensors = Tensors(device, alias=alias, share=share)
        self.cloner = Cloner(self.tensors.make)
        with torch.inference_mode(False):
            self.module: nn.Module = self.cloner.clone(source)
        if not (alias or share):
            self._flatten_weights()
        self._find_slots()
        self._watch = Watch(self.modules)

    def __repr__(self) -> str:
        return f"replica {self.index} on {self.device}"

    @property
    def modules(self) -> list[nn.Module]:
        """Every module of the replica."""
        return [made for _, made in self.cloner.modules]

    @property
    def source_modules(self) -> list[nn.Module]:
        """The source's modules, in the same order."""
        return [source for source, _ in self.cloner.modules]

    @property
    def trainable(self) -> list[tuple[Tensor, Tensor]]:
        """(source, leaf) for each tensor that takes a gradient."""
        return self.tensors.trainable

    def _flatten_weights(self) -> None:
        """Lay recurrent weights out as cuDNN wants them, once, where they have memory of their own."""
        for module in self.modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def apply(self, changes: Changes) -> None:
        """Set on the replica what was set on the source."""
        for change in changes.attributes:
            if isinstance(change.old, Tensor):
                self._drop(change.old)
            module = self.cloner.modules[change.module][1]
            if change.buffer:
                module._buffers[change.name] = self.cloner.clone(change.new)
            else:
                module.__dict__[change.name] = self.cloner.attribute(change.name, change.new)
        if any(isinstance(value, Tensor) for change in changes.attributes for value in (change.old, change.new)):
            self._find_slots()
        self._watch.update(changes)

    def _drop(self, source: Tensor) -> None:
        self.cloner.forget(source)
        self.tensors.state = [pair for pair in self.tensors.state if pair[0] is not source]
        self.tensors.trainable = [pair for pair in self.tensors.trainable if pair[0] is not source]

    def _find_slots(self) -> None:
        """Where the replica holds each of its own tensors."""
        self.slots: dict[int, list[Slot]] = {}
        for module in self.modules:
            for name in REGISTRIES[:2]:
                self._note_slots(module.__dict__[name].items(), module.__dict__[name])
            self._note_slots(module.__dict__.items(), module.__dict__)
        for _, _, made in self.cloner.containers:
            if isinstance(made, dict):
                self._note_slots(made.items(), made)
            elif isinstance(made, (list, deque)):
                self._note_slots(enumerate(made), made)

    def _note_slots(self, items: Any, holder: Any) -> None:
        for key, value in items:
            if isinstance(value, Tensor):
                self.slots.setdefault(id(value), []).append((holder, key))

    def put(self, old: Tensor, new: Tensor) -> bool:
        """Hold `new` wherever the replica held `old`; False where it is held out of reach."""
        slots = self.slots.pop(id(old), None)
        if slots is None:
            return False
        for holder, key in slots:
            holder[key] = new
        self.slots[id(new)] = slots
        return True

    def follow_state(self) -> None:
        """Bring buffers and other tensors without gradient up to the source's values.

        A tensor whose value changed is replaced, never written: a graph of an earlier call may still need it.
        """
        touched = False
        for position, (source, copy) in enumerate(self.tensors.state):
            if same_values(source, copy):
                continue
            new = self.tensors.copy(source)
            if self.put(copy, new):
                self.tensors.state[position] = (source, new)
                self.cloner._note(source, new)
                touched = True
            else:
                with torch.no_grad():
                    copy.data.copy_(source.detach())
        if touched:
            self._watch = Watch(self.modules)

    def link(self) -> None:
        """Hold differentiable copies of the source's trainable tensors: the replica joins the caller's graph."""
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            for position, (source, held) in enumerate(self.tensors.trainable):
                new = source.to(self.device) if source.device != self.device else source.clone()
                self.put(held, new)
                self.tensors.trainable[position] = (source, new)
        self._watch = Watch(self.modules)

    def changes(self) -> Changes:
        """What `forward` set on the replica since it was last brought up to date."""
        return self._watch.look()

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """State tensors whose values `forward` wrote in place, as (source, copy).

        On the CPU values are compared. On an accelerator that would wait for the device, so there the version counter
        tells, and the statistics of batch normalisation, which move without it, are known by their class.
        """
        if self.device.type == "cpu":
            return [pair for pair in self.tensors.state if not same_values(*pair)]
        silent = {
            id(buffer)
            for module in self.modules
            if isinstance(module, _BatchNorm) and module.training
            for buffer in module.buffers(recurse=False)
        }
        return [pair for pair in self.tensors.state if pair[1]._version > 0 or id(pair[1]) in silent]

    def revert(self, changes: Changes) -> None:
        """Set back what `forward` set on the replica."""
        for change in changes.attributes:
            source, module = self.cloner.modules[change.module]
            table = source._buffers if change.buffer else source.__dict__
            held = module._buffers if change.buffer else module.__dict__
            if change.name not in table:
                held.pop(change.name, None)
            elif change.old is not MISSING:
                held[change.name] = change.old
        self._watch.update(changes)


def same_values(source: Tensor, copy: Tensor) -> bool:
    """Whether two tensors are equal bit for bit as far as can be told without waiting for an accelerator."""
    if source.shape != copy.shape or source.dtype != copy.dtype:
        return False
    if source.device.type != "cpu" or copy.device.type != "cpu":
        return False
    if source.layout is not torch.strided or source.is_nested:
        return False
    return torch.equal(source.detach(), copy.detach())


@dataclass
class Outcome:
    """What one replica did in a call."""

    output: Any = None
    changes: Changes = field(default_factory=lambda: Changes(False))
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """State tensors that were written in place, as (source, copy)."""
    error: BaseException | None = None


def run(replica: Replica, method: str, args: list[Any], kwargs: dict[str, Any]) -> Outcome:
    """One replica's part of a call, and what it changed on the replica."""
    outcome = Outcome()
    function: Callable[..., Any] = replica.module if method == "forward" else getattr(replica.module, method)
    outcome.output = function(*args, **kwargs)
    outcome.changes = replica.changes()
    outcome.written = replica.written()
    return outcome


__all__ = ["Outcome", "Replica", "Set", "run", "same_values"]
