"""Reasons for running a call on one device instead of on the replicas.

Each reason is a row of data: its name, its message, and whether it is remembered for later calls in the same mode.
`ParallelRunner` looks for a reason at four points: before it binds the arguments, when it has the plan, when the
replicas are synchronized, and when they have run. The methods that look for a reason do not warn: `explain` calls some
of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from instep.engines.thread_pool import is_replica_thread
from instep.probe.probe import Outcome, Probe
from instep.probe.trial_call import TrialCall
from instep.replicas.object_graph import walk
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.carried import CarriedValue
from instep.replicas.state.max_norm import is_weight_shared, max_norm_weights
from instep.replicas.user_hooks import UserHooks, remove_tensor_hooks
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.torch_private import has_thread_local_transform
from instep.structure.plan import SplitPlan


class Reason(NamedTuple):
    """Why a call runs on one device."""

    name: str
    message: str = ""
    """The warning, given once per wrapper; empty for none."""
    remembered: bool = False
    """Whether later calls in the same mode run on one device without trying the replicas first."""

    def format(self, **details: Any) -> Reason:
        """The reason with these details in its message."""
        return self._replace(message=self.message.format(**details))

    def without_warning(self) -> Reason:
        return self._replace(message="")


ONE_REPLICA = Reason("there is one replica")
NESTED_CALL = Reason("the call is made by a replica")
LAZY_MODULE = Reason("the module has uninitialized parameters")
FUNC_TRANSFORM = Reason("a torch.func transform, forward-mode AD, tracing or a dispatch mode is active")
UNCHECKED_REASONS = (NESTED_CALL, LAZY_MODULE, FUNC_TRANSFORM)
"""Reasons for calls whose arguments or module cannot be compared between ranks."""
NOT_BATCHED = Reason("no argument is batched")
BATCH_TOO_SMALL = Reason("the batch is too small to split")
USER_HOOKS = Reason(
    "the module has hooks",
    "calls run on one device, not on all of them, because {module} has a {kind} ({name!r}), which expects the whole "
    "batch.\nTo use all devices, run it on every shard: DataParallel(..., hooks='per_replica'); or register it on the "
    "wrapper, or remove it.",
)
MAX_NORM_EMBEDDING = Reason(
    "the weight of an Embedding(max_norm=...) is used elsewhere",
    "calls run on one device because forward renormalizes the weight of an Embedding(max_norm=...) in place and other "
    "code uses, or may use, the same weight.\nTo use all devices, give the other code a weight of its own.",
)
CARRIED_STATE = Reason(
    "forward reads, or may read, state of the previous call",
    "calls run on one device because forward reads {path!r}, which it set for the samples of the previous call.\n"
    "{advice}",
)
CALLER_ONLY_OBJECT = Reason(
    "forward uses an object that replicas cannot share",
    "calls run on one device because forward uses {path!r}, a {type} that replicas can neither share nor copy.\n"
    "To use all devices, pass its value as an argument of the call.",
)
TENSOR_HOOK = Reason(
    "forward registers hooks",
    "calls run on one device because forward registers hooks on tensors or modules, which expect the whole batch.\n"
    "To run them on every shard instead: DataParallel(..., hooks='per_replica').",
    remembered=True,
)
RETAIN_GRAD = Reason(
    "forward calls retain_grad()",
    "calls run on one device because forward calls retain_grad() on a tensor that it keeps or returns.\n"
    "With hooks='per_replica' calls run on all devices and such a tensor has no gradient.",
    remembered=True,
)
CUSTOM_BACKWARD = Reason(
    "a custom backward depends on the whole batch",
    "calls run on one device because the backward of {functions} gives parts of a batch other gradients than the whole "
    "batch.\nWith probe=False calls run on all devices and each backward sees one shard.",
    remembered=True,
)
CPU_CHECKPOINT_RNG = Reason(
    "checkpointed regions draw on the CPU",
    "calls run on one device because forward draws random numbers on the CPU in a checkpointed region, and the one "
    "backward of engine='serial' would recompute it on two device types at once.\n"
    "With engine='threads' calls run on all devices.",
    remembered=True,
)
STRUCTURE_CHANGED = Reason(
    "forward changes the structure of the module",
    "calls run on one device because every forward adds, removes or replaces modules, parameters, hooks, or entries of "
    "a list or dictionary that holds tensors or modules.\nTo use all devices, do this outside forward.",
)


class CallMode(NamedTuple):
    """What calls have in common that share a remembered reason."""

    method: str
    training: bool
    grad_enabled: bool


class OneDevice:
    """Finds the reason, if any, for running a call on one device."""

    def __init__(self, module: nn.Module, replicas: ReplicaSet, hooks: str) -> None:
        self._module = module
        self._replicas = replicas
        self._whole_batch_hooks = hooks == "whole"
        self.user_hooks = UserHooks(module)
        self._maybe_lazy = True
        self._hook_free_generation = -1
        """Generation of the replica set in which no user hook was found before this call."""
        self._remembered: dict[CallMode, Reason] = {}
        self._hook_modes: set[CallMode] = set()
        """Modes in which a call on one device has registered hooks."""
        self._caller_only: dict[CallMode, list[Any]] = {}
        """Objects of the module that a forward used and that replicas cannot share."""
        self._structure_changes = 0
        self._warned: set[str] = set()

    def mode(self, method: str) -> CallMode:
        return CallMode(method, self._module.training, torch.is_grad_enabled())

    def before(self) -> Reason | None:
        """A reason that does not depend on the arguments."""
        if len(self._replicas.devices) == 1:
            return ONE_REPLICA
        if is_replica_thread():
            return NESTED_CALL
        if self._is_lazy():
            return LAZY_MODULE
        if has_thread_local_transform():
            return FUNC_TRANSFORM
        return self._find_user_hook()

    def for_plan(self, plan: SplitPlan) -> Reason | None:
        """A reason in how the arguments split."""
        if plan.parts > 1:
            return None
        return NOT_BATCHED if plan.batch_size is None else BATCH_TOO_SMALL

    def for_module(self, method: str) -> Reason | None:
        """A reason in the module or in earlier calls. The replicas are synchronized."""
        replicas = self._replicas
        return self._for_module(method, replicas.has_shared_max_norm_weight(), replicas.holds_any)

    def explain(self, method: str, plan: SplitPlan) -> Reason | None:
        """The same reasons for `explain`. They are read from the module: replicas may be absent or out of date."""
        modules = list(self._module.modules())
        shares_weight = is_weight_shared(modules, max_norm_weights(modules))
        return self.for_plan(plan) or self._for_module(method, shares_weight, self._module_reaches_any)

    def _for_module(
        self, method: str, shares_max_norm_weight: bool, holds_any: Callable[[Sequence[Any]], bool]
    ) -> Reason | None:
        if shares_max_norm_weight:
            return MAX_NORM_EMBEDDING
        # Replicas show modules that are not registered.
        if self._replicas.generation != self._hook_free_generation and (reason := self._find_user_hook()):
            return reason
        if not self._caller_only and not self._remembered:
            return None
        mode = self.mode(method)
        if self._caller_only and holds_any(self._caller_only.get(mode, ())):
            return CALLER_ONLY_OBJECT.without_warning()
        return self._remembered.get(mode)

    def _module_reaches_any(self, objects: Sequence[Any]) -> bool:
        ids, roots = set(map(id, objects)), [("", module.__dict__) for module in self._module.modules()]
        return bool(ids) and any(id(visit.value) in ids for visit in walk(roots))

    def record(self, reason: Reason, method: str) -> None:
        """Warn about the reason of a call, once, and remember it if later calls have it too."""
        if reason.message and reason.name not in self._warned:
            self._warned.add(reason.name)
            warn_caller(reason.message)
        if reason.remembered:
            self._remembered[self.mode(method)] = reason

    def take_caller_only_access(self, method: str) -> Reason | None:
        """The reason if a replica has used an object that only the caller may use. Clears the list of such accesses."""
        used = self._replicas.caller_only_accesses
        if not used:
            return None
        path, type_name = self._replicas.attribute_name(used[0]), type(used[0]).__name__
        self._caller_only.setdefault(self.mode(method), []).extend(used)
        used.clear()
        return CALLER_ONLY_OBJECT.format(path=path, type=type_name)

    def record_structure_change(self) -> Reason:
        """Count a change of a replica's structure and return the reason. The first change gives no warning."""
        self._structure_changes += 1
        return STRUCTURE_CHANGED if self._structure_changes > 1 else STRUCTURE_CHANGED.without_warning()

    def remove_registered_hooks(self, hook_ids: Collection[int]) -> Reason | None:
        """Remove hooks that forward registered from the module's own tensors. Returns the reason if there are any."""
        if not hook_ids or not self._whole_batch_hooks:
            return None
        remove_tensor_hooks([source for source, _ in self._replicas.replicas[0].trainable], hook_ids)
        return TENSOR_HOOK.without_warning()

    def ran_with_hooks(self, method: str, *, registered: bool) -> None:
        """Record whether a call that ran on one device because of `TENSOR_HOOK` registered hooks again.

        If not, the replicas are tried again. The warning comes with the second call that did: some libraries register
        hooks once, at the first call.
        """
        mode = self.mode(method)
        if not registered:
            self._remembered.pop(mode, None)
            self._hook_modes.discard(mode)
        elif mode in self._hook_modes:
            self.record(TENSOR_HOOK, method)
        else:
            self._hook_modes.add(mode)

    def retained_grad(self, retains: bool) -> Reason | None:
        """The reason if forward called `retain_grad()` on a tensor that it keeps or returns."""
        return RETAIN_GRAD if retains and self._whole_batch_hooks else None

    def _find_user_hook(self) -> Reason | None:
        """The reason if the user registered a hook on a module."""
        if not self._whole_batch_hooks:
            return None
        hook = self.user_hooks.find(self._replicas.modules, self._replicas.generation)
        self._hook_free_generation = self._replicas.generation if hook is None else -1
        return None if hook is None else USER_HOOKS.format(**hook._asdict())

    def _is_lazy(self) -> bool:
        """Whether the module has uninitialized parameters or buffers, which its first call on one device creates."""
        if self._maybe_lazy:
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._maybe_lazy = any(isinstance(t, (UninitializedBuffer, UninitializedParameter)) for t in tensors)
        return self._maybe_lazy


def carried_state_advice(probe: Probe | None, call: TrialCall, read: Sequence[CarriedValue]) -> str:
    """The rules that split carried state like the batch, if a trial confirms that samples read only their own."""
    size = call.plan.batch_size
    can_split = all(v.module is not None and all(t.shape[dim] == size for t, dim in v.leaves()) for v in read)
    if can_split and probe is not None and probe.try_reading(call) is Outcome.AGREES:
        rules = {value.path: "cat" for value in read}
        return (
            f"To use all devices, write (tried on samples of this batch: each reads only its own entries):\n"
            f"  DataParallel(..., state={rules})"
        )
    return (
        "If each sample reads only its own entries, keep it as an attribute of a module and declare it by the rule "
        "'cat' of state=: it is then split like the batch. A trial on samples of this batch has not confirmed that."
    )
