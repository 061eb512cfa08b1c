"""The tensors of a replica: leaves for the source's trainable tensors, copies of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from instep.errors import BridgeError
from instep.runtime.modes import set_inference_mode
from instep.runtime.torch_private import register_own_hook
from instep.structure.shapes import is_dense


class GradientGuard:
    """A hook on the replica's leaves that raises for gradients outside of the bridge's backward.

    Such a gradient would stay on the replica and never reach the source. The hook runs after an accumulation: gradients
    that a backward captures do not call it.
    """

    __slots__ = ("open", "touched")

    def __init__(self) -> None:
        self.open = False
        self.touched = False
        """Whether a leaf received a gradient since this was last set to False."""

    def set(self, state: bool) -> None:
        self.open = state

    def __call__(self, leaf: Tensor) -> None:
        self.touched = True
        if not self.open:
            leaf.grad = None
            raise BridgeError(_STRAY_GRADIENT)


_STRAY_GRADIENT = (
    "a gradient reached a replica's parameter outside of the backward of its call: a tensor of forward was stored in a "
    "list, a hook or a global.\n"
    "Return the tensor from forward, or set it as an attribute of the module."
)
get_grad: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def has_gradients(leaves: Iterable[Tensor]) -> bool:
    """Whether a leaf has a gradient."""
    return any(map(is_not, map(get_grad, leaves), repeat(None)))


def check_no_stray_gradients(leaves: Sequence[Tensor]) -> None:
    """Raise `BridgeError` if a leaf without a guard has a gradient."""
    if has_gradients(leaves):
        for leaf in leaves:
            leaf.grad = None
        raise BridgeError(_STRAY_GRADIENT)


def check_no_inner_backward(leaves: Iterable[Tensor]) -> None:
    """Raise `BridgeError` if a backward inside `forward` left gradients on leaves."""
    found = [leaf for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
    for leaf in found:
        leaf.grad = None
    if found:
        raise BridgeError(
            "backward() was called inside forward: its gradients would stay on the replicas.\n"
            "Return the loss and call backward() outside forward, or use torch.autograd.grad inside. If another thread "
            "called backward() during a call with engine='serial': use engine='threads'."
        )


class GradientStash:
    """Removes the gradients of the source during a `forward` on its own tensors, to detect a backward inside it.

    This is not a context manager: if an interruption skipped its exit, gradients would be lost or restored too late.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        self._leaves = [(leaf, leaf.grad) for leaf in sources if leaf.is_leaf]

    def stash(self) -> None:
        for leaf, _ in self._leaves:
            leaf.grad = None

    def check(self) -> None:
        check_no_inner_backward(leaf for leaf, _ in self._leaves)

    def restore(self) -> None:
        for leaf, gradient in self._leaves:
            leaf.grad = gradient


def shared_storage_ptrs(modules: Iterable[nn.Module]) -> set[int]:
    """The addresses of storages that several tensors of modules view. Tensors that require a gradient do not count."""
    tensors = {
        id(tensor): tensor
        for module in modules
        for table in (module._buffers, module._parameters, module.__dict__)
        for tensor in table.values()
        if isinstance(tensor, Tensor) and not tensor.requires_grad
    }
    dense = [t for t in tensors.values() if is_dense(t) and type(t) in _PLAIN_TYPES]
    count = Counter(tensor.untyped_storage().data_ptr() for tensor in dense if not tensor.is_meta)
    return {address for address, number in count.items() if number > 1 and address}


_PLAIN_TYPES = (Tensor, nn.Parameter)


def leaf_like(source: Tensor, data: Tensor) -> Tensor:
    """A leaf with the class and the attributes of the source tensor, and the memory of `data`."""
    leaf = torch.Tensor._make_subclass(type(source), data, source.requires_grad)
    leaf.__dict__ = source.__dict__  # attributes that are set on the source appear on the replicas
    return leaf


class ParameterSharing(Enum):
    """How a replica gets the source's tensors that require a gradient."""

    ALIAS = "leaves that share the source's memory"
    COPY = "leaves with their own memory, sent at each call"
    SOURCE = "the source's tensors themselves, in a joint graph"
    DIFFERENTIABLE_COPY = "differentiable copies of the source's tensors, in a joint graph"


