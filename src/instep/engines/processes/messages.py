"""Requests and replies exchanged between the controller and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from instep.devices import Bucket
from instep.runtime.ambient import AutocastState, EncodedAmbientState

# Message kinds that the controller sends; at most 16 characters.
ENVIRONMENT, DEVICE, STOP = "environment", "device", "stop"
TENSOR_TABLE, MODULE, ATTRIBUTES, GLOBALS = "tensor table", "module", "attributes", "globals"
ROW_MEMORY = "row memory"
FORWARD, BACKWARD, REACHABILITY, COLLECTIVE_RESULT = "forward", "backward", "reachability", "collective done"
PREPARE, PREPARED_FORWARD, PREPARED_BACKWARD = "prepare", "prepared forward", "prepared backwd"
JOIN_GROUP, BROADCAST, REDUCE, FETCH_GRADIENTS = "join group", "broadcast", "reduce", "fetch gradients"
# Message kinds that a worker sends.
COLLECTIVE, DONE, FAILED = "collective", "done", "failed"

EXPECTS_REPLY = frozenset(
    (
        FORWARD,
        PREPARED_FORWARD,
        BACKWARD,
        PREPARED_BACKWARD,
        REACHABILITY,
        DEVICE,
        JOIN_GROUP,
        REDUCE,
        FETCH_GRADIENTS,
    )
)
"""Message kinds that the worker must answer with `DONE` or `FAILED`."""


@dataclass
class TensorLocation:
    """Where a tensor of the source module is, in memory that both processes map."""

    block_id: int
    """0 if the storage is sent with the table."""
    offset: int
    """Byte offset of the storage in the block, or the index of the storage that is sent."""
    nbytes: int
    """Size of the storage."""
    storage_offset: int
    """Offset of the tensor in its storage, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_copy: bool = False
    """Whether the worker computes with a copy on its device, which it refreshes before each call."""


@dataclass
class TensorSpec:
    """Describes one tensor of the source module: its type, its attributes, and its location or its value."""

    tensor_type: type
    requires_grad: bool
    attributes: dict[str, Any]
    location: TensorLocation | None
    value: Tensor | None
    on_source_device: bool
    """Whether the tensor is on the source module's device; the worker's copy is then on the worker's device."""


@dataclass
class DeviceRequest:
    """Selects the worker's device."""

    device: torch.device
    uuid: str
    """The device's UUID; empty if the driver reports none."""
    ipc_handle: bytes | None
    """Handle of device memory that the worker opens as a test of CUDA IPC; None to skip the test. The descriptor of the
    flags for streams is sent along."""


@dataclass
class TensorTableRequest:
    """The tensors of a module. Later messages refer to them by their index in `tensors`."""

    module_id: int
    device: torch.device
    """The worker's device."""
    tensors: list[TensorSpec]
    storages: list[Tensor]
    """Storages that are not in shared memory, as byte tensors."""
    blocks: list[tuple[int, int]]
    """The id and size of each shared memory block; its file descriptor is sent along."""
    gradient_slots: tuple[int, list[tuple[int, int]]]
    """Size of the gradient memory, whose descriptor is the last one, and `(tensor index, offset)` of each slot."""
    ipc_handles: list[tuple[int, int, bytes]] = field(default_factory=list)
    """The id, size and IPC handle of each block of memory on the worker's device."""
    gradient_slots_handle: bytes | None = None
    """IPC handle of the gradient memory if it is on the worker's device; no descriptor is sent then."""
    has_doorbell: bool = False
    """Whether the worker signals large gradients by a doorbell, whose descriptor is the last but one."""


@dataclass
class ModuleRequest:
    """The module; its tensors refer to the tensor table."""

    PATHS: ClassVar = {"module": "the module"}

    module_id: int
    module: Any
    source_device: torch.device
    sync_batchnorm: bool | None
    """Whether batch normalization is synchronized; None to leave the layers as they are."""
    private_containers: list[str]
    """Paths of containers of which each replica has a copy."""
    generators: list[torch.Generator]
    """Generators that the module holds. Later messages refer to them by index."""


