"""Reasons for running a call on one device instead of on the replicas.

Each reason is a row of data: its name, the message that is given once, and whether later calls in the same mode are
spared the attempt. `ParallelRunner` asks at four points: before the arguments are bound, when the plan is known, when
the replicas are up to date, and when they have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from instep.engines.thread_pool import is_replica_thread
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.user_hooks import UserHook, UserHooks
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.torch_private import has_thread_local_transform
from instep.structure.plan import SplitPlan


class Reason(NamedTuple):
    """Why a call runs on one device."""

    name: str
    message: str = ""
    """Warned once per wrapper, formatted with the details of the first occurrence; nothing if empty."""
    remembered: bool = False
    """Whether later calls in the same mode run on one device without trying the replicas first."""


ONE_REPLICA = Reason("there is one replica")
NESTED_CALL = Reason("the call is made by a replica")
LAZY_MODULE = Reason("the module has uninitialized parameters")
FUNC_TRANSFORM = Reason("the call is inside a torch.func transform")
NOT_BATCHED = Reason("no argument is batched")
BATCH_TOO_SMALL = Reason("the batch is too small to split")
USER_HOOKS = Reason(
    "the module has hooks",
    "calls run on one device because {module} has a {kind} ({name!r}), which expects the whole batch.\n"
    "To run it on every shard instead: DataParallel(..., hooks='per_replica').",
)
MAX_NORM_EMBEDDING = Reason(
    "the weight of an Embedding(max_norm=...) is used elsewhere",
    "calls run on one device because forward renormalizes the weight of an Embedding(max_norm=...) in place and other "
    "code uses, or may use, the same weight.",
)
CARRIED_STATE = Reason(
    "forward reads state of the previous call",
    "calls run on one device because forward reads {path!r}, which it set for the samples of the previous call.\n"
    "If each sample reads only its own entries{hint}: DataParallel(..., state={{{path!r}: 'cat'}}).",
)
CALLER_ONLY_OBJECT = Reason(
    "forward uses an object that replicas cannot share",
    "calls run on one device because forward uses {path!r}, a {type} that replicas can neither share nor copy.",
)
TENSOR_HOOK = Reason("forward registers hooks on tensors", USER_HOOKS.message, remembered=True)
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
    "a list or dictionary that holds tensors or modules.",
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
        self._caller_only: dict[CallMode, list[Any]] = {}
        """Objects of the module that a forward used and that replicas cannot share."""
        self._structure_changes = 0
        self._warned: set[Reason] = set()

    def mode(self, method: str) -> CallMode:
        return CallMode(method, self._module.training, torch.is_grad_enabled())

    def before(self) -> Reason | None:
        """A reason that is known before the arguments are looked at."""
        if len(self._replicas.devices) == 1:
            return ONE_REPLICA
        if is_replica_thread():
            return NESTED_CALL
        if self._is_lazy():
            return LAZY_MODULE
        if has_thread_local_transform():
            return FUNC_TRANSFORM
        return self._check_user_hooks()

    def explain(self, method: str, plan: SplitPlan) -> Reason | None:
        """The reason that the next call with this plan would have, as far as it is known. Warns about nothing."""
        if is_replica_thread():
            return NESTED_CALL
        if self._is_lazy():
            return LAZY_MODULE
        if self._find_user_hook() is not None:
            return USER_HOOKS
        return self.for_plan(plan) or self._remembered.get(self.mode(method))

    def for_plan(self, plan: SplitPlan) -> Reason | None:
        """A reason in how the arguments split."""
        if plan.parts > 1:
            return None
        return NOT_BATCHED if plan.batch_size is None else BATCH_TOO_SMALL

    def for_module(self, method: str) -> Reason | None:
        """A reason in the module, once the replicas are up to date with it."""
        replicas, mode = self._replicas, self.mode(method)
        if replicas.has_shared_max_norm_weight():
            self.warn(MAX_NORM_EMBEDDING)
            return MAX_NORM_EMBEDDING
        # Modules that are not registered are known by now.
        if replicas.generation != self._hook_free_generation and (reason := self._check_user_hooks()):
            return reason
        if self._caller_only and replicas.holds_any(self._caller_only.get(mode, ())):
            return CALLER_ONLY_OBJECT
        return self._remembered.get(mode)

    def remember(self, reason: Reason, method: str, **details: Any) -> Reason:
        """Warn about a reason that a forward on the replicas has shown, and remember it where that is due."""
        self.warn(reason, **details)
        if reason.remembered:
            self._remembered[self.mode(method)] = reason
        return reason

    def forget(self, method: str) -> None:
        """Try the replicas again in this mode."""
        self._remembered.pop(self.mode(method), None)

    def caller_only_object(self, method: str) -> Reason | None:
        """The reason if a replica has used an object that only the caller may use."""
        used = self._replicas.caller_only_accesses
        if not used:
            return None
        path, kind = self._replicas.attribute_name(used[0]), type(used[0]).__name__
        self._caller_only.setdefault(self.mode(method), []).extend(used)
        used.clear()
        return self.remember(CALLER_ONLY_OBJECT, method, path=path, type=kind)

    def structure_changed(self) -> Reason:
        """The reason if forward changed its replica's structure. The first change is not warned about."""
        self._structure_changes += 1
        if self._structure_changes > 1:
            self.warn(STRUCTURE_CHANGED)
        return STRUCTURE_CHANGED

    def registered_hook(self, method: str, handles: range) -> Reason | None:
        """The reason if the user's forward registered hooks on tensors; such hooks are removed from the replicas."""
        if not handles or not self._whole_batch_hooks:
            return None
        hook = self.user_hooks.remove_tensor_hooks(handles, self.mode(method))
        return None if hook is None else self.remember(TENSOR_HOOK, method, **hook._asdict())

    def retained_grad(self, method: str, retains: bool) -> Reason | None:
        """The reason if forward asked for the gradient of a tensor that it keeps or returns."""
        return self.remember(RETAIN_GRAD, method) if retains and self._whole_batch_hooks else None

    def custom_backward(self, method: str, functions: Sequence[str]) -> Reason:
        return self.remember(CUSTOM_BACKWARD, method, functions=" or ".join(functions))

    def warn(self, reason: Reason, **details: Any) -> None:
        """Give the message of a reason once."""
        if reason.message and reason not in self._warned:
            self._warned.add(reason)
            warn_caller(reason.message.format(**details))

    def _find_user_hook(self) -> UserHook | None:
        if not self._whole_batch_hooks:
            return None
        return self.user_hooks.find(self._replicas.modules, self._replicas.generation)

    def _check_user_hooks(self) -> Reason | None:
        hook = self._find_user_hook()
        self._hook_free_generation = self._replicas.generation if hook is None else -1
        if hook is None:
            return None
        self.warn(USER_HOOKS, **hook._asdict())
        return USER_HOOKS

    def _is_lazy(self) -> bool:
        """Whether the module has uninitialized parameters or buffers, which its first call on one device creates."""
        if self._maybe_lazy:
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._maybe_lazy = any(isinstance(t, (UninitializedBuffer, UninitializedParameter)) for t in tensors)
        return self._maybe_lazy
