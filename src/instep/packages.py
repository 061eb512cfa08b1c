"""What replicas of separate graphs bring to a meeting, and how it crosses between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.structure.shapes import is_ordinary

Row = list[Tensor | None]

LIGHT = 64 * 1024
"""Bytes of a package up to which its tensors cross by the host, wherever they are."""


class Package(NamedTuple):
    """What one replica brings to a meeting of separate graphs: a row of tensors for every other replica."""

    rows: dict[int, Row]
    needed: dict[int, list[bool]]
    """Which of them a gradient is wanted for."""
    streams: dict[torch.device, Any]
    note: Any
    lifted: Mapping[int, list[bool]] = MappingProxyType({})
    """Which of them were brought to the host from an accelerator; nothing where none was."""


Bare = tuple[dict[int, list[int | None]], dict[int, list[bool]], Any, dict[int, list[bool]]]
"""A package as it goes to another process, whose streams are its own: for each row the places of its tensors among all
that go along, which of them need a gradient, the note, and which of them were brought to the host."""


def lift(package: Package) -> Package:
    """A package for other processes: what is light comes to the host first.

    So a device is waited for once, by whoever brings the package, and not once more by everybody who passes it on.
    """
    far = {id(t): t for row in package.rows.values() for t in row if t is not None and t.device.type != "cpu"}
    if not far or not all(map(is_ordinary, far.values())) or sum(t.nbytes for t in far.values()) > LIGHT:
        return package
    near = {key: tensor.cpu() for key, tensor in far.items()}
    rows = {peer: [t if t is None else near.get(id(t), t) for t in row] for peer, row in package.rows.items()}
    lifted = {peer: [id(t) in near for t in row] for peer, row in package.rows.items()}
    return package._replace(rows=rows, lifted=lifted)


def is_lifted(package: Package, peer: int, at: int) -> bool:
    """Whether one of the tensors for a replica was brought to the host."""
    return bool(package.lifted) and package.lifted[peer][at]


def to_bare(package: Package, tensors: list[Tensor], to: int | None = None) -> Bare:
    """A package for another process, with its tensors added to others, each once.

    Of its rows only those that are for one replica, where that is said.
    """
    places: dict[int, int] = {}
    rows: dict[int, list[int | None]] = {}
    for peer, row in package.rows.items():
        if to is None or peer == to:
            for tensor in row:
                if tensor is not None and id(tensor) not in places:
                    places[id(tensor)] = len(tensors)
                    tensors.append(tensor)
            rows[peer] = [places.get(id(tensor)) for tensor in row]
    return rows, package.needed, package.note, dict(package.lifted)


def from_bare(bare: Bare, tensors: Sequence[Tensor]) -> Package:
    """A package that came from another process."""
    rows, needed, note, lifted = bare
    found = {peer: [None if place is None else tensors[place] for place in row] for peer, row in rows.items()}
    return Package(found, needed, {}, note, lifted)