@dataclass
class AttributesRequest:
    """Attributes that were set on the module since it was sent."""

    PATHS: ClassVar = {"values": "attribute "}

    targets: list[tuple[int, str]]
    """The submodule's index and the attribute's name, for each value."""
    values: dict[str, Any]
    """The values in the same order, by dotted name."""
    generators: list[torch.Generator]
    """New generators among the values; their indices follow those already known."""


class PositionalMessage:
    """A message that is sent as the values of its fields, in order.

    Trailing fields with false values are omitted, so rarely used fields come last.
    """

    REQUIRED_FIELDS: ClassVar[int] = 0
    """The number of leading fields that are always sent."""
    USER_FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Fields that may hold tensors or objects of the user. All others hold numbers, strings, and lists and tuples of
    them."""

    def fields(self) -> tuple[Any, ...]:
        values = tuple(self.__dict__.values())
        count = len(values)
        while count > self.REQUIRED_FIELDS and not values[count - 1]:
            count -= 1
        return values[:count]


@dataclass
class ForwardRequest(PositionalMessage):
    """Runs one replica's forward."""

    PATHS: ClassVar = {"args": "argument ", "kwargs": "argument "}
    REQUIRED_FIELDS: ClassVar[int] = 11
    USER_FIELDS: ClassVar = frozenset(
        {
            "args",
            "kwargs",
            "ambient",
            "gathered_rows",
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
    """Seed of the call's CPU random streams."""
    device_seed: int
    """Seed of the call's accelerator random streams."""
    released: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Ids of calls, and of modules, that the worker can drop."""
    rows: tuple[int, ...] = ()
    """The `RowRequest` of the call; empty if rows are exchanged by messages."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    ambient: EncodedAmbientState | None = None
    """None if it is the same as in the previous request."""
    args_on_host: bool = False
    """Whether the arguments are on the host; the worker moves them to its device."""
    generator_states: dict[int, Tensor] = field(default_factory=dict)
    """States of the module's generators, by index."""
    carried_state: list[tuple[int, str, Any]] = field(default_factory=list)
    """This replica's shards of carried state: the submodule's index, the attribute, the shard."""
    tensor_values: dict[int, Tensor] = field(default_factory=dict)
    """Values of module tensors that are not in shared memory, by index."""
    watched_arguments: list[tuple[Any, ...]] = field(default_factory=list)
    """Paths of the caller's mutable objects among the arguments (see `MutableArgument.path`)."""
    argument_generators: list[tuple[Tensor, torch.Generator]] = field(default_factory=list)
    """Generators among the arguments that several replicas receive, each with the caller's state."""
    exclusive_generators: list[torch.Generator] = field(default_factory=list)
    """Generators among the arguments that only this replica receives."""
    serialized: bool = False
    """Whether replicas run one after another and use the default generator itself."""
    sequence_number: int = 0
    """The `BroadcastRequest` that sent the module's tensors; 0 if they are in shared memory."""
    python_seed: int | None = None
    """Seed of Python's and NumPy's generators; None to leave them alone."""
    gathered_rows: list[Tensor] = field(default_factory=list)
    """For a replay: the results of the first calls of `Group.all_gather`."""


@dataclass
class PrepareRequest:
    """What forwards of one shape have in common. A `PreparedForwardRequest` refers to it by the id of the message."""

    module_id: int
    method: str
    replica_index: int
    shard_sizes: list[int]
    num_replicas: int
    num_positional: int
    keywords: list[str]
    """The names of the arguments after the positional ones."""
    wanted_tensors: list[int]
    """Module tensors whose gradients are needed, by index."""
    ambient: EncodedAmbientState
    captures: bool
    """Whether backward captures gradients instead of accumulating them, unless forward may have used checkpoints."""

    def forward_request(self, values: Sequence[Any], request: PreparedForwardRequest) -> ForwardRequest:
        """The general request for a forward with these arguments."""
        return ForwardRequest(
            self.module_id,
            self.method,
            list(values[: self.num_positional]),
            self.replica_index,
            self.shard_sizes,
            self.num_replicas,
            True,
            request.seed,
            request.device_seed,
            kwargs=dict(zip(self.keywords, values[self.num_positional :], strict=True)),
            ambient=self.ambient,
            python_seed=request.python_seed,
        )


class PreparedForwardRequest(NamedTuple):
    """Runs a forward that a `PrepareRequest` describes."""

    number: int
    """The id of the `PrepareRequest`."""
    values: list[Any]
    """The arguments, positional ones first, as `encode_plain` encodes them."""
    seed: int
    device_seed: int
    released: tuple[Sequence[int], Sequence[int]]
    python_seed: int | None
    transfer: tuple[Any, ...] | None
    """How tensors on a device are sent (see `CudaIpcChannel`)."""


class PreparedBackwardRequest(NamedTuple):
    """Runs the backward of a prepared forward, in the usual case. The gradients of the outputs are its tensors.

    A reply without a body, or with CUDA IPC the reply None, says that all `wanted_tensors` have gradients, which are in
    their slots.
    """

    call_id: int
    """The forward's id."""
    outputs: list[int]
    """The indices of the output tensors that have gradients."""
    seed: int
    retain_graph: bool
    anomaly_mode: int
    transfer: tuple[Any, ...] | None
    """How tensors on a device are sent (see `CudaIpcChannel`)."""

    def backward_request(self, gradients: Sequence[Tensor], wanted_tensors: list[int]) -> BackwardRequest:
        """The general request for this backward."""
        return BackwardRequest(
            self.call_id,
            dict(zip(self.outputs, gradients, strict=True)),
            self.seed,
            wanted_tensors=wanted_tensors,
            retain_graph=self.retain_graph,
            anomaly_mode=self.anomaly_mode,
        )


class RowRequest(NamedTuple):
    """How a call exchanges rows through shared memory."""

    memory_id: int
    base: int
    """The number before the call's first collective."""
    num_replayed: int
    """The number of collectives that were completed before the request was sent."""
    device_base: int
    """The number before the call's first collective on a device; 0 if rows on devices are exchanged by messages."""


class OutputOnlyReply(NamedTuple):
    """A `ForwardReply` that has only an output."""

    output: Any


@dataclass
class ForwardReply(PositionalMessage):
    """The result of one replica's forward."""

    PATHS: ClassVar = {"output": "the output of forward"}
    REQUIRED_FIELDS: ClassVar[int] = 1
    USER_FIELDS: ClassVar = frozenset(
        {
            "output",
            "attributes",
            "containers",
            "written_tensors",
            "statistics",
            "private_parameters",
            "written_arguments",
            "written_with_grad",
            "exclusive_generator_states",
        },
    )

    output: Any = None
    device_rng_used: bool = False
    """Whether random numbers were drawn on an accelerator. The second field: see `send_output`."""
    structure_changed: bool = False
    attributes: list[tuple[int, str, Any, bool]] = field(default_factory=list)
    """Attributes that were set: the submodule's index, the name, the value, whether it is a buffer."""
    containers: list[tuple[str, tuple[Any, ...], list[tuple[int, Any]]]] = field(default_factory=list)
    """Containers that were changed: the path, the keys, and the items as `encode_items` encodes them."""
    written_tensors: dict[int, Tensor] = field(default_factory=dict)
    """Values of module tensors that were written in place, by index."""
    statistics: tuple[()] | tuple[list[int], list[Tensor]] = ()
    """Running statistics that were written: their indices, and the blocks that have to be sent."""
    private_parameters: dict[int, Tensor] = field(default_factory=dict)
    """Values of parameters of which the worker has a private copy because `forward` overwrites them."""
    written_arguments: dict[int, Tensor] = field(default_factory=dict)
    """Values of argument tensors that were written in place, by index."""
    changed_arguments: list[int] = field(default_factory=list)
    """Which of `watched_arguments` were changed in place."""
    written_with_grad: dict[int, Tensor] = field(default_factory=dict)
    """The written arguments that require grad, with their graph."""
    used_arguments: list[int] = field(default_factory=list)
    """Arguments requiring grad that the outputs depend on."""
    host_rng_used: bool = False
    default_rng_used: bool = False
    """Whether the default generator was used directly, where no stream replaces it."""
    module_generators_used: list[int] = field(default_factory=list)
    """Generators of the module that were used, by index."""
    argument_generators_used: list[int] = field(default_factory=list)
    """Entries of `argument_generators` that were used, by index."""
    exclusive_generator_states: dict[int, Tensor] = field(default_factory=dict)
    """New states of the `exclusive_generators` that were used, by index."""
    written_parameters: list[int] = field(default_factory=list)
    """Parameters that `forward` wrote to, by index."""
    written_globals: list[str] = field(default_factory=list)
    """Names of the script's globals that `forward` changed."""
    private_containers: list[str] = field(default_factory=list)
    """Paths of shared containers that `forward` changed: each replica needs a copy of them."""


@dataclass
class BackwardRequest(PositionalMessage):
    """Runs one replica's backward."""

    REQUIRED_FIELDS: ClassVar[int] = 4
    USER_FIELDS: ClassVar = frozenset({"gradients", "autocast", "gathered_rows"})

    call_id: int
    """The forward's id."""
    gradients: dict[int, Tensor]
    """Gradients of the outputs, by the index of the output tensor."""
    seed: int
    rows: tuple[int, ...] = ()
    """The `RowRequest` of the backward; empty if rows are exchanged by messages."""
    wanted_tensors: list[int] = field(default_factory=list)
    """Module tensors whose gradients are needed, by index."""
    retain_graph: bool = False
    collective_tokens: list[int] = field(default_factory=list)
    written_arguments: list[int] = field(default_factory=list)
    """Arguments that the caller has written to since the forward, by index."""
    written_tensors: list[int] = field(default_factory=list)
    """Module tensors that have been written to since the forward, by index."""
    consumed_tokens: list[list[int]] = field(default_factory=list)
    """For a replayed forward: the collective tokens that each earlier backward has consumed."""
    keep_gradients: bool = False
    """Whether the worker keeps the gradients on its device until a `ReduceRequest`."""
    autocast: tuple[()] | AutocastState = ()
    """Autocast state of the caller of backward, if enabled."""
    anomaly_mode: int = 0
    gathered_rows: list[Tensor] = field(default_factory=list)
    """For a backward that is run again: the results of the first calls of `Group.all_gather`."""
    reduction: tuple[Any, ...] = ()
    """How the gradients are reduced while the backward runs (see `BackwardReduction`); empty if they are not."""
    captures: bool = False
    """Whether gradients are captured instead of accumulated, unless forward may have used reentrant checkpoints."""

    @property
    def is_reduction_ordered(self) -> bool:
        """Whether the parent's stream waits for the reduction."""
        return bool(self.reduction) and BackwardReduction(*self.reduction).stream_ordered


class BackwardReduction(NamedTuple):
    """The reduction of gradients to rank 0 that begins with a backward."""

    sequence_number: int
    numel: int
    """The number of elements of all buckets."""
    stream_ordered: bool
    """Whether the parent's stream waits for the worker's, and so for its part of the reduction."""


@dataclass
class BackwardReply(PositionalMessage):
    """The result of one replica's backward."""

    USER_FIELDS: ClassVar = frozenset({"input_gradients", "other_gradients"})

    filled_slots: list[int] = field(default_factory=list)
    """Module tensors whose gradients are in their slots, by index."""
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of arguments, by index."""
    other_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that do not fit a slot (sparse ones), or that were added after the slot was signalled."""
    host_rng_used: bool = False
    kept_gradients: list[int] = field(default_factory=list)
    """Module tensors whose gradients the worker keeps, by index."""
    is_reduced: bool = False
    """Whether the worker takes part in their reduction, with their final values."""


@dataclass
class JoinGroupRequest:
    """Joins a process group. The descriptors of its store and of its abort eventfd are sent along."""

    backend: str
    rank: int
    world_size: int
    device: torch.device
    environment: dict[str, str | None]
    """Environment variables to set while the group is created; None to unset one."""
    sequence_base: int = 0
    """The sequence number before the first collective. Sequence numbers are unique across groups."""


@dataclass
class BroadcastRequest:
    """Receives the values of a module's tensors, broadcast by rank 0."""

    module_id: int
    sequence_number: int
    num_tensors: int
    nbytes: int


@dataclass
class ReduceRequest:
    """Reduces kept gradients to rank 0."""

    sequence_number: int
    backward_id: int
    """The backward that kept the gradients; 0 if this worker kept none."""
    tensor_indices: list[int | None]
    """Module tensors in the order of the buckets' indices; None for a tensor that this worker does not have."""
    numels: list[int]
    """The number of elements of each tensor."""
    buckets: tuple[Bucket, ...]
