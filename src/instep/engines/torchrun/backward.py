"""One rank's part of a backward: the backward of its replica, and the reduction of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from instep.autograd.bridge import CallGraph, Gradients, ReplicaGraph, outputs_with_gradients, take_gradients
from instep.autograd.graph_walk import ReachedCollectives, find_reached_collectives, required_collectives
from instep.collectives.buckets import sum_gradients
from instep.collectives.group import ReplicaContext, first_error
from instep.engines.base import RankOptions, add_replica_note
from instep.engines.concurrent import backward_in_group
from instep.engines.thread_pool import is_replica_thread, set_replica_thread
from instep.engines.torchrun.channel import BEGIN, FAILED, IDLE, Message, RankChannel
from instep.engines.torchrun.checks import describe_ranks
from instep.engines.torchrun.codec import RankGraph, decode_error, encode_error
from instep.engines.torchrun.group import RankGroup
from instep.engines.torchrun.reduction import BucketAllReduce
from instep.engines.torchrun.row_order import RowOrders
from instep.errors import CollectiveError, RankFailure
from instep.runtime.ambient import AutocastState
from instep.runtime.backoff import Backoff
from instep.runtime.modes import set_grad_mode
from instep.runtime.torch_private import will_accumulate_grad

_FEW_ELEMENTS = 2**16
"""Gradients of outputs on the CPU with at most this many elements are compared in every backward."""
_TOLERANCE = 1e-3
"""The largest relative difference between ranks: losses that are computed twice may differ in their last bits."""


class BackwardBegin(NamedTuple):
    """What has to be the same for all ranks when a backward begins, and which collectives it will call."""

    with_gradient: tuple[tuple[int, ...], ...]
    """For each replica, the indices of its outputs with a gradient."""
    norms: tuple[float, ...]
    """Norms of the outputs' gradients; empty if they are not compared."""
    reached: ReachedCollectives | None
    """The collectives of forward that this rank's backward reaches."""


class BackwardEnd(NamedTuple):
    """What ranks tell each other after a backward. The tensors are other gradients, then those of inputs.

    It is sent as a tuple, which pickles faster than a class.
    """

    without_gradient: list[int]
    """The indices of the sources without a gradient."""
    unbucketed: list[tuple[int, tuple[int, ...] | None]]
    """The indices of gradients that are not reduced in buckets, and the shapes of sparse ones."""
    inputs: list[int]
    """The indices of inputs with a gradient."""
    rng_used: bool
    is_exact: bool
    """Whether no gradient has grown after it was reduced."""
    reduction: tuple[int, int, int]
    """The identity of the reduction (see `BucketAllReduce`)."""
    begin: tuple[Any, ...] | None
    """The `BackwardBegin`, if it was not sent before."""


class RankEngine(Protocol):
    """What a backward asks of its engine."""

    channel: RankChannel
    options: RankOptions
    row_orders: RowOrders
    loss_checks: Backoff
    """Decides in which backwards gradients of outputs are compared, where that costs time."""

    @property
    def defers_gradients(self) -> bool:
        """Whether a backward runs inside `no_sync`."""
        ...

    def begin_reduction(self, sources: Sequence[Tensor], leaves: Sequence[Tensor]) -> BucketAllReduce:
        """A reduction of the gradients of leaves."""
        ...

    def start_overlap(self, reducer: BucketAllReduce, leaves: Sequence[Tensor]) -> None:
        """From now on, start buckets when their gradients arrive."""
        ...

    def stop_overlap(self) -> None:
        """From now on, start no bucket when gradients arrive."""
        ...

    def finish_reduction(self, reducer: BucketAllReduce, messages: Sequence[Message]) -> Gradients:
        """The sums of all ranks' gradients, given their last messages."""
        ...


