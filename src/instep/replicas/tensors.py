"""The tensors of a replica: leaves for the source's trainable tensors, copies of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from instep.errors import BridgeError
from instep.runtime.modes import set_inference_mode
from instep.structure.shapes import is_dense


class GradientGuard:
    """Refuses a gradient that reaches a replica's leaf by another way than the bridge.

    Such a gradient would stay on the replica and be lost to the source.
    """

    __slots__ = ("open", "touched")

    def __init__(self) -> None:
        self.open = False
        self.touched = False
        """Whether a gradient came by since this was last set to False."""

    def set(self, state: bool) -> None:
        self.open = state

    def __call__(self, _: Tensor) -> None:
        self.touched = True
        if not self.open:
            raise BridgeError(_STRAY_GRADIENT)


_STRAY_GRADIENT = (
    "a gradient reached a replica's parameter from outside its call: a tensor made inside forward was kept by another "
    "way than the outputs (a list, a hook, a global).\n"
    "Return it from forward, or set it as an attribute of the module, so that its gradient finds the way."
)
get_grad: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def has_gradients(leaves: Iterable[Tensor]) -> bool:
    """Whether gradients lie on leaves."""
    return any(gradient is not None for gradient in map(get_grad, leaves))


def check_no_stray_gradients(leaves: Sequence[Tensor]) -> None:
    """`BridgeError` if gradients lie on leaves that no guard has watched."""
    if has_gradients(leaves):
        for leaf in leaves:
            leaf.grad = None
        raise BridgeError(_STRAY_GRADIENT)


def check_no_inner_backward(leaves: Iterable[Tensor]) -> None:
    """`BridgeError` if a backward inside `forward` left gradients on leaves, where the source would not see them."""
    left = [leaf for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
    for leaf in left:
        leaf.grad = None
    if left:
        raise BridgeError(
            "backward() was called inside forward: its gradients would stay on the replicas.\n"
            "Return the loss and call backward() on it outside, or use torch.autograd.grad inside. (If it was another "
            "thread that called backward(), beside a call on engine='serial': engine='threads' allows that.)"
        )


class GradientStash:
    """Around a `forward` that works on the source's own tensors: refuses a backward inside it, as elsewhere.

    Gradients that the source has are put aside meanwhile. It is no context manager: one that an interruption leaves
    without its end would lose them, or bring them back later, over new ones.
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
    """The addresses of storages that two or more tensors without gradient of some modules are views of."""
    held = {
        id(tensor): tensor
        for module in modules
        for table in (module._buffers, module._parameters, module.__dict__)
        for tensor in table.values()
        if isinstance(tensor, Tensor) and not tensor.requires_grad
    }
    dense = [t for t in held.values() if is_dense(t) and type(t) in _PLAIN_TYPES]
    count = Counter(tensor.untyped_storage().data_ptr() for tensor in dense if not tensor.is_meta)
    return {address for address, number in count.items() if number > 1 and address}


_PLAIN_TYPES = (Tensor, nn.Parameter)


def leaf_like(source: Tensor, data: Tensor) -> Tensor:
    """A leaf of the source tensor's own class and attributes around `data`."""
    made = torch.Tensor._make_subclass(type(source), data, source.requires_grad)
    made.__dict__ = source.__dict__  # what is set on the source's parameter is there for the replicas too
    return made


class ParameterSharing(Enum):
    """How a replica comes by the source's tensors that take a gradient."""

    ALIAS = "leaves of its own that share the source's memory"
    COPY = "leaves of its own in memory of its own, sent at each call"
    SOURCE = "the source's own tensors: one joint graph"
    DIFFERENTIABLE_COPY = "differentiable copies of the source's tensors: one joint graph"


@dataclass
class ReplicaTensors:
    """Makes the tensors of one replica and remembers what each stands for."""

    uses_guard: ClassVar[bool] = True
    """Whether each leaf is watched for gradients."""
    device: torch.device
    sharing: ParameterSharing
    private_weights: Mapping[int, Tensor] = field(default_factory=dict)
    """By their ids, trainable tensors that get memory of their own here whatever the way."""
    shared_storages: Collection[int] = ()
    """Storages that several tensors of the source are views of, by their addresses."""
    guard: GradientGuard = field(default_factory=GradientGuard)
    trainable: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, counterpart) for each tensor that takes a gradient."""
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, copy) for each tensor that takes none."""
    _storage_copies: dict[int, Tensor] = field(default_factory=dict)
    sources: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a counterpart: what it stands for."""

    def create(self, source: Tensor) -> Tensor:
        """The replica's counterpart of one tensor of the source."""
        if not source.requires_grad:
            made = self.copy(source)
            self.state.append((source, made))
        else:
            made = self._create_trainable(source)
            self.trainable.append((source, made))
        self.sources[id(made)] = source
        return made

    def _create_trainable(self, source: Tensor) -> Tensor:
        if self.sharing is ParameterSharing.SOURCE:
            return source
        if self.sharing is ParameterSharing.DIFFERENTIABLE_COPY:
            grad = torch.is_grad_enabled()
            with set_inference_mode(False), torch.set_grad_enabled(grad):  # the first turns gradients on by itself
                made = source.to(self.device) if source.device != self.device else source.clone()
            made.__dict__ = source.__dict__
            return made
        with set_inference_mode(False), torch.no_grad():
            made = self._create_leaf(source)
        if self.uses_guard:
            made.register_hook(self.guard)
        return made

    def _create_leaf(self, source: Tensor) -> Tensor:
        data = source.detach()
        if self.sharing is ParameterSharing.COPY or id(source) in self.private_weights:
            data = data.to(self.device, copy=True)
        elif source.is_inference():
            data = data.clone()
        if source.is_leaf:
            return leaf_like(source, data)
        return data.requires_grad_()  # a buffer that was computed: a leaf here, its graph goes on at the source

    def copy(self, source: Tensor) -> Tensor:
        """A copy of a tensor that takes no gradient, as the class that the source is."""
        with set_inference_mode(False), torch.no_grad():
            data = self._copy_data(source)
            if isinstance(source, nn.Parameter) or type(source) is not Tensor:
                return leaf_like(source, data) if type(source).__torch_function__ is _DEFAULT_TORCH_FUNCTION else data
            data.__dict__ = source.__dict__
            return data

    def _copy_data(self, source: Tensor) -> Tensor:
        """Its values here; where tensors of the source are views of one storage, they are views of one copy."""
        if not is_dense(source) or not self.shared_storages:
            return source.detach().to(self.device, copy=True)
        storage = source.untyped_storage()
        if storage.data_ptr() not in self.shared_storages:
            return source.detach().to(self.device, copy=True)
        if storage.data_ptr() not in self._storage_copies:
            whole = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
            self._storage_copies[storage.data_ptr()] = whole.to(self.device, copy=True)
        here = self._storage_copies[storage.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=source.dtype, device=self.device)
        return made.set_(here, source.storage_offset(), source.size(), source.stride())

    def may_have_gradients(self) -> bool:
        """Whether gradients may have come to the leaves in a forward."""
        return self.guard.touched

    def forget(self, made: Collection[int]) -> None:
        """Forget counterparts by their ids."""
        self.trainable = [pair for pair in self.trainable if id(pair[1]) not in made]
        self.state = [pair for pair in self.state if id(pair[1]) not in made]
        for counterpart in made:
            self.sources.pop(counterpart, None)


_DEFAULT_TORCH_FUNCTION: Any = nn.Parameter.__torch_function__
