"""The tensors of a replica: leaves that stand for the source's differentiable tensors, and copies of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from instep.modes import inference
from instep.replicas.guard import Guard, Hooks
from instep.structure.shapes import is_dense


def shared_storages(modules: Iterable[nn.Module]) -> set[int]:
    """The addresses of storages that two or more tensors without gradient of some modules are views of."""
    held = {
        id(tensor): tensor
        for module in modules
        for table in (module._buffers, module._parameters, module.__dict__)
        for tensor in table.values()
        if isinstance(tensor, Tensor) and not tensor.requires_grad
    }
    dense = [t for t in held.values() if is_dense(t) and type(t) in _DENSE]
    count = Counter(tensor.untyped_storage().data_ptr() for tensor in dense if not tensor.is_meta)
    return {address for address, number in count.items() if number > 1 and address}


_DENSE = (Tensor, nn.Parameter)


def leaf_like(source: Tensor, data: Tensor) -> Tensor:
    """A leaf of the source tensor's own class and attributes around `data`."""
    made = torch.Tensor._make_subclass(type(source), data, source.requires_grad)
    made.__dict__ = source.__dict__  # what is set on the source's parameter is there for the replicas too
    return made


class Way(Enum):
    """How a replica comes by the source's tensors that take a gradient."""

    ALIAS = "leaves of its own that share the source's memory"
    PRIVATE = "leaves of its own in memory of its own, sent at each call"
    SHARE = "the source's own tensors: one joint graph"
    LINK = "differentiable copies of the source's tensors: one joint graph"


@dataclass
class Tensors:
    """Makes the tensors of one replica and remembers what each stands for."""

    guarded: ClassVar[bool] = True
    """Whether each leaf is watched for gradients."""
    device: torch.device
    way: Way
    apart: Mapping[int, Tensor] = field(default_factory=dict)
    """By their ids, trainable tensors that get memory of their own here whatever the way."""
    views: Collection[int] = ()
    """Storages that several tensors of the source are views of, by their addresses."""
    guard: Hooks = field(default_factory=Guard)
    trainable: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, counterpart) for each tensor that takes a gradient."""
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, copy) for each tensor that takes none."""
    _storages: dict[int, Tensor] = field(default_factory=dict)
    sources: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a counterpart: what it stands for."""

    def make(self, source: Tensor) -> Tensor:
        """The replica's counterpart of one tensor of the source."""
        if not source.requires_grad:
            made = self.copy(source)
            self.state.append((source, made))
        else:
            made = self._trainable(source)
            self.trainable.append((source, made))
        self.sources[id(made)] = source
        return made

    def _trainable(self, source: Tensor) -> Tensor:
        if self.way is Way.SHARE:
            return source
        if self.way is Way.LINK:
            grad = torch.is_grad_enabled()
            with inference(False), torch.set_grad_enabled(grad):  # the first turns gradients on by itself
                made = source.to(self.device) if source.device != self.device else source.clone()
            made.__dict__ = source.__dict__
            return made
        with inference(False), torch.no_grad():
            made = self._leaf(source)
        if self.guarded:
            self.guard.watch(made)
        return made

    def _leaf(self, source: Tensor) -> Tensor:
        data = source.detach()
        if self.way is Way.PRIVATE or id(source) in self.apart:
            data = data.to(self.device, copy=True)
        elif source.is_inference():
            data = data.clone()
        if source.is_leaf:
            return leaf_like(source, data)
        return data.requires_grad_()  # a buffer that was computed: a leaf here, its graph goes on at the source

    def copy(self, source: Tensor) -> Tensor:
        """A copy of a tensor that takes no gradient, as the class that the source is."""
        with inference(False), torch.no_grad():
            data = self._copied(source)
            if isinstance(source, nn.Parameter) or type(source) is not Tensor:
                return leaf_like(source, data) if type(source).__torch_function__ is _PLAIN else data
            data.__dict__ = source.__dict__
            return data

    def _copied(self, source: Tensor) -> Tensor:
        """Its values here; where tensors of the source are views of one storage, they are views of one copy."""
        if not is_dense(source) or not self.views:
            return source.detach().to(self.device, copy=True)
        storage = source.untyped_storage()
        if storage.data_ptr() not in self.views:
            return source.detach().to(self.device, copy=True)
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
            self._storages[storage.data_ptr()] = whole.to(self.device, copy=True)
        here = self._storages[storage.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=source.dtype, device=self.device)
        return made.set_(here, source.storage_offset(), source.size(), source.stride())

    def may_have_gradients(self) -> bool:
        """Whether gradients may have come to the leaves in a forward."""
        return self.guard.may_have_gradients()

    def drop(self, made: Collection[int]) -> None:
        """Forget counterparts by their ids."""
        self.guard.forget(made)
        self.trainable = [pair for pair in self.trainable if id(pair[1]) not in made]
        self.state = [pair for pair in self.state if id(pair[1]) not in made]
        for counterpart in made:
            self.sources.pop(counterpart, None)


_PLAIN: Any = nn.Parameter.__torch_function__