@dataclass
class ReplicaTensors:
    """Creates the tensors of one replica."""

    uses_guard: ClassVar[bool] = True
    """Whether each leaf has a `GradientGuard`."""
    device: torch.device
    sharing: ParameterSharing
    private_weights: Mapping[int, Tensor] = field(default_factory=dict)
    """By id, trainable tensors that are copied whatever `sharing` is."""
    shared_storages: Collection[int] = ()
    """Addresses of storages that several tensors of the source view."""
    guard: GradientGuard = field(default_factory=GradientGuard)
    trainable: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, replica's tensor) for each tensor that requires a gradient."""
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, copy) for each other tensor."""
    _storage_copies: dict[int, Tensor] = field(default_factory=dict)
    sources: dict[int, Tensor] = field(default_factory=dict)
    """The source of each tensor, by the id of the replica's tensor."""

    def create(self, source: Tensor) -> Tensor:
        """Create the replica's tensor for a tensor of the source."""
        tensor = self._create_trainable(source) if source.requires_grad else self.copy(source)
        (self.trainable if source.requires_grad else self.state).append((source, tensor))
        self.sources[id(tensor)] = source
        return tensor

    def _create_trainable(self, source: Tensor) -> Tensor:
        if self.sharing is ParameterSharing.SOURCE:
            return source
        if self.sharing is ParameterSharing.DIFFERENTIABLE_COPY:
            grad = torch.is_grad_enabled()
            with set_inference_mode(False), torch.set_grad_enabled(grad):  # leaving inference mode enables gradients
                copy = source.to(self.device) if source.device != self.device else source.clone()
            copy.__dict__ = source.__dict__
            return copy
        with set_inference_mode(False), torch.no_grad():
            leaf = self._create_leaf(source)
        if self.uses_guard:
            register_own_hook(leaf, self.guard, after_accumulation=True)
        return leaf

    def _create_leaf(self, source: Tensor) -> Tensor:
        data = source.detach()
        if self.sharing is ParameterSharing.COPY or id(source) in self.private_weights:
            data = data.to(self.device, copy=True)
        elif source.is_inference():
            data = data.clone()
        if source.is_leaf:
            return leaf_like(source, data)
        return data.requires_grad_()  # a buffer with a history, which continues on the source

    def copy(self, source: Tensor) -> Tensor:
        """Copy a tensor that requires no gradient. The copy has the class of the source."""
        with set_inference_mode(False), torch.no_grad():
            data = self._copy_data(source)
            if isinstance(source, nn.Parameter) or type(source) is not Tensor:
                return leaf_like(source, data) if type(source).__torch_function__ is _DEFAULT_TORCH_FUNCTION else data
            data.__dict__ = source.__dict__
            return data

    def _copy_data(self, source: Tensor) -> Tensor:
        """Copy the values. Views of one storage of the source become views of one copy."""
        if not is_dense(source) or not self.shared_storages:
            return source.detach().to(self.device, copy=True)
        storage = source.untyped_storage()
        if storage.data_ptr() not in self.shared_storages:
            return source.detach().to(self.device, copy=True)
        if storage.data_ptr() not in self._storage_copies:
            whole = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
            self._storage_copies[storage.data_ptr()] = whole.to(self.device, copy=True)
        copy = self._storage_copies[storage.data_ptr()].untyped_storage()
        view = torch.empty(0, dtype=source.dtype, device=self.device)
        return view.set_(copy, source.storage_offset(), source.size(), source.stride())

    def may_have_gradients(self) -> bool:
        """Whether leaves may have received gradients in a forward."""
        return self.guard.touched

    def forget(self, ids: Collection[int]) -> None:
        """Forget tensors of the replica by their ids."""
        self.trainable = [pair for pair in self.trainable if id(pair[1]) not in ids]
        self.state = [pair for pair in self.state if id(pair[1]) not in ids]
        for number in ids:
            self.sources.pop(number, None)


_DEFAULT_TORCH_FUNCTION: Any = nn.Parameter.__torch_function__