class RankBackward:
    """One backward."""

    def __init__(
        self,
        engine: RankEngine,
        graph: CallGraph,
        gradients: Sequence[Gradients],
        retain_graph: bool,
        *,
        captures: bool = False,
    ) -> None:
        self._engine, self._channel, self._graph, self._gradients = engine, engine.channel, graph, gradients
        self._retain_graph, self._captures = retain_graph, captures
        self._rank = engine.channel.rank
        self._local = graph.replicas[self._rank] if self._rank < len(graph.replicas) else None
        remote = next(r.remote for r in graph.replicas if isinstance(r.remote, RankGraph))
        self._weight = remote.sizes[self._rank] / sum(remote.sizes) if self._local is not None else 0.0
        self.deferred = engine.defers_gradients and all(map(will_accumulate_grad, graph.sources))
        self._operation = f"backward of {remote.operation}" + (", with gradients deferred" if self.deferred else "")
        self._num_tokens = max(
            [0 if self._local is None else len(self._local.tokens)]
            + [r.remote.num_tokens for r in graph.replicas if isinstance(r.remote, RankGraph)]
        )

    def run(self) -> tuple[Gradients, list[Gradients]]:
        """Run this rank's backward. Returns the gradients of the sources and each replica's input gradients.

        If gradients are deferred, those of the sources are this rank's own; otherwise they are sums over all ranks.
        """
        graph, local = self._graph, self._local
        outputs: list[Tensor] = []
        grads: list[Tensor] = []
        if local is not None:
            outputs, grads = outputs_with_gradients(local, self._gradients[self._rank])
            if self._engine.options.sharded:
                # The loss is a mean over this rank's samples. Its weight in the mean over all samples:
                grads = [grad * self._weight for grad in grads]
        begin = self._describe_begin(outputs)
        needed = self._exchange_begin(begin) if self._num_tokens else []
        if local is not None:
            self._add_tokens(local, outputs, grads, needed)
        group = RankGroup(self._channel, self._operation, len(graph.replicas))
        if needed and local is not None:
            assert isinstance(local.context, ReplicaContext)
            assert isinstance(local.context.group, RankGroup)
            key = "backward", tuple(local.context.group.rows), tuple(needed)
            group.expect_rows(self._engine.row_orders, key)
        leaves = [] if local is None else local.leaves
        overlap = not needed and not self.deferred  # collectives and buckets must not wait for each other
        reducer = self._engine.begin_reduction(graph.sources, leaves)
        capture = self._leaves_to_capture(reducer)
        if overlap and capture is None:
            self._engine.start_overlap(reducer, leaves)
        captured: Gradients | None = None
        error: BaseException | None = None
        graph.rng.refresh()
        try:
            if local is not None:
                captured = self._run_local(group, local, outputs, grads, capture)
        except KeyboardInterrupt:  # the launcher interrupts the other ranks too
            raise
        except BaseException as failure:
            if group.broken is not None:
                raise self._first_error(group.broken, failure) from None
            error = failure
        finally:
            self._engine.stop_overlap()
        finish_error = group.finish(failed=error is not None)
        error = error or finish_error
        if group.left_order:
            error = CollectiveError(
                f"the {self._operation} made other collective calls (batch norm, instep.all_reduce) than earlier "
                f"backwards of the same calls.\n"
                f"No gradient has changed. Run forward and backward again."
            )
        if captured is not None:
            column = captured
        else:
            column = [None] * len(graph.sources) if local is None else take_gradients(leaves)
        reducer.set_gradients(column)
        if overlap:
            reducer.start_rest()  # also after an error: the other ranks reduce them too
        messages = self._end(group, reducer, column, local, error, None if self._num_tokens else begin)
        if needed:
            group.record_rows(self._engine.row_orders)
        ends = [end_of(message) for message in messages]
        if not self._num_tokens:
            self._check_begins([BackwardBegin(*end.begin) for end in ends if end.begin is not None])
        graph.rng.caller.record_remote_use(host=any(end.rng_used for end in ends))
        graph.rng.advance()
        inputs = self._input_gradients(messages, ends)
        if self.deferred:
            return column, inputs
        return self._engine.finish_reduction(reducer, messages), inputs

    def _describe_begin(self, outputs: Sequence[Tensor]) -> BackwardBegin:
        with_gradient = tuple(
            tuple(index for index, gradient in enumerate(row) if gradient is not None) for row in self._gradients
        )
        reached = None
        if self._num_tokens and self._local is not None:
            reached = find_reached_collectives(self._local.tokens, outputs)
        return BackwardBegin(with_gradient, self._norms(), reached)

    def _exchange_begin(self, begin: BackwardBegin) -> list[int]:
        """Check that all ranks begin the same backward. Returns the collectives that any rank reaches.

        Without collectives in the graph, this is checked at the end of the backward instead.
        """
        messages = self._channel.exchange(Message(self._operation, BEGIN, body=begin))
        self._channel.check(messages)
        self._check_begins([message.body for message in messages])
        found = [message.body.reached for message in messages if message.body.reached is not None]
        return required_collectives(found) if found else []

    def _check_begins(self, begins: Sequence[BackwardBegin]) -> None:
        """`RankFailure` if the gradients of the outputs differ between ranks."""
        first = begins[0]
        if self._engine.options.sharded or all(begin == first for begin in begins):
            return
        for rank, begin in enumerate(begins):
            pairs = zip(first.norms, begin.norms, strict=False)
            differ = any(abs(a - b) > _TOLERANCE * max(abs(a), abs(b)) for a, b in pairs)
            if begin.with_gradient != first.with_gradient or differ:
                raise RankFailure(
                    f"{describe_ranks([0, rank])} compute different losses from the same outputs: the gradients of the "
                    f"outputs differ in the {self._operation}.\n"
                    f"Pass the same targets and compute the same loss on every rank."
                )

    def _norms(self) -> tuple[float, ...]:
        """Norms of the outputs' gradients. Where they cost time, they are compared in a few backwards only."""
        checks = self._engine.loss_checks
        checks.advance()
        present = [g for row in self._gradients for g in row if g is not None]
        is_cheap = all(g.is_cpu for g in present) and sum(map(Tensor.numel, present)) <= _FEW_ELEMENTS
        if any(g.layout is not torch.strided for g in present) or not (is_cheap or checks.is_due):
            return ()
        if checks.is_due:
            checks.record()
        with set_grad_mode(False):
            return tuple(_norm(gradient) for gradient in present if not gradient.is_complex())

    def _add_tokens(
        self, local: ReplicaGraph, outputs: list[Tensor], grads: list[Tensor], needed: Sequence[int]
    ) -> None:
        local.add_tokens(needed, outputs, grads)
        if not self._retain_graph:
            local.drop_tokens(needed)

    def _leaves_to_capture(self, reducer: BucketAllReduce) -> Sequence[Tensor] | None:
        """The leaves whose gradients are captured; None if they are accumulated.

        Capturing is faster, but buckets cannot start before it ends. It does not run the backward of a collective that
        leads to no leaf, and captured gradients may be tensors of the caller, which `no_sync` must not keep.
        """
        local = self._local
        if not self._captures or local is None or reducer.num_buckets > 1 or self._num_tokens or self.deferred:
            return None
        may_recompute = isinstance(local.context, ReplicaContext) and local.context.may_recompute
        return None if may_recompute else local.leaves

    def _run_local(
        self,
        group: RankGroup,
        local: ReplicaGraph,
        outputs: list[Tensor],
        grads: list[Tensor],
        capture: Sequence[Tensor] | None,
    ) -> Gradients | None:
        """Run the backward of this rank. Returns the captured gradients, if any are."""
        rng, on_cpu = self._graph.rng, self._channel.is_on_cpu
        context = rng.backward_context(self._rank) if on_cpu else rng.joint_backward_context(self._rank)
        outer = is_replica_thread()
        set_replica_thread(True)  # a wrapper in a checkpointed region runs again, as in the forward
        try:
            with AutocastState.capture().enter():
                return backward_in_group(group, self._rank, local, outputs, grads, self._retain_graph, context, capture)
        finally:
            set_replica_thread(outer)

    def _end(
        self,
        group: RankGroup,
        reducer: BucketAllReduce,
        column: Gradients,
        local: ReplicaGraph | None,
        error: BaseException | None,
        begin: BackwardBegin | None,
    ) -> list[Message]:
        """Exchange what is not reduced in buckets. Raises the error of any rank."""
        self._graph.rng.report_use()
        inputs = [] if local is None else take_gradients(local.inputs)
        rng_used = self._graph.rng.caller.cpu.streams_used
        message = end_message(self._operation, reducer, [] if self.deferred else column, inputs, rng_used, begin)
        if error is not None:
            message = Message(self._operation, state=FAILED, body=encode_error(error))
        if local is None:
            message.state = IDLE
            messages = self._channel.exchange_idle(message)
        else:
            messages = self._channel.exchange(message)
        self._channel.check_operations(messages)
        if any(other.state == FAILED for other in messages):
            group.forget_rows(self._engine.row_orders)
            raise self._first_error(messages, error)
        self._channel.check(messages)
        return messages

    def _first_error(self, messages: Sequence[Message], own: BaseException | None) -> BaseException:
        """The error of the first rank that failed."""
        errors: dict[int, BaseException] = {} if own is None else {self._rank: own}
        for rank, message in enumerate(messages):
            if message.state == FAILED and rank != self._rank:
                errors[rank] = add_replica_note(f"rank {rank}", decode_error(message.body))
        return first_error(errors)

    def _input_gradients(self, messages: Sequence[Message], ends: Sequence[BackwardEnd]) -> list[Gradients]:
        found: list[Gradients] = []
        for rank, replica in enumerate(self._graph.replicas):
            end, tensors = ends[rank], list(messages[rank].tensors)
            row: Gradients = [None] * len(replica.inputs)
            for index, gradient in zip(end.inputs, tensors[len(tensors) - len(end.inputs) :], strict=True):
                row[index] = gradient
            found.append(row)
        return found


