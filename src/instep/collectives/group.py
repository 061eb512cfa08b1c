"""The group of replicas of one call, and each replica's context in it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor

from instep.errors import CollectiveError
from instep.runtime.ambient import register_thread_local
from instep.runtime.probe_flag import exempt_trial


class Group(Protocol):
    """The replicas of a call, or of its backward, as an engine connects them."""

    joint_graph: bool
    """Whether the replicas build one autograd graph, so that exchanged tensors keep their history."""

    def enter(self, index: int) -> None:
        """Begin a replica's part; waits for its turn. Raises if the group is broken."""
        ...

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """End a replica's part. Replicas that wait for it fail."""
        ...

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        """All-gather: send a payload and return every replica's, in order.

        Raises `CollectiveError` as soon as another replica has returned, failed, or called with another label.
        """
        ...

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:
        """All-gather of one dense tensor, without gradients and metadata: returns `[count, *row.shape]`.

        Every replica sends a row of the same shape and dtype and receives all rows, in order, on its row's device. The
        row must not be written to afterwards. The result must not be written to either, and is valid until the
        replica's next but one `all_gather`: its memory may be reused.

        Raises the errors of `exchange`. Rows of different shapes or dtypes count as different labels.
        """
        ...

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Memory for the row of the replica's next `all_gather`, from which it is not copied.

        None unless all replicas share the device and exchange rows of this size on it.
        """
        ...


@lru_cache(maxsize=1024)
def _describe_row(label: str, dtype: torch.dtype, shape: torch.Size) -> str:
    """A label with a row's dtype and shape. It is cached, and so is the hash of the string."""
    return f"{label}, with rows of {str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_row(label: str, row: Tensor) -> str:
    """The label of an `all_gather`, with the row's dtype and shape, on which the replicas have to agree."""
    return _describe_row(label, row.dtype, row.shape)


class PeerFailure(CollectiveError):
    """Another replica failed. The caller gets that replica's exception instead."""


def first_error(errors: Mapping[int, BaseException]) -> BaseException:
    """The first replica's error, preferring errors that are not a consequence of another replica's."""
    return errors[min(errors, key=lambda index: (isinstance(errors[index], PeerFailure), index))]


@dataclass(frozen=True)
class ReplicaInfo:
    """Which replica this is, and which part of the batch it has."""

    index: int = 0
    count: int = 1
    device: torch.device | None = None
    """The replica's device; None outside a parallel call."""
    size: int | None = None
    """The number of samples in this replica's shard; None if the call has no batch."""
    offset: int = 0
    """The number of samples in the shards of the replicas before this one."""


@dataclass
class ReplicaContext:
    """One replica's state in a group."""

    group: Group
    info: ReplicaInfo
    sizes: Sequence[int] = ()
    """The number of samples in every replica's shard."""
    grad_enabled: bool = False
    """Whether grad mode is enabled in the caller."""
    entry_code: CodeType | None = None
    """The code object at which stack inspection stops: frames outside it are not the module's."""
    forward_done: bool = False
    """Whether the replica's forward has ended."""
    exchange_count: int = 0
    """The number of exchanges so far."""
    tokens: list[Tensor] = field(default_factory=list)
    """One token for each exchange through which gradients flow, in order. Backward starts at them too."""
    active: list[ReplicaContext] = field(default_factory=list)
    """This context while a thread uses it. Autograd's device threads, which have no context, find it here."""
    may_recompute: bool = False
    """Whether forward may have used checkpoints: reentrant ones, or others, which read the state of the generator."""
    sync_batchnorm: bool = False
    """Whether batch normalization uses the statistics of all replicas."""
    statistics_written: set[int] = field(default_factory=set)
    """Receives the ids of running statistics that batch normalization writes. Their version counters do not move."""

    def with_group(self, group: Group) -> ReplicaContext:
        """The context of the same replica in another group, the one of a backward."""
        return ReplicaContext(
            group,
            self.info,
            self.sizes,
            self.grad_enabled,
            self.entry_code,
            self.forward_done,
            active=self.active,
            may_recompute=self.may_recompute,
            sync_batchnorm=self.sync_batchnorm,
            statistics_written=self.statistics_written,
        )


class _ThreadLocal(threading.local):
    context: ReplicaContext | None = None


_thread_local = _ThreadLocal()
SINGLE_REPLICA = ReplicaInfo()


def current_context() -> ReplicaContext | None:
    """The replica context of this thread; None outside a call on several replicas."""
    return _thread_local.context


def set_context(context: ReplicaContext | None) -> None:
    _thread_local.context = context


register_thread_local(current_context, set_context)


def exempt_collective() -> None:
    """Report to the probe that a collective ran on a single replica.

    In a trial, the outputs of such a module may differ between parts and whole: it combines samples by itself.
    """
    exempt_trial("a cross-replica operation")


class use_context:
    """Context manager: sets the replica context of this thread."""

    __slots__ = ("_context", "_outer")

    def __init__(self, context: ReplicaContext | None) -> None:
        self._context = None if context is None or context.info.count == 1 else context

    def __enter__(self) -> None:
        self._outer = current_context()
        _thread_local.context = self._context
        if self._context is not None:
            self._context.active.append(self._context)

    def __exit__(self, *_: object) -> None:
        _thread_local.context = self._outer
        if self._context is not None:
            self._context.active.pop()
