"""Requests and replies exchanged between the controller and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from instep.devices import Bucket
from instep.runtime.ambient import AutocastState, EncodedAmbientState

# From this process to a worker.
ENVIRONMENT, TENSOR_TABLE, MODULE, ATTRIBUTES, GLOBALS, FORWARD, BACKWARD, REACHABILITY, COLLECTIVE_RESULT, STOP = (
    "place", "table", "module", "set", "globals", "forward", "backward", "reach", "met", "stop",
)  # fmt: skip
DEVICE = "device"
JOIN_GROUP, BROADCAST, REDUCE, FETCH_GRADIENTS = "join", "share", "sum", "hand in"
# From a worker to this process.
COLLECTIVE, DONE, FAILED = "meet", "done", "failed"

EXPECTS_REPLY = frozenset((FORWARD, BACKWARD, REACHABILITY, DEVICE, JOIN_GROUP, REDUCE, FETCH_GRADIENTS))
"""What somebody waits for an answer to."""


@dataclass
class TensorLocation:
    """Where a tensor of the source lies in memory that both processes map."""

    block_id: int
    """0 for a storage that is sent with the table."""
    offset: int
    """In the block; or the number of the storage that is sent."""
    nbytes: int
    """Of the storage."""
    storage_offset: int
    """In the storage, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_copy: bool = False
    """Whether the worker has a copy on its device, which it brings up to the common memory before each call."""


@dataclass
class TensorSpec:
    """One tensor of the source: its class, what is set on it, and where it lies or its values."""

    tensor_type: type
    requires_grad: bool
    attributes: dict[str, Any]
    location: TensorLocation | None
    value: Tensor | None
    on_source_device: bool
    """Whether it lies on the device of the source, and belongs on the worker's there."""


@dataclass
class DeviceRequest:
    """A worker's device, as the process that starts it knows it."""

    device: torch.device
    uuid: str
    """What the driver calls it; empty where it has no name for it."""
    ipc_handle: bytes | None
    """Of memory on it that the worker tries to open; None where that is of no use."""


@dataclass
class TensorTableRequest:
    """The tensors of a module, which are known by their places in the table from then on."""

    module_id: int
    device: torch.device
    """The worker's."""
    tensors: list[TensorSpec]
    storages: list[Tensor]
    """Storages that lie in no common memory, as bytes."""
    blocks: list[tuple[int, int]]
    """The number and the bytes of each block of memory whose descriptor is sent along."""
    gradient_slots: tuple[int, list[tuple[int, int]]]
    """The bytes of the memory for gradients, whose descriptor is the last one, and where each tensor's goes."""
    ipc_handles: list[tuple[int, int, bytes]] = field(default_factory=list)
    """The number, the bytes and the handle of each block of memory on the worker's device."""
    gradient_slots_handle: bytes | None = None
    """Of the memory for gradients, where that lies on the worker's device: then no descriptor comes for it."""
    has_doorbell: bool = False
    """Whether the worker rings for large gradients; the descriptor for that comes before the last."""


@dataclass
class ModuleRequest:
    """The module itself, around the tensors of its table."""

    PATHS: ClassVar = {"module": "the module"}

    module_id: int
    module: Any
    source_device: torch.device
    """The device of the source."""
    sync_batchnorm: bool | None
    """Whether batch normalisation looks at the whole batch; None for no such layers to dress."""
    private_containers: list[str]
    """Places of containers that each replica has for itself."""
    generators: list[torch.Generator]
    """The generators that the module holds, which are known by their places here from then on."""


@dataclass
class AttributesRequest:
    """Attributes that were set since, and nothing else."""

    PATHS: ClassVar = {"values": "attribute "}

    targets: list[tuple[int, str]]
    """The module's index and the name of each."""
    values: dict[str, Any]
    """In the same order, by what they are called from the outermost module on."""
    generators: list[torch.Generator]
    """Generators in them, whose places come after those that are known."""


