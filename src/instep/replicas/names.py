"""Dotted names of modules and tensors, for rules and error messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.errors import StateError

_NOT_OVERWRITTEN = "The module's parameter has its value from before the call."
_OVERWRITTEN = (
    "The module's parameters {names} have the new values, because replicas share their memory: restore them with "
    "load_state_dict.\n"
    "With private_copies=True replicas do not share memory with the module."
)


class TensorOwner(NamedTuple):
    """The module that holds a tensor, the attribute name, and the dotted name from the root."""

    module: nn.Module | None
    name: str
    path: str


_NO_OWNER = TensorOwner(None, "", "a tensor without a name")


def module_names(source: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """The dotted name of each module; the class name if it is not registered."""
    names = {id(module): name for name, module in source.named_modules()}
    return [names.get(id(module), type(module).__name__) for module in modules]


class TensorOwners:
    """Cache of the owners of a source module's tensors. After `invalidate`, tensors that moved are searched again."""

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._owners: dict[int, TensorOwner] = {}
        self._is_current = False

    def invalidate(self) -> None:
        """Allow one more search, for tensors that their owner does not hold any more."""
        self._is_current = False

    def find(self, tensor: Tensor) -> TensorOwner:
        owner = self._owners.get(id(tensor), _NO_OWNER)
        if not self._is_current and not _still_holds(owner, tensor):
            self._owners, self._is_current = dict(self._scan()), True
            owner = self._owners.get(id(tensor), _NO_OWNER)
        return owner

    def _scan(self) -> Iterator[tuple[int, TensorOwner]]:
        seen: set[int] = set()
        for prefix, module in self._source.named_modules():
            for table in _tensor_dicts(module):
                for name, value in table.items():
                    if isinstance(value, Tensor) and id(value) not in seen:
                        seen.add(id(value))
                        yield id(value), TensorOwner(module, name, f"{prefix}.{name}" if prefix else name)


def _tensor_dicts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module.__dict__


def _still_holds(owner: TensorOwner, tensor: Tensor) -> bool:
    """Whether the owner still holds this tensor. The id may belong to a new tensor by now."""
    return owner.module is not None and any(table.get(owner.name) is tensor for table in _tensor_dicts(owner.module))


def parameter_write_error(
    source: nn.Module, written: Sequence[Tensor], overwritten: Sequence[Tensor] = ()
) -> StateError:
    """The error for trainable tensors that `forward` wrote to. The `overwritten` ones have the new values."""
    owners = TensorOwners(source)
    names = [repr(owners.find(tensor).path) for tensor in {id(tensor): tensor for tensor in overwritten}.values()]
    path = owners.find((overwritten or written)[0]).path
    return StateError(
        f"forward wrote to the trainable parameter {path!r}, so that every replica would write to it.\n"
        f"{_OVERWRITTEN.format(names=', '.join(names)) if names else _NOT_OVERWRITTEN}\n"
        f"Change it outside forward (after optimizer.step()), or make it a buffer with a state rule."
    )
