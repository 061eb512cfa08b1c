"""The engine interface, and running one replica's part of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from instep.autograd.bridge import CallGraph, Gradients
from instep.collectives.group import Group, PeerFailure, ReplicaContext, ReplicaInfo, first_error, use_context
from instep.collectives.sync_batchnorm import SyncBatchNormPatch, replace_batch_norm
from instep.devices import DeviceLike, resolve_devices
from instep.replicas.replica import Replica, ReplicaResult, run_replica
from instep.replicas.tensors import check_no_inner_backward
from instep.runtime.ambient import AmbientState
from instep.runtime.rng import ReplicaRng, rng_state_reads
from instep.runtime.torch_private import reentrant_checkpoints

VerdictT = TypeVar("VerdictT")

Arguments = tuple[list[Any], dict[str, Any]]
"""The positional and keyword arguments of one replica."""


@dataclass
class ReplicaCall:
    """One call, ready to run: the replicas that take part and their arguments."""

    replicas: Sequence[Replica]
    arguments: Sequence[Arguments]
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
    select_output: Callable[[Any], Any] | None = None
    """Returns an output without what no other process needs."""
    has_local_effects: Callable[[ReplicaResult], bool] | None = None
    """Returns whether the forward of a replica had an effect that only its process can see."""
    has_plain_arguments: bool = False
    """Whether the arguments consist of tensors, scalars, and containers that were made for this call."""

    @property
    def replica_names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    def replica_context(self, index: int, group: Group, entry_code: CodeType | None = None) -> ReplicaContext:
        """The context of one replica in a group. `entry_code` is the code at which inspections of its stack stop."""
        replica, size = self.replicas[index], self.sizes[index] if self.sizes else None
        info = ReplicaInfo(index, len(self.replicas), replica.device, size, sum(self.sizes[:index]))
        return ReplicaContext(
            group,
            info,
            self.sizes,
            self.ambient.grad_enabled,
            entry_code or _run_forward.__code__,
            sync_batchnorm=isinstance(replica.patch, SyncBatchNormPatch) and replica.patch.enabled,
            statistics_written=replica.statistics_written,
        )


class PreparedRun(Protocol):
    """Runs calls like an earlier one, in fewer steps than `Engine.forward` and `Engine.backward`."""

    is_valid: bool
    """Whether no call has turned out to be different since."""

    def can_run(self) -> bool:
        """Whether a call can be run now."""
        ...

    def forward(self, rows: Sequence[Arguments], rng: ReplicaRng) -> list[ReplicaResult]:
        """Run a forward with these arguments of each replica.

        Raises `LostExchange` if it cannot be run so: the general path has to run it.
        """
        ...

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward (see `autograd.bridge.BackwardEngine`)."""
        ...


@dataclass(frozen=True)
class RankOptions:
    """Options of a wrapper that say what ranks exchange. Engines of one process ignore them."""

    sharded: bool = False
    """Whether each rank keeps the output of its own replica, instead of those of all."""
    local_batches: bool = False
    """Whether each rank passes a batch of its own."""
    reduce: str | Callable[..., Any] | None = None
    """How the gradients of a bucket are summed."""