class PositionalMessage:
    """A message that goes as the bare values of its fields: both sides know what they are asked for in what order.

    Those at the end that say nothing are left out, so what is seldom said comes last.
    """

    REQUIRED_FIELDS: ClassVar[int] = 0
    """How many are said whatever they are."""
    USER_FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Those that may hold anything: what is the user's, and tensors. The others hold numbers and texts, and lists and
    tuples of them, which were made for the order alone."""

    def fields(self) -> tuple[Any, ...]:
        values = tuple(self.__dict__.values())
        count = len(values)
        while count > self.REQUIRED_FIELDS and not values[count - 1]:
            count -= 1
        return values[:count]


@dataclass
class ForwardRequest(PositionalMessage):
    """One replica's part of a forward."""

    PATHS: ClassVar = {"args": "argument ", "kwargs": "argument "}
    REQUIRED_FIELDS: ClassVar[int] = 10
    USER_FIELDS: ClassVar = frozenset(
        {
            "args",
            "kwargs",
            "ambient",
            "generator_states",
            "carried_state",
            "tensor_values",
            "argument_generators",
            "exclusive_generators",
        }
    )

    module_id: int
    method: str
    args: list[Any]
    replica_index: int
    shard_sizes: list[int]
    num_replicas: int
    refresh_state: bool
    seed: int
    """What the streams of the call are seeded by."""
    device_seed: int
    """What those of accelerators are seeded by."""
    released: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Calls and modules that nobody needs any longer."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    ambient: EncodedAmbientState | None = None
    """None for the same as in the message before."""
    args_on_host: bool = False
    """Whether arguments lie on the host, from where the worker brings them to its device."""
    generator_states: dict[int, Tensor] = field(default_factory=dict)
    """The states of the generators that the module holds, by their numbers."""
    carried_state: list[tuple[int, str, Any]] = field(default_factory=list)
    tensor_values: dict[int, Tensor] = field(default_factory=dict)
    """Values of tensors of the table that lie in no common memory."""
    watched_arguments: list[tuple[int, ...]] = field(default_factory=list)
    """The ways to what lies among the arguments and is the caller's own, to be looked at for changes."""
    argument_generators: list[tuple[Tensor, torch.Generator]] = field(default_factory=list)
    """Generators among the arguments that stand for one of the caller's, with its state."""
    exclusive_generators: list[torch.Generator] = field(default_factory=list)
    """Generators among the arguments that no other replica was given: the caller's own are drawn from."""
    serialized: bool = False
    """Whether replicas run one after another, and draw from the default generator itself."""
    sequence_number: int = 0
    """The `Share` that brought the values of the module's tensors; 0 where they lie in common memory."""
    python_seed: int | None = None
    """What Python's and NumPy's generators are seeded by; None where they are left as they are."""


class OutputOnlyReply(NamedTuple):
    """A `Ran` of which nothing but the output was said."""

    output: Any


@dataclass
class ForwardReply(PositionalMessage):
    """What one replica's part of a forward came to."""

    PATHS: ClassVar = {"output": "the output of forward"}
    REQUIRED_FIELDS: ClassVar[int] = 1
    USER_FIELDS: ClassVar = frozenset(
        {
            "output",
            "attributes",
            "containers",
            "written_tensors",
            "private_parameters",
            "written_arguments",
            "written_with_grad",
            "exclusive_generator_states",
        },
    )

    output: Any = None
    structure_changed: bool = False
    attributes: list[tuple[int, str, Any, bool]] = field(default_factory=list)
    """Attributes and buffers that were set: the module's index, the name, the value, whether it is a buffer."""
    containers: list[tuple[str, tuple[Any, ...], list[tuple[int, Any]]]] = field(default_factory=list)
    """Containers that were changed: the place, the keys, and each item, by its place before or as a new one."""
    written_tensors: dict[int, Tensor] = field(default_factory=dict)
    """Values of tensors of the table that were written in place."""
    private_parameters: dict[int, Tensor] = field(default_factory=dict)
    """Values of weights that the worker has for itself because `forward` rewrites them."""
    written_arguments: dict[int, Tensor] = field(default_factory=dict)
    """Values of arguments that were written in place, by their numbers."""
    changed_arguments: list[int] = field(default_factory=list)
    """Which of `watched_arguments` were changed in place."""
    written_with_grad: dict[int, Tensor] = field(default_factory=dict)
    """What became of those that need a gradient, with their history."""
    used_arguments: list[int] = field(default_factory=list)
    """The arguments that need a gradient and that what comes back was made from."""
    host_rng_used: bool = False
    device_rng_used: bool = False
    """Whether numbers were drawn on an accelerator."""
    default_rng_used: bool = False
    """Whether the default generator itself was drawn from, by a way that no stream stands in."""
    module_generators_used: list[int] = field(default_factory=list)
    """The generators that were drawn from: of the module, by their numbers."""
    argument_generators_used: list[int] = field(default_factory=list)
    """The same for those among the arguments, by their places."""
    exclusive_generator_states: dict[int, Tensor] = field(default_factory=dict)
    """The states that the other ones among the arguments have now, if they were drawn from."""
    written_parameters: list[int] = field(default_factory=list)
    """Trainable tensors of the table that `forward` wrote to."""
    written_globals: list[str] = field(default_factory=list)
    """Globals of the script that `forward` changed."""
    private_containers: list[str] = field(default_factory=list)
    """Places of containers that `forward` changed and that each replica needs for itself."""


