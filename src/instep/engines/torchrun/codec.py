"""Encodes the result of a rank's forward for the other ranks, and applies what they have sent."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from instep.engines.base import ReplicaCall
from instep.engines.plain_values import decode_plain, encode_plain
from instep.errors import CannotCross
from instep.replicas.diff import MISSING, STRUCTURE_CHANGED, AttributeChange, Changes, ContainerChange
from instep.replicas.object_graph import is_unchanged, read_contents, write_contents
from instep.replicas.replica import RemoteEffects, Replica, ReplicaResult
from instep.replicas.stand_in import ReplicaStandIn
from instep.replicas.state.batch_norm import WrittenStatistics
from instep.replicas.state.container_encoding import decode_contents, encode_items
from instep.replicas.state.rules import is_parameter_cache
from instep.replicas.write_watch import WriteDetector
from instep.runtime.modes import NO_CONTEXT
from instep.structure.shapes import is_plain_tensor
from instep.structure.tree import tensors_in

_MODULE, _TENSOR, _DEVICE = "module", "tensor", "device"

EncodedValue = bytes | tuple[Any, list[bool]]
"""A pickle; or a plain value (see `plain_values`), with the `requires_grad` of its tensors."""


class _Pickler(pickle.Pickler):
    """Pickles a value without its dense tensors, which are sent apart, and without tensors of the module."""

    def __init__(self, file: io.BytesIO, device: torch.device, replica: Replica | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._replica, self._device = replica, device
        self._indices: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, Tensor):
            if self._replica is not None and id(value) in self._replica.tensors.sources:
                return _MODULE, next(n for n, tensor in enumerate(_module_tensors(self._replica)) if tensor is value)
            if is_plain_tensor(value) and (value.is_cpu or value.device.type == self._device.type):
                index = self._indices.setdefault(id(value), len(self.tensors))
                if index == len(self.tensors):
                    self.tensors.append(value)
                return _TENSOR, index, value.requires_grad
        elif isinstance(value, torch.device) and value == self._device:
            return (_DEVICE,)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, tensors: Sequence[Tensor], device: torch.device, replica: Replica | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._device, self._replica = tensors, device, replica
        self._built: dict[int, Tensor] = {}

    def persistent_load(self, key: tuple[Any, ...]) -> Any:
        if key[0] == _DEVICE:
            return self._device
        if key[0] == _MODULE:
            assert self._replica is not None
            return _module_tensors(self._replica)[key[1]]
        _, index, requires_grad = key
        if index not in self._built:
            self._built[index] = _received(self._tensors[index], requires_grad)
        return self._built[index]


@dataclass
class RankGraph:
    """The autograd graph of a replica that another rank runs."""

    operation: str
    """The forward, in messages."""
    sizes: Sequence[int]
    """The number of samples of each rank."""
    num_tokens: int
    """The number of its collectives through which gradients flow."""
    received_gradients: list[Tensor | None] | None = None

    def keep_inputs(self, positions: Sequence[int]) -> None:
        """The other rank keeps its inputs itself."""


@dataclass
class RankResult:
    """What a rank's forward returned and changed, in terms that every rank knows."""

    output: Any = None
    structure_changed: bool = False
    attributes: list[tuple[int, str, Any, bool]] = field(default_factory=list)
    """Attributes that were set: the submodule's index, the name, the value, whether it is a buffer."""
    containers: list[tuple[str, tuple[Any, ...], list[tuple[int, Any]]]] = field(default_factory=list)
    """Containers that were changed: the path, the keys, and the items as `encode_items` encodes them."""
    written_state: dict[int, Tensor] = field(default_factory=dict)
    """Values of state tensors that were written in place, by index."""
    statistics: tuple[tuple[int, ...], Sequence[Tensor], bool, bool] | None = None
    """The fields of `WrittenStatistics`, with indices of state tensors as keys."""
    counters: list[Tensor] = field(default_factory=list)
    """The numbers of batches of the statistics, in the order of the last keys."""
    private_parameters: dict[int, Tensor] = field(default_factory=dict)
    """Values of trainable tensors of which every replica has a copy, by index."""
    written_arguments: dict[int, Tensor] = field(default_factory=dict)
    """Values of argument tensors that were written in place, by index."""
    num_tokens: int = 0
    """The number of collectives through which gradients flow."""
    host_rng_used: bool = False
    device_rng_used: bool = False
    default_rng_used: bool = False
    """Whether the default generator was used directly, where no stream replaces it."""
    generators_used: list[int] = field(default_factory=list)
    """Generators of the module or the arguments that were used, by index."""


