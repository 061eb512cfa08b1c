"""Passing nested output tensors through the bridge as their component tensors.

A nested tensor of the strided layout has no sizes, which a custom autograd node needs. One of the jagged layout cannot
be pickled with its graph: other processes send its values, from which it is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.errors import RemoteGradientError
from instep.structure.tree import Path, flatten_one_level, format_path, tensors_in

JaggedComponents = tuple[Tensor, Tensor, Tensor | None, int]
"""The values of a jagged tensor, its offsets, its lengths if there are gaps, and its ragged dim."""


def is_jagged(tensor: Tensor) -> bool:
    """Whether a tensor is nested with the jagged layout."""
    return tensor.is_nested and tensor.layout is torch.jagged


def jagged_components(tensor: Any) -> JaggedComponents:
    """The components of a jagged tensor. Its values are connected to its graph."""
    sizes: Sequence[Any] = tensor.shape
    dim = next(dim for dim, size in enumerate(sizes) if not isinstance(size, int))
    with torch.enable_grad():
        return tensor.values(), tensor.offsets(), tensor.lengths(), dim


def make_jagged(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int) -> Tensor:
    """Build a jagged tensor from its components, differentiably."""
    with torch.enable_grad():
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


def flatten_outputs(outputs: Iterable[Tensor], *, remote: bool) -> list[Tensor | None]:
    """The tensors that pass through the bridge for a replica's outputs; `remote` if it is in another process."""
    return [component for tensor in outputs for component in _component_tensors(tensor, remote)]


def rebuild_output(tensor: Tensor, bridged: Iterator[Tensor], *, remote: bool) -> Tensor:
    """Rebuild an output in the caller's graph from the bridge's outputs for its components."""
    if _is_strided_nested(tensor):
        nested: Tensor = torch.nested.as_nested_tensor([next(bridged) for _ in range(tensor.size(0))])
        return nested
    if remote and is_jagged(tensor):
        _, offsets, lengths, dim = jagged_components(tensor)
        return make_jagged(next(bridged), offsets, lengths, dim)
    return next(bridged)


def _is_strided_nested(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided


def _component_tensors(tensor: Tensor, remote: bool) -> Sequence[Tensor]:
    if _is_strided_nested(tensor):
        return tensor.unbind()
    if remote and is_jagged(tensor):  # built here from received values, which are a leaf
        rebuild_node: Any = tensor.grad_fn
        return (rebuild_node.next_functions[0][0].variable,)
    return (tensor,)


def reject_lost_gradients(output: Any, attributes: Sequence[Any], is_supported: Callable[[Tensor], bool]) -> None:
    """Raise `RemoteGradientError` for an output or attribute whose gradient cannot be sent to its process."""
    for what, value in (("output", output), *(("state", value) for value in attributes)):
        for path, tensor in _tensors_with_paths(value):
            if tensor.requires_grad and not is_supported(tensor):
                raise RemoteGradientError(_lost_gradient_message(what, path, tensor))


def _lost_gradient_message(what: str, path: Path, tensor: Tensor) -> str:
    kind = "nested" if tensor.is_nested else "sparse" if tensor.layout is not torch.strided else type(tensor).__name__
    where = f" {format_path(path)!r}" if path else ""
    hint = {
        "nested": "Make it with layout=torch.jagged, return a list of tensors",
        "sparse": "Return a dense tensor: .to_dense(); or its values and its indices",
    }.get(kind, "Return a plain tensor")
    return (
        f"forward's {what}{where} is a {kind} tensor that requires grad, whose gradient cannot be sent to a worker "
        f"process.\n{hint}, or use DataParallel(..., engine='threads')."
    )


def _tensors_with_paths(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a structure with their paths."""
    node = None if isinstance(value, Tensor) else flatten_one_level(value)
    if node is None:
        yield from ((path, tensor) for tensor in tensors_in(value))
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _tensors_with_paths(child, (*path, key))
