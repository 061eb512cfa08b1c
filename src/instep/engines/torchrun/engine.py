"""The `torchrun` engine: each rank runs one replica, and every rank gets the outputs and gradients of all."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.hooks import RemovableHandle

from instep.autograd.bridge import CallGraph, Gradients, take_gradients
from instep.devices import module_device, resolve_device
from instep.engines.base import (
    RankOptions,
    ReplicaCall,
    add_replica_note,
    raise_first_error,
    run_forward,
    run_prepared,
)
from instep.engines.concurrent import ConcurrentEngine
from instep.engines.rendezvous import Rendezvous
from instep.engines.thread_pool import is_replica_thread, set_replica_thread
from instep.engines.torchrun.backward import RankBackward, end_message, sum_over_ranks
from instep.engines.torchrun.channel import BEGIN, END, FAILED, IDLE, OTHER_ROWS, Message
from instep.engines.torchrun.checks import CallDigests, check_digests, check_modules, check_seeds
from instep.engines.torchrun.codec import (
    ArgumentWrites,
    RankGraph,
    apply_result,
    decode_error,
    decode_result,
    decode_value,
    encode_error,
    encode_result,
    encode_value,
)
from instep.engines.torchrun.digest import digest_arguments, digest_tensors
from instep.engines.torchrun.group import RankGroup
from instep.engines.torchrun.launch import Ranks, connect, rank_device, world_size
from instep.engines.torchrun.local_buckets import LocalBuckets, bucket_places
from instep.engines.torchrun.prepared import PreparedRankRun
from instep.engines.torchrun.reduction import BucketAllReduce, BucketPlan
from instep.engines.torchrun.row_order import RowOrders
from instep.errors import EngineError, LostExchange, RankFailure
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.stand_in import ReplicaStandIn
from instep.runtime.backoff import NEVER, Backoff
from instep.runtime.modes import set_inference_mode
from instep.runtime.torch_private import without_checkpoint_hooks
from instep.runtime.version import __version__

_numbers = itertools.count(1)
_MAX_LAYOUTS = 2
"""The number of bucket layouts for which memory is kept. Each set of trainable parameters has its own."""
VerdictT = TypeVar("VerdictT")


class TorchrunEngine(ConcurrentEngine[Rendezvous]):
    """Runs the replica of this rank in the calling thread."""

    name = "torchrun"
    out_of_process = True

    def __init__(self, devices: Sequence[torch.device], ranks: Ranks, *, timeout: float) -> None:
        super().__init__(devices, timeout=timeout)
        self._ranks, self.channel = ranks, ranks.channel
        self._number = next(_numbers)
        self._name = "the module"
        self._num_calls = 0
        self._sent_values: Sequence[Tensor] = ()
        self._needs_agreement = False
        """Whether ranks may judge the last forward differently."""
        self._has_mixed_paths = False
        """Whether only some ranks have run it as a prepared one."""
        self._operation = ""
        """The forward that runs, or was the last one."""
        self._call_checks = Backoff(limit=NEVER, eager=2)
        self.options = RankOptions()
        self._module: Callable[[], nn.Module | None] = lambda: None
        self.loss_checks = Backoff(limit=NEVER, eager=2)
        self.row_orders = RowOrders()
        self._writes_arguments = False
        """Whether the forward of any rank has written to an argument in place."""
        self._last_reducer: BucketAllReduce | None = None
        """Kept until the next one: threads of Gloo must not free its tensors (see `RankChannel`)."""
        self._reducer: BucketAllReduce | None = None
        """The reduction of the backward that runs, if it reduces gradients meanwhile."""
        self._bucket_plan: BucketPlan | None = None
        self._local_buckets: dict[Any, LocalBuckets | None] = {}
        """By process group and buckets: the memory for them, or None if it could not be made."""
        self._hooked_leaves: list[Tensor] = []
        self._gradient_hooks: dict[int, RemovableHandle] = {}
        """The hooks on these leaves, by index."""

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> TorchrunEngine:  # noqa: ARG003
        return cls(devices, connect(devices[0], timeout), timeout=timeout)

    @property
    def _rank(self) -> int:
        return self._ranks.rank

    @classmethod
    def resolve_devices(cls, specs: Sequence[Any] | None, module: nn.Module) -> list[torch.device]:
        if specs is not None and len(specs) != 1:
            raise EngineError(
                f"device_ids={list(specs)}: with engine='torchrun' every rank has one device. Leave device_ids out, "
                f"and each rank takes the device of its LOCAL_RANK, or name one device for this rank: device_ids=[0]."
            )
        device = rank_device(module_device(module)) if specs is None else resolve_device(specs[0])
        return [device] * world_size()

    def describe_transport(self) -> str:
        return f"this is rank {self._rank} of {self._ranks.count}"

    def replica_classes(self) -> list[type[Replica]]:
        return [Replica if rank == self._rank else ReplicaStandIn for rank in range(self._ranks.count)]

    def attach(self, module: nn.Module, options: RankOptions) -> None:
        """Check that all ranks have the same module, and give all of them the values and generators of rank 0."""
        self.options, self._module = options, weakref.ref(module)
        self._name = f"{type(module).__name__} (wrapper {self._number})"
        tensors = [
            (name, tensor)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if not isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
        ]
        versions = f"torch {torch.__version__.partition('+')[0]} and instep {__version__}"
        layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
        operation = f"creating a wrapper of {self._name}"
        messages = self.channel.exchange(Message(operation, body=(versions, layout)))
        self.channel.check(messages)
        check_modules([message.body for message in messages])
        with torch.no_grad(), set_inference_mode(False):
            values = [tensor.detach() for _, tensor in tensors if tensor.layout is torch.strided]
            self._broadcast(values)
        self._share_generators(operation)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of rank 0 to all ranks."""
        if self._ranks.count == 1:
            return
        values = [tensor.contiguous() for tensor in tensors]
        for tensor, value in zip(tensors, values, strict=True):
            dist.broadcast(value, 0, group=self._ranks.bucket_group)
            if value is not tensor:
                tensor.copy_(value)
        self._sent_values = values  # threads of Gloo must not free them (see `RankChannel`)

    def _share_generators(self, operation: str) -> None:
        """Set the default generators of this rank to the states of those of rank 0."""
        device = self._devices[0]
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        messages = self.channel.exchange(Message(operation, tensors=states))
        self.channel.check(messages)
        if self._rank:
            torch.set_rng_state(messages[0].tensors[0].clone())
            if device.type == "cuda":
                torch.cuda.set_rng_state(messages[0].tensors[1].clone(), device)

    def agree(self, verdict: VerdictT, failure: BaseException | None) -> VerdictT:
        agreed: Any = self._agree(verdict, failure)
        # A prepared run can only be repeated from the start. If some ranks had one, all of them do that.
        if self._has_mixed_paths and agreed.runs_again:
            agreed = type(agreed)(retry=True)
        return cast(VerdictT, agreed)

    def _agree(self, verdict: VerdictT, failure: BaseException | None) -> VerdictT:
        if not self._needs_agreement:  # all ranks have come to the same verdict, from the same messages
            if failure is not None:
                raise failure
            return verdict
        body = verdict, None if failure is None else encode_error(failure)
        messages = self.channel.exchange(Message(f"{self._operation}: deciding how to go on", body=body))
        self.channel.check(messages)
        verdicts = [message.body[0] for message in messages]
        verdict_type: Any = type(verdict)
        combined: Any = verdict if verdicts.count(verdict) == len(verdicts) else verdict_type.combine(verdicts)
        if combined.failed and not combined.runs_again:
            if failure is not None:
                raise failure
            rank = next(rank for rank, message in enumerate(messages) if message.body[1])
            raise add_replica_note(f"rank {rank}", decode_error(messages[rank].body[1]))
        return cast(VerdictT, combined)

    @property
    def own_output(self) -> int | None:
        return self._rank if self.options.sharded else None

    def begin_call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], one_device: str) -> None:
        if self._ranks.count == 1:
            return
        self._call_checks.advance()
        module = self._module()
        if not self._call_checks.is_due or module is None:
            return
        self._call_checks.record()
        what = f"call {self._call_checks.calls} of {self._describe(method)}, {_mode(module)}"
        what += f", on one device, because {one_device}" if one_device else ""
        batch = "" if self.options.local_batches else digest_arguments(args, kwargs)
        tensors = digest_tensors([*module.parameters(), *module.buffers()])
        messages = self.channel.exchange(Message(what, body=CallDigests(batch, tensors)))
        self.channel.check(messages)
        check_digests([message.body for message in messages])

    def gather_arguments(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        body, tensors = encode_value(values, self._devices[0])
        what = f"a call of {self._name} with batches='local'"
        messages = self.channel.exchange(Message(what, body=body, tensors=tensors))
        self.channel.check(messages)
        device = self._devices[0]
        return [
            values if rank == self._rank else decode_value(message.body, message.tensors, device)
            for rank, message in enumerate(messages)
        ]

    def _describe(self, method: str) -> str:
        return self._name if method == "forward" else f"{self._name}.{method}"

    def forward(self, call: ReplicaCall, *, prepared: bool = False) -> list[ReplicaResult]:
        """Run the forward of this rank's replica, and get the results of all.

        Args:
            prepared: Whether this rank runs the call as a prepared one (see `PreparedRankRun`). Others may not.
        """
        self._num_calls += 1
        module = self._describe(call.method)
        mode = _mode(call.replicas[0].source_modules[0])
        self._operation = f"forward {self._num_calls} of {module}, {mode}, with a batch of {sum(call.sizes)}"
        for replica in call.replicas:
            if isinstance(replica, ReplicaStandIn):
                replica.restore_views()
        caller, index = call.rng.caller, self._rank
        header = (caller.cpu.base_seed, caller.accelerator_seed.base_seed), prepared
        group = RankGroup(self.channel, self._operation, len(call.replicas))
        if not self._writes_arguments:  # such a call must not run twice
            group.expect_rows(self.row_orders, ("forward", call.method, mode))
        self._needs_agreement, self._has_mixed_paths = True, False  # until the messages of all ranks say otherwise
        if group.expected:  # is every rank about to gather these rows?
            self.channel.check(self.channel.exchange(Message(self._operation, BEGIN)))
        if index >= len(call.replicas):
            idle = Message(self._operation, state=IDLE, body=(header, b"", False))
            return self._finish_forward(call, group, self.channel.exchange_idle(idle))
        writes = ArgumentWrites(call, index)
        handles = RemovableHandle.next_id
        outer = is_replica_thread()
        set_replica_thread(True)
        try:
            with without_checkpoint_hooks():
                own = run_prepared(call, index, group) if prepared else run_forward(call, index, group)
        finally:
            set_replica_thread(outer)
        if group.broken is not None:
            return self._raise_broken(group.broken, own)
        finish_error = group.finish(failed=own.error is not None)
        if finish_error is not None and own.error is None:
            own = ReplicaResult(error=finish_error)
        if group.left_order:
            left = Message(self._operation, state=OTHER_ROWS, body=(header, b"", True))
            return self._finish_forward(call, group, self.channel.exchange(left))
        try:
            if own.error is not None:
                raise own.error
            if call.select_output is not None and not self.options.sharded:
                own.output = call.select_output(own.output)
            has_idle_ranks = len(call.replicas) < self._ranks.count
            body, tensors = encode_result(
                call, index, own, writes, with_output=not self.options.sharded, with_counters=has_idle_ranks
            )
            effects = RemovableHandle.next_id != handles or (call.has_local_effects and call.has_local_effects(own))
            message = Message(self._operation, body=(header, body, bool(effects)), tensors=tensors)
        except KeyboardInterrupt:  # the launcher interrupts the other ranks too
            raise
        except BaseException as error:
            own = ReplicaResult(error=error)
            message = Message(self._operation, state=FAILED, body=(header, encode_error(error), True))
        messages = self.channel.exchange(message)
        return self._finish_forward(call, group, messages, own, writes)

    def _finish_forward(
        self,
        call: ReplicaCall,
        group: RankGroup,
        messages: Sequence[Message],
        own: ReplicaResult | None = None,
        writes: ArgumentWrites | None = None,
    ) -> list[ReplicaResult]:
        """The results of all replicas, from the last messages of a forward."""
        self.channel.check_operations(messages)
        failed = any(message.state == FAILED for message in messages)
        if group.expected and (failed or any(message.state == OTHER_ROWS for message in messages)):
            # Other ranks may have computed with zeros: the errors of a run with messages are the true ones.
            group.forget_rows(self.row_orders)
            raise LostExchange("a rank made other collective calls than in the last calls, or failed.")
        if not failed:
            self.channel.check(messages)
        if all(message.step == END for message in messages):
            headers = [message.body[0] for message in messages]
            check_seeds([seeds for seeds, _ in headers])
            self._has_mixed_paths = len({prepared for _, prepared in headers}) > 1
        if failed:
            self._raise_broken(messages, own)
        group.record_rows(self.row_orders)
        self._needs_agreement = any(message.body[2] for message in messages)
        results = []
        encoded = [
            None if rank == self._rank else decode_result(call, rank, messages[rank].body[1], messages[rank].tensors)
            for rank in range(len(call.replicas))
        ]
        own_writes = own is not None and writes is not None and bool(writes.written())
        others_write = any(other.written_arguments for other in encoded if other is not None)
        self._writes_arguments = self._writes_arguments or own_writes or others_write
        for rank, other in enumerate(encoded):
            if other is None:
                assert own is not None
                results.append(own)
                continue
            result = apply_result(call, rank, other, idle=own is None)
            result.remote.used_arguments = set(map(id, call.grad_inputs[rank])) if call.grad_inputs else ()
            if call.ambient.grad_enabled:
                result.remote.graph = RankGraph(self._operation, call.sizes, other.num_tokens)
            results.append(result)
        return results

    def _raise_broken(self, messages: Sequence[Message], own: ReplicaResult | None) -> list[ReplicaResult]:
        """Raise the error of the first rank that failed in a forward."""
        names = [f"rank {rank}" for rank in range(self._ranks.count)]
        results = [ReplicaResult() for _ in names]
        for rank, message in enumerate(messages):
            if message.state == FAILED and rank != self._rank:
                results[rank] = ReplicaResult(error=decode_error(message.body[1]))
        if own is not None:
            results[self._rank] = own
        raise_first_error(names, results)
        raise RankFailure(f"{self._operation} failed on another rank.")

    def prepare(self, call: ReplicaCall, results: Sequence[ReplicaResult]) -> PreparedRankRun | None:
        if not self._on_cpu or len(call.replicas) < self._ranks.count:
            return None
        return PreparedRankRun.create(self, call, results[self._rank], results)

    def may_run_prepared(self, call: ReplicaCall) -> bool:
        """Whether such a call is expected to call no collectives, and no call has written to an argument.

        All ranks return the same.
        """
        key = "forward", call.method, _mode(call.replicas[0].source_modules[0])
        return not self._writes_arguments and not self.row_orders.expected(key)

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool, *, captures: bool = False
    ) -> tuple[Gradients, list[Gradients]]:
        """Run the backward of this rank's replica, and sum the gradients of all.

        Args:
            captures: Whether gradients may be captured instead of accumulated, if that is faster.
        """
        with self._lock:
            backward = RankBackward(self, graph, gradients, retain_graph, captures=captures)
            try:
                column, inputs = backward.run()
            except BaseException:
                for replica in graph.replicas:
                    take_gradients(replica.leaves)
                    take_gradients(replica.inputs)
                raise
            if backward.deferred:
                self._defer(graph.sources, [column])
                return [None] * len(graph.sources), inputs
            return column, inputs

    def begin_reduction(self, sources: Sequence[Tensor], leaves: Sequence[Tensor]) -> BucketAllReduce:
        """A reduction of the gradients of leaves."""
        group = self._ranks.bucket_group
        if self._bucket_plan is None or not self._bucket_plan.is_current(sources):
            self._bucket_plan = BucketPlan(sources, self._module())
        local = self._local_buckets.get((group, self._bucket_plan.buckets))
        reducer = BucketAllReduce(
            self._bucket_plan,
            group,
            self._devices[0],
            leaves,
            self.options.reduce,
            local,
        )
        self._last_reducer = reducer if local is None else None
        return reducer

    def start_overlap(self, reducer: BucketAllReduce, leaves: Sequence[Tensor]) -> None:
        """From now on, start buckets when their gradients arrive."""
        self._watch_gradients(leaves, reducer.watched())
        self._reducer = reducer

    def finish_reduction(self, reducer: BucketAllReduce, messages: Sequence[Message]) -> Gradients:
        """The sums of all ranks' gradients, given their last messages."""
        sums = sum_over_ranks(self.channel, reducer, messages)
        self._share_buckets(messages[self._rank].operation)
        return sums

    def _share_buckets(self, operation: str) -> None:
        """Make memory for the next reduction like the last one, if Gloo would send between ranks of one machine.

        All ranks have made the last one, so that all of them come here. After ranks were out of step they have a new
        group, and all of them begin anew.
        """
        by_host = self.channel.sends_by_host and self.channel.is_local
        buckets = () if self._bucket_plan is None else self._bucket_plan.buckets
        key = self._ranks.bucket_group, buckets
        if not by_host or self.options.reduce is not None or not buckets or key in self._local_buckets:
            return
        if len(self._local_buckets) >= _MAX_LAYOUTS or any(group is not key[0] for group, _ in self._local_buckets):
            self._local_buckets.clear()
        places = bucket_places(buckets)
        memory = self.channel.share_memory(operation, LocalBuckets.nbytes(self._ranks.count, places))
        self._local_buckets[key] = None if memory is None else LocalBuckets(memory, self.channel, places)

    def _watch_gradients(self, leaves: Sequence[Tensor], watched: set[int]) -> None:
        """Register hooks that report the arrival of gradients, by the indices of the leaves."""
        same = len(leaves) == len(self._hooked_leaves) and all(map(is_, leaves, self._hooked_leaves))
        if not same:
            for handle in self._gradient_hooks.values():
                handle.remove()
            self._gradient_hooks, self._hooked_leaves = {}, list(leaves)
        for index in self._gradient_hooks.keys() - watched:
            self._gradient_hooks.pop(index).remove()
        for index in watched - self._gradient_hooks.keys():
            leaf = leaves[index] if index < len(leaves) else None
            if leaf is not None and leaf.is_leaf and leaf.requires_grad:
                hook = _GradientHook(weakref.ref(self), index)
                self._gradient_hooks[index] = leaf.register_post_accumulate_grad_hook(hook)

    def stop_overlap(self) -> None:
        """Gradients that arrive from now on are not reduced."""
        self._reducer = None

    def on_gradient(self, index: int) -> None:
        """Called when the gradient of a watched leaf has arrived."""
        if self._reducer is not None:
            self._reducer.mark_ready(index)

    @property
    def defers_gradients(self) -> bool:
        """Whether a backward runs inside `no_sync`."""
        return self._in_no_sync

    def _sum_deferred(self, sources: Sequence[Tensor], columns: Sequence[Gradients]) -> Gradients:
        operation = f"end of no_sync of {self._name}"
        reducer = self.begin_reduction(sources, ())
        reducer.set_gradients(columns[0])
        reducer.start_rest()
        messages = self.channel.exchange(end_message(operation, reducer, columns[0]))
        self.channel.check(messages)
        return self.finish_reduction(reducer, messages)

    def close(self) -> None:
        """The connections to the other ranks stay: other wrappers use them."""


class _GradientHook:
    __torch_unserializable__ = True  # not saved with the parameter

    def __init__(self, engine: weakref.ref[TorchrunEngine], index: int) -> None:
        self._engine, self._index = engine, index

    def __call__(self, _: Tensor) -> None:
        engine = self._engine()
        if engine is not None:
            engine.on_gradient(self._index)


def _mode(module: nn.Module) -> str:
    mode = "in training mode" if module.training else "in evaluation mode"
    return mode if torch.is_grad_enabled() else f"{mode}, without gradients"