class Engine:
    """Runs calls on replicas.

    An engine with a `joint_graph` builds the caller's own autograd graph. The graphs of other engines are connected to
    it by the bridge. Subclasses implement `create`, `forward` and, without a joint graph, `backward`. The other methods
    are right for engines whose replicas are in this process.
    """

    name = ""
    joint_graph = False
    serialized = False
    """Whether replicas always run one after another."""
    out_of_process = False
    """Whether replicas run in other processes, with copies of their arguments."""

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> Engine:
        """Create an engine.

        Args:
            devices: The replicas' devices.
            restarts: How often worker processes that died are replaced within a minute.
            timeout: Seconds that replicas wait for one that makes no progress.
        """
        raise NotImplementedError

    @classmethod
    def resolve_devices(cls, specs: Sequence[DeviceLike] | None, module: nn.Module) -> list[torch.device]:
        """The devices of the replicas: those given, else every accelerator, else the module's device."""
        return resolve_devices(specs, module)

    @classmethod
    def shutdown(cls) -> None:
        """Release what the engines of this class share in this process."""

    def attach(self, module: nn.Module, options: RankOptions) -> None:
        """Called once with the source module, when a wrapper is created."""

    @property
    def own_output(self) -> int | None:
        """The index of the replica whose output alone a call returns; None if it returns all outputs, merged."""
        return None

    def begin_call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], one_device: str) -> None:
        """Check that all processes make this call. `one_device` is why it runs on one device; empty if it does not."""

    def gather_arguments(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """The values that each process passes to this call."""
        return [values]

    def agree(self, verdict: VerdictT, failure: BaseException | None) -> VerdictT:
        """The verdict on which all processes that make this call agree. One process decides alone.

        Called once after each forward. `failure` is the error of this process, which is raised on all unless another
        one says how to run again.
        """
        if failure is not None:
            raise failure
        return verdict

    def replica_classes(self) -> Sequence[type[Replica]]:
        """The class of each replica's object in this process; empty for `Replica`."""
        return ()

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Move a source module's tensors to memory that its replicas can access."""

    def describe_transport(self) -> str:
        """How tensors are sent to the replicas, for `repr`; empty if they are not sent."""
        return ""

    def forward(self, call: ReplicaCall) -> list[ReplicaResult]:
        """Run every replica's forward."""
        raise NotImplementedError

    def prepare(self, call: ReplicaCall, results: Sequence[ReplicaResult]) -> PreparedRun | None:  # noqa: ARG002
        """What runs further calls like this one, with tensors and plain values as arguments; None for `forward`."""
        return None

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward (see `autograd.bridge.BackwardEngine`). Not called for a joint graph."""
        raise NotImplementedError

    def wait_idle(self) -> None:
        """Wait until an interrupted call no longer runs on any replica."""

    def add_idle_callback(self, callback: Callable[[], object]) -> None:
        """Call a function when an interrupted call no longer runs; does nothing if none does."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Defer the reduction of gradients until the context exits."""
        return nullcontext()

    def close(self) -> None:
        """Release threads and processes."""


def run_forward(call: ReplicaCall, index: int, group: Group) -> ReplicaResult:
    """Run one replica's part of a call in this thread. An exception is returned in the result."""
    return call.ambient.context_vars.copy().run(_run_forward, call, index, group)


def _run_forward(call: ReplicaCall, index: int, group: Group) -> ReplicaResult:
    replica = call.replicas[index]
    args, kwargs = call.arguments[index]
    context = call.replica_context(index, group)
    guard = replica.tensors.guard
    failure: BaseException | None = None
    try:
        group.enter(index)
        guard.set(True)  # forward may compute gradients of its own
        guard.touched = False
        with (
            call.ambient.enter(replica.device),
            call.rng.forward_context(index),
            use_context(context),
            replace_batch_norm(context),
        ):
            if call.sync_state:
                replica.sync_state()
            result = run_replica(replica, call.method, args, kwargs, call.ambient.compiler)
        if replica.tensors.may_have_gradients():
            check_no_inner_backward(leaf for _, leaf in replica.trainable)
        result.context = context
        return result
    except BaseException as error:
        failure = error
        return ReplicaResult(error=error)
    finally:
        guard.set(False)
        context.forward_done = True
        group.leave(index, failure)
        failure = None  # breaks the cycle with this frame


def run_prepared_forward(
    replica: Replica, method: str, arguments: Arguments, context: ReplicaContext, rng: ReplicaRng
) -> ReplicaResult:
    """Run one replica's part of a prepared call in this thread, whose ambient state is that of the call.

    The call is one without collectives. The effects of the forward are in the result; its exception is raised.
    """
    guard, (args, kwargs) = replica.tensors.guard, arguments
    try:
        guard.set(True)  # forward may compute gradients of its own
        guard.touched = False
        before = rng_state_reads(), reentrant_checkpoints()
        with rng.forward_context(context.info.index), use_context(context), replace_batch_norm(context):
            replica.sync_state()
            result = run_replica(replica, method, args, kwargs)
        result.context, context.may_recompute = context, before != (rng_state_reads(), reentrant_checkpoints())
        if replica.tensors.may_have_gradients():
            check_no_inner_backward(leaf for _, leaf in replica.trainable)
        return result
    finally:
        if torch.is_grad_enabled() != context.grad_enabled:
            torch.set_grad_enabled(context.grad_enabled)
        guard.set(False)
        context.forward_done = True


RUN_PREPARED_FORWARD = run_prepared_forward.__code__
"""The code object at which the inspection of a replica's stack stops in a prepared call."""


def run_prepared(call: ReplicaCall, index: int, group: Group) -> ReplicaResult:
    """`run_prepared_forward` in a copy of the thread's context variables. An exception is returned in the result."""
    replica, context = call.replicas[index], call.replica_context(index, group, RUN_PREPARED_FORWARD)
    try:
        return copy_context().run(run_prepared_forward, replica, call.method, call.arguments[index], context, call.rng)
    except BaseException as error:
        return ReplicaResult(error=error)


def raise_first_error(replicas: Sequence[Replica | str], results: Sequence[ReplicaResult]) -> None:
    """Raise the first failed replica's exception, with a note that names the replica."""
    errors = {index: result.error for index, result in enumerate(results) if result.error is not None}
    if not errors:
        return
    error = first_error(errors)
    index = next(index for index, candidate in errors.items() if candidate is error)
    causes = [candidate for candidate in errors.values() if not isinstance(candidate, PeerFailure)]
    raise add_replica_note(str(replicas[index]), error, max(0, len(causes) - 1))


def add_replica_note(replica: str, error: BaseException, others: int = 0) -> BaseException:
    """Add a note that names the replica to an exception."""
    note = f"raised in {replica}" + (f" (and in {others} more)" if others else "")
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:  # Python 3.10 has no notes
        error.__cause__ = RuntimeError(note)
    return error
