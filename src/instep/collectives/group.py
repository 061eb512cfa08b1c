"""The group of replicas of one call, and each replica's context in it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor

from instep.errors import CollectiveError
from instep.runtime.ambient import register_thread_local
from instep.runtime.probe_flag import exempt_trial


class Group(Protocol):
    """What an engine brings so that the replicas of a call, or of its backward, can meet."""

    joint_graph: bool
    """Whether the replicas' graphs are one, so that tensors cross with their history."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        """Hand over a payload and get every replica's, in their order.

        Raises `CollectiveError` at once when another replica has returned or failed, or came with another label.
        """
        ...


class PeerFailure(CollectiveError):
    """Another replica raised an exception, which is the one that the caller gets."""


def first_error(errors: Mapping[int, BaseException]) -> BaseException:
    """The error of the first replica that did not only fail because another one had."""
    return errors[min(errors, key=lambda index: (isinstance(errors[index], PeerFailure), index))]


@dataclass(frozen=True)
class ReplicaInfo:
    """Which part of a call this is."""

    index: int = 0
    count: int = 1
    device: torch.device | None = None
    """The replica's device; None outside of a parallel call."""
    size: int | None = None
    """The samples of this replica's shard, where the call has a batch that is split."""
    offset: int = 0
    """The samples of the replicas before this one."""


@dataclass
class ReplicaContext:
    """One replica's place in a meeting."""

    group: Group
    info: ReplicaInfo
    sizes: Sequence[int] = ()
    """The samples of every replica's shard."""
    grad_enabled: bool = False
    """Whether the caller wants gradients."""
    entry_code: CodeType | None = None
    """Code below which the caller's own frames begin."""
    forward_done: bool = False
    """Whether the replica's forward has ended."""
    exchange_count: int = 0
    """How often tensors crossed so far."""
    tokens: list[Tensor] = field(default_factory=list)
    """One for each crossing that gradients can come back through, in order."""
    active: list[ReplicaContext] = field(default_factory=list)
    """This place while somebody is on it; autograd runs nodes of accelerators in threads that have no place."""

    def with_group(self, meeting: Group) -> ReplicaContext:
        """The same place in another meeting: the one of a backward."""
        return ReplicaContext(
            meeting, self.info, self.sizes, self.grad_enabled, self.entry_code, self.forward_done, active=self.active
        )


_thread_local = threading.local()
SINGLE_REPLICA = ReplicaInfo()


def current_context() -> ReplicaContext | None:
    """This thread's place in a meeting of several replicas, if it has one."""
    return getattr(_thread_local, "seat", None)


def set_context(place: ReplicaContext | None) -> None:
    """Set this thread's place."""
    _thread_local.seat = place


register_thread_local(current_context, set_context)


def exempt_collective() -> None:
    """Say that something was done together with others by one alone, which is nothing.

    What is run in parts to see how its outputs belong together is excused by it: such a module looks at the whole batch
    and takes care of that itself.
    """
    exempt_trial("a cross-replica operation")


class use_context:
    """Take a place in a meeting, for the length of a `with` block in one thread."""

    __slots__ = ("_context", "_outer")

    def __init__(self, place: ReplicaContext | None) -> None:
        self._context = None if place is None or place.info.count == 1 else place

    def __enter__(self) -> None:
        self._outer = current_context()
        _thread_local.seat = self._context
        if self._context is not None:
            self._context.active.append(self._context)

    def __exit__(self, *_: object) -> None:
        _thread_local.seat = self._outer
        if self._context is not None:
            self._context.active.pop()
