"""What is said between this process and a worker: one class for each kind of message.

Tensors inside of them go beside the pickle (see `talk`), so that these are ordinary objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

# From this process to a worker.
TABLE, MODULE, SET, GLOBALS, RELEASE, FORWARD, BACKWARD, MET, STOP = (
    "table", "module", "set", "globals", "release", "forward", "backward", "met", "stop",
)  # fmt: skip
# From a worker to this process.
MEET, DONE, FAILED = "meet", "done", "failed"


@dataclass
class Spot:
    """Where a tensor of the source lies in memory that both processes map."""

    block: int
    """0 for a storage that is sent with the table."""
    offset: int
    """In the block; or the number of the storage that is sent."""
    nbytes: int
    """Of the storage."""
    start: int
    """In the storage, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Entry:
    """One tensor of the source: its class, what is set on it, and where it lies or its values."""

    kind: type
    requires_grad: bool
    attributes: dict[str, Any]
    spot: Spot | None
    value: Tensor | None


@dataclass
class Table:
    """The tensors of a module, which are known by their places in the table from then on."""

    number: int
    entries: list[Entry]
    sent: list[Tensor]
    """Storages that lie in no common memory, as bytes."""
    blocks: list[tuple[int, int]]
    """The number and the bytes of each block of memory whose descriptor is sent along."""
    slots: tuple[int, list[tuple[int, int]]]
    """The bytes of the memory for gradients, whose descriptor is the last one, and where each tensor's goes."""


@dataclass
class NewModule:
    """The module itself, around the tensors of its table."""

    PATHS: ClassVar = {"module": "the module"}

    number: int
    module: Any
    device: torch.device
    synchronised: bool | None
    """Whether batch normalisation looks at the whole batch; None for no such layers to dress."""
    own: list[str]
    """Places of containers that each replica has for itself."""


@dataclass
class Surroundings:
    """The state of the caller's thread and process that a call depends on."""

    grad: bool
    inference: bool
    autocast: list[tuple[str, torch.dtype]]
    autocast_cache: bool
    device: torch.device | None
    dtype: torch.dtype
    deterministic: int
    precision: str
    threads: int


@dataclass
class Run:
    """One replica's part of a forward."""

    PATHS: ClassVar = {"args": "argument ", "kwargs": "argument "}

    number: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]
    index: int
    sizes: list[int]
    count: int
    around: Surroundings
    follow: bool
    seed: int
    """What the streams of the call are seeded by."""
    generators: list[Tensor]
    """The states of the generators that the module holds."""
    lent: list[tuple[int, str, Any]]
    fresh: dict[int, Tensor]
    """Values of tensors of the table that lie in no common memory."""


@dataclass
class Ran:
    """What one replica's part of a forward came to."""

    PATHS: ClassVar = {"output": "the output of forward"}

    output: Any = None
    structure: bool = False
    sets: list[tuple[int, str, Any, bool]] = field(default_factory=list)
    """Attributes and buffers that were set: the module's index, the name, the value, whether it is a buffer."""
    contents: list[tuple[str, tuple[Any, ...], list[tuple[int, Any]]]] = field(default_factory=list)
    """Containers that were changed: the place, the keys, and each item, by its place before or as a new one."""
    written: dict[int, Tensor] = field(default_factory=dict)
    """Values of tensors of the table that were written in place."""
    apart: dict[int, Tensor] = field(default_factory=dict)
    """Values of weights that the worker has for itself because `forward` rewrites them."""
    arguments: dict[int, Tensor] = field(default_factory=dict)
    """Values of arguments that were written in place, by their numbers."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """What became of those that need a gradient, with their history."""
    used: list[int] = field(default_factory=list)
    """The arguments that need a gradient and that what comes back was made from."""
    drawn: bool = False
    drawn_held: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    """Trainable tensors of the table that `forward` wrote to."""
    wrote: list[str] = field(default_factory=list)
    """Globals of the script that `forward` changed."""
    parted: list[str] = field(default_factory=list)
    """Places of containers that `forward` changed and that each replica needs for itself."""


@dataclass
class Back:
    """One replica's part of a backward."""

    gradients: dict[int, Tensor]
    """By the number of an output's tensor."""
    keep: bool
    tokens: list[int]
    arguments: list[int]
    """Arguments that the caller wrote to since the forward."""
    sources: list[int]
    """Tensors of the source that were written to since."""
    seed: int
    wanted: list[int]
    """Tensors of the table whose gradients are wanted."""


@dataclass
class WentBack:
    """What one replica's part of a backward came to."""

    inputs: dict[int, Tensor]
    """Gradients of arguments, by their numbers."""
    present: list[int]
    """Tensors of the table whose gradients lie in their slots."""
    others: dict[int, Tensor]
    """Gradients that have no slot: sparse ones."""
    drawn: bool = False
