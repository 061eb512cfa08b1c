"""The engine protocol, and running one replica's part of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from instep.collectives.group import PeerFailure, ReplicaContext, ReplicaInfo, first_error, use_context
from instep.replicas.replica import Replica, ReplicaResult, run_replica
from instep.replicas.tensors import check_no_inner_backward
from instep.runtime.ambient import AmbientState
from instep.runtime.rng import ReplicaRng


@dataclass
class ReplicaCall:
    """One call, ready to run: the replicas that take part and their arguments."""

    replicas: Sequence[Replica]
    arguments: Sequence[tuple[list[Any], dict[str, Any]]]
    method: str
    ambient: AmbientState
    sync_state: bool
    """Whether buffers and other state are first copied from the source."""
    rng: ReplicaRng
    """The replicas' random streams; says whether replicas have to run one after another."""
    sizes: Sequence[int] = ()
    """The number of samples in each replica's shard."""
    grad_inputs: Sequence[Sequence[Tensor]] = ()
    """The tensors among each replica's arguments that need a gradient."""
    mutable_argument_ids: Collection[int] = ()
    """The ids of mutable objects in the caller's arguments, other than tensors."""
    argument_names: Sequence[str] = ()
    """The names of the arguments, positional ones first; for messages."""
    group: Any = None
    """The group of the replicas; the engine sets it."""
    device_transfer: Any = None
    """How tensors on the caller's accelerator are sent to other processes; set by `engine='processes'`."""
    python_seed: int | None = None
    """The seed of Python's and NumPy's generators in other processes; set by `engine='processes'`."""

    def replica_context(self, index: int) -> ReplicaContext | None:
        """The context of one replica in the group."""
        if self.group is None:
            return None
        size = self.sizes[index] if self.sizes else None
        info = ReplicaInfo(index, len(self.replicas), self.replicas[index].device, size, sum(self.sizes[:index]))
        return ReplicaContext(self.group, info, self.sizes, self.ambient.grad_enabled, _run_forward.__code__)


class Engine(Protocol):
    """Runs calls on replicas.

    An engine with a `joint_graph` builds the caller's own autograd graph. The graphs of other engines are connected to
    it by the bridge.
    """

    name: str
    joint_graph: bool
    serialized: bool
    """Whether replicas always run one after another."""
    out_of_process: bool
    """Whether replicas run in other processes, with copies of their arguments."""

    def replica_classes(self) -> Sequence[type[Replica]]:
        """The class of each replica's object in this process; empty for `Replica`."""
        ...

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Move a source module's tensors to memory that its replicas can access."""
        ...

    def describe_transport(self) -> str:
        """How tensors are sent to the replicas, for `repr`; empty if they are not sent."""
        ...

    def forward(self, call: ReplicaCall) -> list[ReplicaResult]: ...

    def wait_idle(self) -> None:
        """Wait until an interrupted call no longer runs on any replica."""
        ...

    def add_idle_callback(self, callback: Callable[[], object]) -> None:
        """Call a function when an interrupted call no longer runs; does nothing if none does."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Defer the reduction of gradients until the context exits."""
        ...

    def close(self) -> None: ...


class EngineClass(Protocol):
    """A class of engines, as `engines.select` registers it."""

    def create(self, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> Engine:
        """Create an engine.

        Args:
            devices: The replicas' devices.
            restarts: How often worker processes that died are replaced within a minute.
            timeout: Seconds that replicas wait for one that makes no progress.
        """
        ...

    def shutdown(self) -> None:
        """Release what the engines of this class share in this process."""
        ...


def run_forward(call: ReplicaCall, index: int) -> ReplicaResult:
    """Run one replica's part of a call in this thread. An exception is returned in the result."""
    return call.ambient.context_vars.copy().run(_run_forward, call, index)


def _run_forward(call: ReplicaCall, index: int) -> ReplicaResult:
    replica = call.replicas[index]
    args, kwargs = call.arguments[index]
    context = call.replica_context(index)
    error_raised: BaseException | None = None
    try:
        if call.group is not None:
            call.group.enter(index)
        guard = replica.tensors.guard
        guard.set(True)  # forward may compute gradients of its own
        guard.touched = False
        with call.ambient.enter(replica.device), call.rng.forward_context(index), use_context(context):
            if call.sync_state:
                replica.sync_state()
            result = run_replica(replica, call.method, args, kwargs, call.ambient.compiler)
        if replica.tensors.may_have_gradients():
            check_no_inner_backward(leaf for _, leaf in replica.trainable)
        result.context = context
        return result
    except BaseException as error:
        error_raised = error
        return ReplicaResult(error=error)
    finally:
        replica.tensors.guard.set(False)
        if call.group is not None and context is not None:
            context.forward_done = True
            call.group.leave(index, error_raised)
        error_raised = None  # breaks the cycle with this frame


def raise_first_error(replicas: Sequence[Replica | str], results: Sequence[ReplicaResult]) -> None:
    """Raise the first failed replica's exception, with a note that names the replica."""
    failed = {i: o.error for i, o in enumerate(results) if o.error is not None}
    if failed:
        error = first_error(failed)
        own = [i for i, e in failed.items() if not isinstance(e, PeerFailure)]
        raise add_replica_note(
            str(replicas[next(i for i, e in failed.items() if e is error)]), error, max(0, len(own) - 1)
        )


def add_replica_note(replica: str, error: BaseException, others: int = 0) -> BaseException:
    """Add a note that names the replica to an exception."""
    note = f"raised in {replica}" + (f" (and in {others} more)" if others else "")
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:  # Python 3.10 has no notes
        error.__cause__ = RuntimeError(note)
    return error