def end_message(
    operation: str,
    reducer: BucketAllReduce,
    column: Gradients,
    inputs: Sequence[Tensor | None] = (),
    rng_used: bool = False,
    begin: BackwardBegin | None = None,
) -> Message:
    """The last message of a reduction: what is not reduced in buckets."""
    absent: list[int] = []
    shapes: list[tuple[int, tuple[int, ...] | None]] = []
    tensors: list[Tensor] = []
    for index, gradient in enumerate(() if reducer.reduces_all(column) else column):
        if gradient is None:
            absent.append(index)
        elif not reducer.reduces(index, gradient):
            is_sparse = gradient.layout is not torch.strided
            shapes.append((index, tuple(gradient.shape) if is_sparse else None))
            tensors += [gradient.coalesce().indices(), gradient.coalesce().values()] if is_sparse else [gradient]
    with_gradient = {index: gradient for index, gradient in enumerate(inputs) if gradient is not None}
    began = None if begin is None else tuple(begin)
    end = BackwardEnd(absent, shapes, list(with_gradient), rng_used, reducer.is_exact, reducer.identity, began)
    return Message(operation, body=tuple(end), tensors=[*tensors, *with_gradient.values()])


def end_of(message: Message) -> BackwardEnd:
    """What a rank has sent with `end_message`."""
    return BackwardEnd(*message.body)