class ArgumentWrites:
    """Finds the argument tensors that a forward writes in place."""

    def __init__(self, call: ReplicaCall, index: int) -> None:
        self._tensors = list(tensors_in(call.arguments[index]))
        self._detector = WriteDetector.from_pairs(enumerate(self._tensors))

    def written(self) -> dict[int, Tensor]:
        """The new values by index. Those that require a gradient have a graph, as outputs have."""
        return {index: self._tensors[index] for index in self._detector.written()}


def encode_result(
    call: ReplicaCall,
    index: int,
    result: ReplicaResult,
    writes: ArgumentWrites,
    *,
    with_output: bool = True,
    with_counters: bool = True,
) -> tuple[EncodedValue, list[Tensor]]:
    """Encode the result of this rank's forward. Only idle ranks need counters: the others count themselves."""
    replica = call.replicas[index]
    values: dict[str, Any] = {"output": result.output if with_output else None}  # fields of `RankResult`
    if result.written_state or result.statistics is not None:
        numbers = {id(source): number for number, (source, _) in enumerate(replica.tensors.state)}
        values["written_state"] = {numbers[id(source)]: copy.detach() for source, copy in result.written_state}
        if result.statistics is not None:
            keys, blocks, compare, by_user = result.statistics
            values["statistics"] = tuple(numbers[key] for key in keys), list(blocks), compare, by_user
            if with_counters and replica.statistics is not None:
                values["counters"] = replica.statistics.counters
    if private := replica.tensors.private_weights:
        values["private_parameters"] = {
            number: copy.detach() for number, (source, copy) in enumerate(replica.trainable) if id(source) in private
        }
    if result.changes:
        values["structure_changed"] = result.changes.is_structural
        values["attributes"] = [
            (change.module_index, change.name, change.new, change.is_buffer)
            for change in result.changes.attributes
            if not is_parameter_cache(replica.source_modules[change.module_index], change.name)
        ]
        if result.changes.containers:
            values["containers"] = _encode_containers(replica, result.changes.containers)
    if written := writes.written():
        values["written_arguments"] = written
    if result.context is not None and result.context.tokens:
        values["num_tokens"] = len(result.context.tokens)
    values |= _rng_use(call, index)
    return encode_value(values, replica.device, replica, "the output of forward, or what it sets on the module,")


def _encode_containers(
    replica: Replica, changes: Sequence[ContainerChange]
) -> list[tuple[str, tuple[Any, ...], list[tuple[int, Any]]]]:
    paths = {id(clone): str(replica.container_paths.get(id(source))) for source, _, clone in replica.cloner.containers}
    return [
        (
            paths[id(change.container)],
            change.after.keys,
            list(encode_items(change.container, change.before.items, change.after.items)),
        )
        for change in changes
    ]


def _rng_use(call: ReplicaCall, index: int) -> dict[str, Any]:
    """The fields of `RankResult` for the generators that were used."""
    call.rng.report_use()
    caller, pairs = call.rng.caller, call.rng.generator_pairs[index]
    uses = {
        "host_rng_used": caller.cpu.streams_used,
        "device_rng_used": caller.accelerator_seed is not caller.cpu and caller.accelerator_seed.streams_used,
        "default_rng_used": caller.cpu.record_use(),
        "generators_used": [n for n, (source, _) in enumerate(pairs) if caller.track(source).streams_used],
    }
    return {name: value for name, value in uses.items() if value}


def encode_value(
    value: Any, device: torch.device, replica: Replica | None = None, what: str = "an argument of the call"
) -> tuple[EncodedValue, list[Tensor]]:
    """Encode a value without its dense tensors, which are returned apart. Those of the replica's module are not sent.

    `what` names the value in an error.
    """
    plain = encode_plain(value)
    if plain is not None and all(_is_sent(tensor, device, replica) for tensor in plain[1]):
        content, tensors = plain
        return (content, [tensor.requires_grad for tensor in tensors]), tensors
    file = io.BytesIO()
    pickler = _Pickler(file, device, replica)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CannotCross(
            f"{what} cannot be sent to the other ranks: {error}\n"
            f"Use tensors, numbers, strings, and objects of classes that are defined at the top level of a module."
        ) from error
    return file.getvalue(), pickler.tensors


def _is_sent(tensor: Tensor, device: torch.device, replica: Replica | None) -> bool:
    """Whether a plain tensor is sent as its data: it is on the CPU or this device, and not one of the module's own."""
    is_own = replica is not None and id(tensor) in replica.tensors.sources
    return not is_own and (tensor.is_cpu or tensor.device.type == device.type)


