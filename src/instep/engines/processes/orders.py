"""What is said between this process and a worker: one class for each kind of message.

Tensors inside of them go beside the pickle (see `talk`), so that these are ordinary objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.filters import Filter
from instep.reduce import Bucket
from instep.replicas.ambient import Casts

# From this process to a worker.
PLACE, TABLE, MODULE, SET, GLOBALS, FORWARD, BACKWARD, REACH, MET, STOP = (
    "place", "table", "module", "set", "globals", "forward", "backward", "reach", "met", "stop",
)  # fmt: skip
DEVICE = "device"
JOIN, SHARE, SUM, HAND_IN = "join", "share", "sum", "hand in"
# From a worker to this process.
MEET, DONE, FAILED = "meet", "done", "failed"

ANSWERED = frozenset((FORWARD, BACKWARD, REACH, DEVICE, JOIN, SUM, HAND_IN))
"""What somebody waits for an answer to."""


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
    pull: bool = False
    """Whether the worker has a copy on its device, which it brings up to the common memory before each call."""


@dataclass
class Entry:
    """One tensor of the source: its class, what is set on it, and where it lies or its values."""

    kind: type
    requires_grad: bool
    attributes: dict[str, Any]
    spot: Spot | None
    value: Tensor | None
    near: bool
    """Whether it lies on the device of the source, and belongs on the worker's there."""


@dataclass
class Berth:
    """A worker's device, as the process that starts it knows it."""

    device: torch.device
    identity: str
    """What the driver calls it; empty where it has no name for it."""
    handle: bytes | None
    """Of memory on it that the worker tries to open; None where that is of no use."""


@dataclass
class Table:
    """The tensors of a module, which are known by their places in the table from then on."""

    number: int
    device: torch.device
    """The worker's."""
    entries: list[Entry]
    sent: list[Tensor]
    """Storages that lie in no common memory, as bytes."""
    blocks: list[tuple[int, int]]
    """The number and the bytes of each block of memory whose descriptor is sent along."""
    slots: tuple[int, list[tuple[int, int]]]
    """The bytes of the memory for gradients, whose descriptor is the last one, and where each tensor's goes."""
    handles: list[tuple[int, int, bytes]] = field(default_factory=list)
    """The number, the bytes and the handle of each block of memory on the worker's device."""
    slots_handle: bytes | None = None
    """Of the memory for gradients, where that lies on the worker's device: then no descriptor comes for it."""
    bell: bool = False
    """Whether the worker rings for large gradients; the descriptor for that comes before the last."""


@dataclass
class NewModule:
    """The module itself, around the tensors of its table."""

    PATHS: ClassVar = {"module": "the module"}

    number: int
    module: Any
    home: torch.device
    """The device of the source."""
    synchronised: bool | None
    """Whether batch normalisation looks at the whole batch; None for no such layers to dress."""
    own: list[str]
    """Places of containers that each replica has for itself."""
    generators: list[torch.Generator]
    """The generators that the module holds, which are known by their places here from then on."""


@dataclass
class NewValues:
    """Attributes that were set since, and nothing else."""

    PATHS: ClassVar = {"values": "attribute "}

    places: list[tuple[int, str]]
    """The module's index and the name of each."""
    values: dict[str, Any]
    """In the same order, by what they are called from the outermost module on."""
    generators: list[torch.Generator]
    """Generators in them, whose places come after those that are known."""


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
    cudnn: tuple[bool, bool]
    """Whether cuDNN may try out which way is quickest, and whether it must be deterministic."""
    threads: int
    saved_hooks: tuple[Any, Any] | None
    backends: dict[str, Any] = field(default_factory=dict)
    """Switches of what computes on accelerators, by their names."""
    context: list[tuple[ContextVar[Any], Any]] = field(default_factory=list)
    """Context variables that the worker may read."""
    anomaly: int = 0
    """How anomalies are looked for (see `scenery.anomaly_mode`)."""
    filters: tuple[Filter, ...] = ()
    """What becomes of warnings."""


class Order:
    """A message that goes as the bare values of its fields: both sides know what they are asked for in what order.

    Those at the end that say nothing are left out, so what is seldom said comes last.
    """

    ALWAYS: ClassVar[int] = 0
    """How many are said whatever they are."""
    LOOSE: ClassVar[frozenset[str]] = frozenset()
    """Those that may hold anything: what is the user's, and tensors. The others hold numbers and texts, and lists and
    tuples of them, which were made for the order alone."""

    def fields(self) -> tuple[Any, ...]:
        values = tuple(self.__dict__.values())
        count = len(values)
        while count > self.ALWAYS and not values[count - 1]:
            count -= 1
        return values[:count]


