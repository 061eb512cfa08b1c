"""What ranks exchange on the host: one all-gather at a time, with a description of what each rank is doing.

Every step in which ranks wait for each other on the host goes through one channel, in one order. A rank that is about
to do something else than the others is therefore seen at once, by all ranks, and each can name it.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from instep.collectives.group import PeerFailure
from instep.engines.torchrun.checks import out_of_step
from instep.engines.torchrun.local_memory import share_memory
from instep.engines.torchrun.local_slots import SLOT_BYTES, ExchangeFailed, LocalSlots
from instep.engines.torchrun.monitor import RankMonitor
from instep.errors import CollectiveError
from instep.runtime.modes import set_inference_mode
from instep.runtime.torch_private import all_gather_flat

_CPU = torch.device("cpu")
_HEADER_BYTES = 2048
"""What each rank sends in every exchange by Gloo. A longer message takes a second all-gather."""
_INLINE_BYTES = 1024
"""Tensors that the host sends are a part of the message itself, if they have at most this size together."""
_ALIGNMENT = 64
_MAX_LABEL = 300
_DTYPE_NAMES = {dtype: name for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""Names pickle faster than dtypes."""
_NUMBER_FORMATS = {torch.float32: "=f", torch.float64: "=d", torch.int64: "=q"}
"""How inline tensors that are a number are written, by dtype: formats of `struct`, which are NumPy dtypes too.

A signalling NaN arrives as a quiet one.
"""
_LENGTHS = struct.Struct("<II")
"""The lengths of the two parts of a frame: the pickled head and the inline tensors."""

BEGIN, END = "the beginning", "the end"
"""The first and the last step of a forward or backward."""

RUNNING, IDLE, FAILED, OTHER_ROWS = "running", "idle", "failed", "other rows"
"""`OTHER_ROWS`: the rank made other collective calls than those that were expected (see `row_order`)."""


@dataclass
class Message:
    """What one rank sends in an exchange."""

    operation: str
    """What the rank is doing, such as a forward with a certain batch. All ranks have to do the same."""
    step: str = END
    """Where it is in the operation: a collective, or `END`. Idle ranks may be elsewhere."""
    state: str = RUNNING
    body: Any = None
    """Any object that can be pickled."""
    tensors: Sequence[Tensor] = ()
    """Dense tensors, on the CPU or on the rank's accelerator. What is received must not be written to."""


_Specs = Sequence[tuple[bool, bool, str, tuple[int, ...]]]


class _Head(NamedTuple):
    """What a message says without its tensors. It is sent as a tuple, which pickles faster than a class."""

    operation: str
    step: str
    state: str
    body: Any
    specs: _Specs
    host_bytes: int
    """The length of the row of tensors on the CPU that are not inline."""
    device_bytes: int


class _SortedTensors(NamedTuple):
    """The tensors of a message, by how they are sent."""

    specs: _Specs
    """For each tensor: whether the host sends it, whether it was on the CPU, the name of its dtype, and its shape."""
    inline: bytes
    """The values of small tensors, which are a part of the message."""
    on_host: Sequence[Tensor]
    on_device: Sequence[Tensor]


_NO_TENSORS = _SortedTensors((), b"", (), ())