def _check_same_reduction(channel: RankChannel, ends: Sequence[BackwardEnd]) -> None:
    """`RankFailure`, on every rank, if ranks reduce the gradients of different parameters."""
    found = [end.reduction for end in ends]
    other = next((rank for rank, reduction in enumerate(found) if reduction != found[0]), None)
    if other is not None:
        channel.on_out_of_step()
        raise RankFailure(
            f"{describe_ranks([0, other])} reduce the gradients of different parameters: {found[0][0]} and "
            f"{found[other][0]} of them require a gradient.\n"
            f"Set requires_grad of the same parameters on every rank."
        )


def sum_over_ranks(channel: RankChannel, reducer: BucketAllReduce, messages: Sequence[Message]) -> Gradients:
    """The sums of all ranks' gradients, given the last messages; None for a source that has none on any rank."""
    ends = [end_of(message) for message in messages]
    _check_same_reduction(channel, ends)
    sums = reducer.finish()
    if not all(end.is_exact for end in ends):  # the buckets are reduced once more, on all ranks
        sums = reducer.again().finish()
    found: dict[int, list[Tensor]] = {}
    for message, end in zip(messages, ends, strict=True):
        tensors = iter(message.tensors)
        for index, shape in end.unbucketed:
            value = next(tensors) if shape is None else _sparse(next(tensors), next(tensors), shape)
            found.setdefault(index, []).append(value)
    for index, values in found.items():
        columns: list[Gradients] = [[value] for value in values]
        in_bucket = any(
            index not in end.without_gradient and all(index != i for i, _ in end.unbucketed) for end in ends
        )
        if in_bucket:
            columns.insert(0, [sums[index]])
        sums[index] = sum_gradients(columns)[0]
    absent = set(ends[0].without_gradient).intersection(*(end.without_gradient for end in ends))
    return [None if index in absent else value for index, value in enumerate(sums)]


def _norm(gradient: Tensor) -> float:
    if gradient.numel() == 1:  # that of a loss
        return abs(gradient.item())
    return float(torch.linalg.vector_norm(gradient.detach().double()))


def _sparse(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, torch.Size(shape), check_invariants=False).coalesce()