@dataclass
class Run(Order):
    """One replica's part of a forward."""

    PATHS: ClassVar = {"args": "argument ", "kwargs": "argument "}
    ALWAYS: ClassVar[int] = 10
    LOOSE: ClassVar = frozenset({"args", "kwargs", "around", "generators", "lent", "fresh", "own", "lone"})

    number: int
    method: str
    args: list[Any]
    index: int
    sizes: list[int]
    count: int
    follow: bool
    seed: int
    """What the streams of the call are seeded by."""
    home_seed: int
    """What those of accelerators are seeded by."""
    gone: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Calls and modules that nobody needs any longer."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    around: Surroundings | None = None
    """None for the same as in the message before."""
    fetch: bool = False
    """Whether arguments lie on the host, from where the worker brings them to its device."""
    generators: dict[int, Tensor] = field(default_factory=dict)
    """The states of the generators that the module holds, by their numbers."""
    lent: list[tuple[int, str, Any]] = field(default_factory=list)
    fresh: dict[int, Tensor] = field(default_factory=dict)
    """Values of tensors of the table that lie in no common memory."""
    given: list[tuple[int, ...]] = field(default_factory=list)
    """The ways to what lies among the arguments and is the caller's own, to be looked at for changes."""
    own: list[tuple[Tensor, torch.Generator]] = field(default_factory=list)
    """Generators among the arguments that stand for one of the caller's, with its state."""
    lone: list[torch.Generator] = field(default_factory=list)
    """Generators among the arguments that no other replica was given: the caller's own are drawn from."""
    in_turn: bool = False
    """Whether replicas run one after another, and draw from the default generator itself."""
    ticket: int = 0
    """The `Share` that brought the values of the module's tensors; 0 where they lie in common memory."""
    dice: int | None = None
    """What Python's and NumPy's generators are seeded by; None where they are left as they are."""


class Output(NamedTuple):
    """A `Ran` of which nothing but the output was said."""

    output: Any


@dataclass
class Ran(Order):
    """What one replica's part of a forward came to."""

    PATHS: ClassVar = {"output": "the output of forward", "given": "what forward put into an argument"}
    ALWAYS: ClassVar[int] = 1
    LOOSE: ClassVar = frozenset(
        {"output", "sets", "contents", "written", "apart", "arguments", "given", "made", "moved"},
    )

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
    given: list[tuple[int, tuple[Any, ...], list[tuple[int, Any]]]] = field(default_factory=list)
    """What was changed inside the arguments: the number of the way, the keys, and each item as in `contents`."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """What became of those that need a gradient, with their history."""
    used: list[int] = field(default_factory=list)
    """The arguments that need a gradient and that what comes back was made from."""
    drawn: bool = False
    drawn_home: bool = False
    """Whether numbers were drawn on an accelerator."""
    by_name: bool = False
    """Whether the default generator itself was drawn from, by a way that no stream stands in."""
    drawn_held: list[int] = field(default_factory=list)
    """The generators that were drawn from: of the module, by their numbers."""
    drawn_own: list[int] = field(default_factory=list)
    """The same for those among the arguments, by their places."""
    moved: dict[int, Tensor] = field(default_factory=dict)
    """The states that the other ones among the arguments have now, if they were drawn from."""
    refused: list[int] = field(default_factory=list)
    """Trainable tensors of the table that `forward` wrote to."""
    wrote: list[str] = field(default_factory=list)
    """Globals of the script that `forward` changed."""
    parted: list[str] = field(default_factory=list)
    """Places of containers that `forward` changed and that each replica needs for itself."""


@dataclass
class Back(Order):
    """One replica's part of a backward."""

    ALWAYS: ClassVar[int] = 3
    LOOSE: ClassVar = frozenset({"gradients", "casts"})

    call: int
    """The number of the forward that it belongs to."""
    gradients: dict[int, Tensor]
    """By the number of an output's tensor."""
    seed: int
    wanted: list[int] = field(default_factory=list)
    """Tensors of the table whose gradients are wanted."""
    keep: bool = False
    tokens: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    """Arguments that the caller wrote to since the forward."""
    sources: list[int] = field(default_factory=list)
    """Tensors of the source that were written to since."""
    spent: list[list[int]] = field(default_factory=list)
    """For a forward that was run again: the tokens that backwards of the first one have used up, one after another."""
    hold: bool = False
    """Whether gradients stay on the worker's device, until a `Sum`."""
    casts: tuple[()] | Casts = ()
    """Autocast around whoever asked for it, if there is any."""
    anomaly: int = 0


@dataclass
class WentBack(Order):
    """What one replica's part of a backward came to."""

    LOOSE: ClassVar = frozenset({"inputs", "others"})

    present: list[int] = field(default_factory=list)
    """Tensors of the table whose gradients lie in their slots."""
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of arguments, by their numbers."""
    others: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that have no slot: sparse ones. Of a tensor that is present too, what came later."""
    drawn: bool = False
    held: list[int] = field(default_factory=list)
    """Tensors of the table whose gradients the worker has kept."""


@dataclass
class Join:
    """A place in a group of processes, whose store and whose bell are sent along as descriptors."""

    kind: str
    rank: int
    size: int
    device: torch.device
    variables: dict[str, str | None]
    """The environment in which the group is made; None for what must not be set."""
    first: int = 0
    """The number before that of the first collective: no two collectives of any groups have the same."""


@dataclass
class Share:
    """The tensors of a module get the values that the first member of the group sends."""

    number: int
    """The module's."""
    ticket: int
    pieces: int
    nbytes: int


@dataclass
class Sum:
    """Gradients that were kept are summed over the group; the first member gets the sum."""

    ticket: int
    call: int
    """The backward's; 0 for one that had nothing to do."""
    numbers: list[int | None]
    """The tensors of the table, in the order of the buckets' indices; None for one that is not known."""
    sizes: list[int]
    """Of each in elements."""
    buckets: list[Bucket]