class RankChannel:
    """Exchanges messages between all ranks."""

    def __init__(self, host_group: Any, device_group: Any, device: torch.device, monitor: RankMonitor) -> None:
        """
        Args:
            host_group: A Gloo group of all ranks.
            device_group: A group that gathers tensors on `device`.
            device: The device of this rank.
            monitor: Knows where other ranks are, for messages.
        """
        self._host_group, self._device_group, self.device = host_group, device_group, device
        self.is_on_cpu = device.type == "cpu"
        self.sends_by_host = device_group is host_group
        """Whether tensors on the device are sent through host memory: Gloo does that."""
        self._monitor = monitor
        self.rank: int = host_group.rank()
        self.count: int = host_group.size()
        self._slot, slots = _host_bytes(_HEADER_BYTES), _host_bytes(self.count, _HEADER_BYTES)
        self._flat_slots, self._no_rows = slots.view(-1), list(_host_bytes(self.count, 0))
        self._slot_bytes, self._slots_bytes = self._slot.numpy().data, [row.data for row in slots.numpy()]
        self._kept: list[Tensor] = []
        """Tensors of the last exchange. A thread of Gloo may still hold them for a moment, and must not be the one that
        frees their Python objects: a process that is forked meanwhile, such as a worker of a data loader, would hang.
        """
        self._lock = threading.Lock()
        self._local: LocalSlots | None = None
        self.on_out_of_step: Callable[[], None] = lambda: None
        """Called on every rank when the ranks are out of step, before the error is raised."""

    def use_local_slots(self, slots: LocalSlots) -> None:
        """Exchange short messages through memory, not by Gloo. All ranks have to call it."""
        self._local = slots

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on one machine, and can share memory."""
        return self._local is not None

    def share_memory(self, operation: str, nbytes: int) -> mmap.mmap | None:
        """New memory that all ranks map, if they can. All ranks have to call it."""

        def exchange(value: Any) -> list[Any]:
            messages = self.exchange(Message(operation, "sharing memory", body=value))
            self.check(messages)
            return [message.body for message in messages]

        return share_memory(nbytes, self.rank, exchange)

    def wait(self, label: str, has_arrived: Callable[[int], bool]) -> None:
        """Wait until a function of its rank is true for every other rank of this machine."""
        assert self._local is not None
        if all(map(has_arrived, self._local.peers)):
            return
        with self._monitor.waiting(label):
            try:
                self._local.wait(has_arrived)
            except ExchangeFailed as error:
                raise self._monitor.describe_failure() from error

    def fence(self) -> None:
        """Order the accesses of this rank to memory that ranks share."""
        assert self._local is not None
        self._local.fence()

    def exchange(self, message: Message) -> list[Message]:
        """All-gather of messages. Raises `RankFailure` if a rank does not take part."""
        step = message.operation if message.step == END else f"{message.operation}: {message.step}"
        with self._lock, self._monitor.waiting(step), set_inference_mode(False):
            return self._exchange(message)

    def _exchange(self, message: Message) -> list[Message]:
        specs, inline, on_host, on_device = self._sort_tensors(message.tensors) if message.tensors else _NO_TENSORS
        self._kept = []
        if len(message.operation) > _MAX_LABEL or len(message.step) > _MAX_LABEL:
            message = replace(message, operation=_shorten(message.operation), step=_shorten(message.step))
        sizes = _nbytes(on_host), _nbytes(on_device)
        own = _Head(message.operation, message.step, message.state, message.body, specs, *sizes)
        data = pickle.dumps(tuple(own), pickle.HIGHEST_PROTOCOL)
        frames = self._gather_frames(data, inline)
        # An equal head need not be unpickled: ranks in step often send one.
        heads = [own if other == data else _Head(*pickle.loads(other)) for other, _ in frames]
        host_rows = self._gather_tensors(on_host, [head.host_bytes for head in heads], self._host_group, _CPU)
        device_rows = self._gather_tensors(on_device, [head.device_bytes for head in heads], self._device_group)
        messages = []
        for rank, head in enumerate(heads):
            tensors: Sequence[Tensor] = ()
            if head.specs and rank != self.rank:
                tensors = self._read_tensors(head.specs, frames[rank][1], host_rows[rank], device_rows[rank])
            messages.append(Message(head.operation, head.step, head.state, head.body, tensors))
        messages[self.rank] = message
        return messages

    def _sort_tensors(self, sent: Sequence[Tensor]) -> _SortedTensors:
        """How the tensors of a message are sent."""
        was_on_host = [tensor.is_cpu for tensor in sent]
        if self.sends_by_host and not all(was_on_host) and _nbytes(sent) <= _INLINE_BYTES:
            sent = [tensor.cpu() for tensor in sent]  # small tensors on a device are a part of the message
        specs = [
            (tensor.is_cpu, on_host, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for tensor, on_host in zip(sent, was_on_host, strict=True)
        ]
        on_host = [tensor for tensor in sent if tensor.is_cpu]
        on_device = [tensor for tensor in sent if not tensor.is_cpu]
        if on_host and _nbytes(on_host) <= _INLINE_BYTES:
            return _SortedTensors(specs, b"".join(map(_padded_bytes, on_host)), (), on_device)
        return _SortedTensors(specs, b"", on_host, on_device)

    def _read_tensors(self, specs: _Specs, inline: bytes, host_row: Tensor, device_row: Tensor) -> list[Tensor]:
        """The tensors of another rank's message."""
        on_host: _InlineReader | _Reader = _InlineReader(inline) if inline else _Reader(host_row)
        on_device = _Reader(device_row)
        tensors: list[Tensor] = []
        for sent_by_host, was_on_host, name, shape in specs:
            dtype = getattr(torch, name)
            if not sent_by_host:
                tensors.append(on_device.read(dtype, shape))
                continue
            tensor = on_host.read(dtype, shape)
            tensors.append(tensor if was_on_host else tensor.to(self.device))
        return tensors

    def _gather_frames(self, head: bytes, inline: bytes) -> list[tuple[bytes, bytes]]:
        """All-gather of a head and inline tensors."""
        frame = _LENGTHS.pack(len(head), len(inline)) + head + inline
        limit = _HEADER_BYTES if self._local is None else SLOT_BYTES
        slots = self._gather_slots(frame[:limit])
        lengths = [_LENGTHS.unpack_from(slot) for slot in slots]
        rest = _LENGTHS.size + max(map(sum, lengths)) - limit
        if rest > 0:
            slots = self._gather_rest(slots, frame[limit:], rest, limit)
        start = _LENGTHS.size
        return [
            (bytes(slot[start : start + size]), bytes(slot[start + size : start + size + inline_size]))
            for slot, (size, inline_size) in zip(slots, lengths, strict=True)
        ]

    def _gather_rest(
        self, slots: Sequence[memoryview], rest_of_frame: bytes, rest: int, limit: int
    ) -> list[memoryview]:
        """The whole frames, if some are longer than a slot, by at most `rest` bytes."""
        tail, tails = _host_bytes(rest), _host_bytes(self.count, rest)
        begins = [bytes(slot[:limit]) for slot in slots]
        self._kept += [tail, tails]
        tail.numpy()[: len(rest_of_frame)] = np.frombuffer(rest_of_frame, np.uint8)
        self._all_gather(tails.view(-1), tail, self._host_group)
        return [memoryview(begin + other.tobytes()) for begin, other in zip(begins, tails.numpy(), strict=True)]

    def _gather_slots(self, message: bytes | memoryview) -> Sequence[memoryview]:
        """All-gather of a few bytes. Returns a slot of each rank, which begins with them."""
        if self._local is not None:
            try:
                return self._local.gather(message)
            except ExchangeFailed as error:
                raise self._monitor.describe_failure() from error
        self._slot_bytes[: len(message)] = message
        self._all_gather(self._flat_slots, self._slot, self._host_group)
        return self._slots_bytes

    def _gather_tensors(
        self, tensors: Sequence[Tensor], nbytes: Sequence[int], group: Any, device: torch.device | None = None
    ) -> Sequence[Tensor]:
        """All-gather of tensors as one row of bytes per rank. `nbytes` is the length of each rank's row."""
        size = max(nbytes)
        if not size:
            return self._no_rows
        where = device or self.device
        rows = torch.empty(self.count, size, dtype=torch.uint8, device=where)
        row = _pack(tensors if nbytes[self.rank] else (), size, where)
        self._all_gather(rows.view(-1), row, group)
        self._kept += [rows, row]
        return list(rows)

    def _all_gather(self, output: Tensor, row: Tensor, group: Any) -> None:
        try:
            all_gather_flat(output, row, group)
        except (RuntimeError, dist.DistError) as error:
            raise self._monitor.describe_failure() from error

    def gather_row(self, label: str, row: Tensor) -> Tensor:
        """All-gather of one row per rank, `[count, *row.shape]`, without a message: all ranks expect the same row."""
        on_host = row.device.type == "cpu"
        row = row.contiguous()
        with self._lock, self._monitor.waiting(label), set_inference_mode(False):
            if (on_host or self.sends_by_host) and self._local is not None and 0 < row.nbytes <= SLOT_BYTES:
                slots = self._gather_slots(row.cpu().view(-1).view(torch.uint8).numpy().data)
                numel = row.numel()
                rows = torch.stack([torch.frombuffer(slot, dtype=row.dtype, count=numel) for slot in slots])
                return rows.view(self.count, *row.shape).to(row.device)
            rows = row.new_empty(self.count, *row.shape)
            self._kept = [rows, row]
            self._all_gather(rows.view(-1), row.view(-1), self._host_group if on_host else self._device_group)
        return rows

    def exchange_idle(self, message: Message) -> list[Message]:
        """Take part in the exchanges of an operation in which this rank has no replica; returns the last messages."""
        while True:
            messages = self.exchange(message)
            self.check_operations(messages)
            if any(other.state == FAILED for other in messages):
                return messages
            self.check(messages)
            if any(other.step == END and other.state != IDLE for other in messages):
                return messages

    def check_operations(self, messages: Sequence[Message]) -> None:
        """`RankFailure` unless all ranks are in the same operation. Every rank raises it, or none."""
        if any(message.operation != messages[0].operation for message in messages):
            self.on_out_of_step()
            raise out_of_step([message.operation for message in messages])

    def check(self, messages: Sequence[Message]) -> None:
        """Raise unless all ranks are in the same operation, at the same step. Idle ranks may be at any step."""
        self.check_operations(messages)
        if all(message.state == RUNNING and message.step == messages[0].step for message in messages):
            return
        for rank, message in enumerate(messages):
            if message.state == FAILED and rank != self.rank:
                raise PeerFailure(f"rank {rank} failed before this collective.")
        active = {rank: message for rank, message in enumerate(messages) if message.state != IDLE}
        if len({message.step for message in active.values()}) <= 1:
            return
        ended = next((rank for rank, message in active.items() if message.step == END), None)
        if ended is not None:
            waiting = next(rank for rank, message in active.items() if message.step != END)
            raise CollectiveError(
                f"rank {waiting} called {active[waiting].step}, and rank {ended} ended without it.\n"
                f"Every replica has to make the same calls: move them out of branches and loops that depend on the "
                f"shard."
            )
        calls = "".join(f"  rank {rank} called {message.step}\n" for rank, message in active.items())
        raise CollectiveError(
            f"the replicas called different collectives.\n{calls}"
            f"Every replica has to make the same calls in the same order: move them out of branches that depend on the "
            f"shard, and pass the same structure, sizes and dtypes."
        )


