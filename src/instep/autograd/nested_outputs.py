"""Passing nested output tensors through the bridge as their component tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.errors import RemoteGradientError
from instep.structure.tree import Path, flatten_one_level, format_path, tensors_in

JaggedComponents = tuple[Tensor, Tensor, Tensor | None, int]
"""The values of a jagged tensor, their offsets, their lengths where there are gaps, and the ragged dim."""


def is_jagged(tensor: Tensor) -> bool:
    """Whether a tensor is a nested one of the layout that keeps all its values in one tensor."""
    return tensor.is_nested and tensor.layout is torch.jagged


def jagged_components(tensor: Any) -> JaggedComponents:
    """What a jagged tensor is made of; the values lead to its graph."""
    sizes: Sequence[Any] = tensor.shape
    dim = next(dim for dim, size in enumerate(sizes) if not isinstance(size, int))
    with torch.enable_grad():
        return tensor.values(), tensor.offsets(), tensor.lengths(), dim


def make_jagged(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int) -> Tensor:
    """A jagged tensor of its parts, in the graph of its values."""
    with torch.enable_grad():
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


def flatten_outputs(outputs: Iterable[Tensor], *, remote: bool) -> list[Tensor | None]:
    """What crosses the bridge for the outputs of a replica, here or in another process."""
    return [piece for tensor in outputs for piece in _component_tensors(tensor, remote)]


def rebuild_output(tensor: Tensor, made: Iterator[Tensor], *, remote: bool) -> Tensor:
    """The counterpart of an output in the caller's graph, of what has come out of the bridge for its pieces."""
    if _is_strided_nested(tensor):
        loose: Tensor = torch.nested.as_nested_tensor([next(made) for _ in range(tensor.size(0))])
        return loose
    if remote and is_jagged(tensor):
        _, offsets, lengths, dim = jagged_components(tensor)
        return make_jagged(next(made), offsets, lengths, dim)
    return next(made)


def _is_strided_nested(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided


def _component_tensors(tensor: Tensor, remote: bool) -> Sequence[Tensor]:
    if _is_strided_nested(tensor):
        return tensor.unbind()
    if remote and is_jagged(tensor):  # made here of values that came from there, and that are a leaf here
        maker: Any = tensor.grad_fn
        return (maker.next_functions[0][0].variable,)
    return (tensor,)


def reject_lost_gradients(output: Any, kept: Sequence[Any], comes_back: Callable[[Tensor], bool]) -> None:
    """`NoWayBack` for a tensor of the output, or of what is kept on the module, whose graph another process loses."""
    for what, value in (("output", output), *(("state", value) for value in kept)):
        for path, tensor in _tensors_with_paths(value):
            if tensor.requires_grad and not comes_back(tensor):
                raise RemoteGradientError(_lost_gradient_message(what, path, tensor))


def _lost_gradient_message(what: str, path: Path, tensor: Tensor) -> str:
    kind = "nested" if tensor.is_nested else "sparse" if tensor.layout is not torch.strided else type(tensor).__name__
    where = f" {format_path(path)!r}" if path else ""
    way = {
        "nested": "Make it with layout=torch.jagged, return a list of tensors",
        "sparse": "Return a dense tensor: .to_dense(); or its values and its indices",
    }.get(kind, "Return a plain tensor")
    return (
        f"forward's {what}{where} is a {kind} tensor that needs a gradient, which does not come back from another "
        f"process.\n{way}, or use DataParallel(..., engine='threads')."
    )


def _tensors_with_paths(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a structure, each with the place that it or what holds it is found at."""
    node = None if isinstance(value, Tensor) else flatten_one_level(value)
    if node is None:
        yield from ((path, tensor) for tensor in tensors_in(value))
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _tensors_with_paths(child, (*path, key))