@dataclass
class BackwardRequest(PositionalMessage):
    """One replica's part of a backward."""

    REQUIRED_FIELDS: ClassVar[int] = 3
    USER_FIELDS: ClassVar = frozenset({"gradients", "autocast"})

    call_id: int
    """The number of the forward that it belongs to."""
    gradients: dict[int, Tensor]
    """By the number of an output's tensor."""
    seed: int
    wanted_tensors: list[int] = field(default_factory=list)
    """Tensors of the table whose gradients are wanted."""
    retain_graph: bool = False
    collective_tokens: list[int] = field(default_factory=list)
    written_arguments: list[int] = field(default_factory=list)
    """Arguments that the caller wrote to since the forward."""
    written_tensors: list[int] = field(default_factory=list)
    """Tensors of the source that were written to since."""
    consumed_tokens: list[list[int]] = field(default_factory=list)
    """For a forward that was run again: the tokens that backwards of the first one have used up, one after another."""
    keep_gradients: bool = False
    """Whether gradients stay on the worker's device, until a `Sum`."""
    autocast: tuple[()] | AutocastState = ()
    """Autocast around whoever asked for it, if there is any."""
    anomaly_mode: int = 0


@dataclass
class BackwardReply(PositionalMessage):
    """What one replica's part of a backward came to."""

    USER_FIELDS: ClassVar = frozenset({"input_gradients", "other_gradients"})

    filled_slots: list[int] = field(default_factory=list)
    """Tensors of the table whose gradients lie in their slots."""
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of arguments, by their numbers."""
    other_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that have no slot: sparse ones. Of a tensor that is present too, what came later."""
    host_rng_used: bool = False
    kept_gradients: list[int] = field(default_factory=list)
    """Tensors of the table whose gradients the worker has kept."""


@dataclass
class JoinGroupRequest:
    """A place in a group of processes, whose store and whose bell are sent along as descriptors."""

    backend: str
    rank: int
    world_size: int
    device: torch.device
    environment: dict[str, str | None]
    """The environment in which the group is made; None for what must not be set."""
    sequence_base: int = 0
    """The number before that of the first collective: no two collectives of any groups have the same."""


@dataclass
class BroadcastRequest:
    """The tensors of a module get the values that the first member of the group sends."""

    module_id: int
    """The module's."""
    sequence_number: int
    num_tensors: int
    nbytes: int


@dataclass
class ReduceRequest:
    """Gradients that were kept are summed over the group; the first member gets the sum."""

    sequence_number: int
    backward_id: int
    """The backward's; 0 for one that had nothing to do."""
    tensor_indices: list[int | None]
    """The tensors of the table, in the order of the buckets' indices; None for one that is not known."""
    numels: list[int]
    """Of each in elements."""
    buckets: list[Bucket]