def _pack(tensors: Sequence[Tensor], nbytes: int, device: torch.device) -> Tensor:
    """A row of bytes that holds the values of tensors."""
    row = torch.empty(nbytes, dtype=torch.uint8, device=device)
    places = _Reader(row)
    with torch.no_grad():
        views = [places.read(tensor.dtype, tensor.shape) for tensor in tensors]
        if views:
            torch._foreach_copy_(views, [tensor.detach() for tensor in tensors])
    return row


def _padded_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor: a number, or as `_pack` writes them."""
    if not tensor.ndim and tensor.dtype in _NUMBER_FORMATS:
        return struct.pack(_NUMBER_FORMATS[tensor.dtype], tensor.item()).ljust(_ALIGNMENT, b"\0")
    # not `contiguous()`: a tensor of one element is contiguous with any stride, and cannot be viewed as bytes
    values = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    content: bytes = values.view(-1).view(torch.uint8).numpy().tobytes()
    return content.ljust(_aligned(len(content)), b"\0")


def _host_bytes(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.uint8, device="cpu")


class _Reader:
    """Consecutive tensors in a row of bytes."""

    def __init__(self, row: Tensor) -> None:
        self._row, self._at = row, 0

    def read(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        place = self._row[self._at : self._at + nbytes]
        self._at += _aligned(nbytes)
        return place.view(dtype).view(torch.Size(shape))


class _InlineReader:
    """Consecutive tensors that `_padded_bytes` has written. They may share memory."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = bytearray(content), 0

    def read(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        numel, start = math.prod(shape), self._at
        self._at += _aligned(numel * dtype.itemsize)
        if not shape and dtype in _NUMBER_FORMATS:
            return torch.from_numpy(np.ndarray((), _NUMBER_FORMATS[dtype], self._content, start))
        if not numel:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._content, dtype=dtype, count=numel, offset=start).view(shape)


def _shorten(label: str) -> str:
    """A label of limited length, which differs if the labels do."""
    if len(label) <= _MAX_LABEL:
        return label
    return f"{label[:_MAX_LABEL]}... ({hashlib.blake2b(label.encode(), digest_size=4).hexdigest()})"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)