def decode_value(
    encoded: EncodedValue, tensors: Sequence[Tensor], device: torch.device, replica: Replica | None = None
) -> Any:
    """The value that another rank has encoded."""
    if isinstance(encoded, bytes):
        return _Unpickler(encoded, tensors, device, replica).load()
    content, requires_grad = encoded
    return decode_plain(content, list(map(_received, tensors, requires_grad)))


def _received(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A tensor of a message. Those of one message share memory; with `.data` each has a version counter of its own."""
    return tensor.data.requires_grad_(requires_grad)


def _module_tensors(replica: Replica) -> list[Tensor]:
    """The replica's tensors, in an order that is the same on all ranks."""
    return [copy for _, copy in (*replica.trainable, *replica.tensors.state)]


def decode_result(call: ReplicaCall, index: int, encoded: EncodedValue, tensors: Sequence[Tensor]) -> RankResult:
    """Decode the result of another rank's forward."""
    replica = call.replicas[index]
    return RankResult(**decode_value(encoded, tensors, replica.device, replica))


def apply_result(call: ReplicaCall, index: int, encoded: RankResult, *, idle: bool = False) -> ReplicaResult:
    """Show another rank's result on its stand-in. An `idle` rank has no replica in the call."""
    replica = call.replicas[index]
    assert isinstance(replica, ReplicaStandIn)
    _apply_rng_use(encoded, call, index)
    arguments = list(tensors_in(call.arguments[index])) if encoded.written_arguments else []
    with torch.no_grad() if arguments or encoded.private_parameters else NO_CONTEXT:
        for number, value in encoded.written_arguments.items():
            target = arguments[number].data if value.requires_grad else arguments[number]
            target.copy_(value)
        for number, value in encoded.private_parameters.items():
            replica.trainable[number][1].data.copy_(value)
    if encoded.structure_changed:
        return ReplicaResult(changes=STRUCTURE_CHANGED)
    attributes = []
    for module_index, name, value, is_buffer in encoded.attributes:
        module = replica.modules[module_index]
        table = module._buffers if is_buffer else module.__dict__
        attributes.append(AttributeChange(module_index, name, table.get(name, MISSING), value, is_buffer))
        table[name] = value
    sources = [source for source, _ in replica.tensors.state]
    values = {id(sources[number]): value for number, value in encoded.written_state.items()}
    statistics = None
    if encoded.statistics is not None:
        keys, blocks, compare, by_user = encoded.statistics
        statistics = WrittenStatistics(tuple(id(sources[number]) for number in keys), blocks, compare, by_user)
        if idle:  # no replica of this process has them
            values.update(statistics.split({id(source): source for source in sources}))
            values.update(zip(statistics.keys[len(keys) - len(encoded.counters) :], encoded.counters, strict=True))
            statistics = None
    written = replica.write_state(values)
    return ReplicaResult(
        output=encoded.output,
        changes=Changes(False, attributes, _apply_containers(replica, encoded)),
        written_state=written,
        statistics=statistics,
        remote=RemoteEffects(
            written_arguments={
                id(arguments[number]): value
                for number, value in encoded.written_arguments.items()
                if value.requires_grad
            }
        ),
    )


def _apply_containers(replica: ReplicaStandIn, encoded: RankResult) -> list[ContainerChange]:
    if not encoded.containers:
        return []
    copies = {str(replica.container_paths.get(id(source))): copy for source, _, copy in replica.cloner.containers}
    changes = []
    for path, keys, items in encoded.containers:
        container = copies[path]
        before = read_contents(container)
        after = decode_contents(before, keys, items)
        if not is_unchanged(container, after):
            changes.append(ContainerChange(container, before, after))
            write_contents(container, after)
    return changes


def _apply_rng_use(encoded: RankResult, call: ReplicaCall, index: int) -> None:
    """Mark the generators that the rank used as used, so that all ranks advance theirs."""
    caller = call.rng.caller
    caller.record_remote_use(
        host=encoded.host_rng_used, device=encoded.device_rng_used, default=encoded.default_rng_used
    )
    for number in encoded.generators_used:
        caller.track(call.rng.generator_pairs[index][number][0]).streams_used = True


def encode_error(error: BaseException) -> bytes:
    """Pickle an exception with its traceback as text. One that cannot be pickled becomes a `RuntimeError`."""
    stack = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps((error, stack))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps((RuntimeError(f"{type(error).__qualname__}: {error}"), stack))
    return data


def decode_error(data: bytes) -> BaseException:
    """The exception of another rank, with the traceback as a note."""
    error, stack = pickle.loads(data)
    if hasattr(error, "add_note"):
        error.add_note(f"On that rank:\n{stack.rstrip()}")
    assert isinstance(error, BaseException)
    return error
