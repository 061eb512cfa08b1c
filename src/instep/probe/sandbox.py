"""A private copy of the module for trial runs, restored to the same state after every run."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from instep.probe.snapshot import RngSnapshot, Snapshot
from instep.replicas.clone import MODULE_REGISTRIES, REGISTRIES_AND_HOOKS, Cloner
from instep.replicas.names import TensorOwners, module_names
from instep.replicas.object_graph import Contents, read_contents, tensors_equal
from instep.replicas.shared_containers import SharedContainers, StatePath
from instep.replicas.state.carried import CarriedValue
from instep.replicas.state.max_norm import max_norm_weights
from instep.replicas.tensors import ParameterSharing, ReplicaTensors
from instep.replicas.user_hooks import user_defined
from instep.runtime.locks import run_uninterrupted
from instep.runtime.modes import force_eager, set_inference_mode
from instep.runtime.rng import generators_in
from instep.structure.tree import map_tensors, tensors_in

_MISSING = object()


class Sandbox:
    """A throw-away copy of a module on one device."""

    def __init__(self, source: nn.Module, device: torch.device) -> None:
        self.device = device
        self.used_rng = False
        """Whether a run since this was last set to False drew random numbers."""
        self._tensors = ReplicaTensors(device, ParameterSharing.COPY)
        cloner = Cloner(self._tensors.create, lambda generator: generator)  # put back after every run, like all else
        self._cloner = cloner
        self.module: nn.Module = cloner.clone(source.__dict__.get("_modules", {}).get("_orig_mod", source))
        modules = [made for _, made in cloner.modules]
        for module in modules:
            _remove_user_hooks(module)
            if isinstance(module, (_NormBase, _DropoutNd)):
                module.__dict__["training"] = False
        self._modules = modules
        self._clones = {id(source): made for source, made in cloner.modules}
        self._assigned_shards: dict[tuple[int, str], Any] = {}
        self._owners = TensorOwners(self.module)
        self._names = {id(module): name for name, module in self.module.named_modules()}
        self._snapshot = Snapshot(modules)
        self._initial_dicts = [(module, dict(module.__dict__)) for module in modules]
        self._rng = RngSnapshot(device)
        self._writes_parameters: bool | None = None
        self.double_precision = False
        """Whether it runs in double precision."""
        self._renormalized = max_norm_weights(source.modules())
        self.written_parameters: list[Tensor] = []
        """Trainable tensors of the source that the first run wrote to, in memory of its own, and that no layer may."""

    @property
    def incomparable_reason(self) -> str | None:
        """Why its parts and whole would differ whatever it computes."""
        lacking = [m for m in self._modules if isinstance(m, _BatchNorm) and m.running_mean is None]
        return "batch normalisation without running statistics" if lacking else None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The floating-point types that it computes in."""
        return {made.dtype for _, made in self._tensors.trainable if made.is_floating_point()}

    @contextmanager
    def in_double_precision(self) -> Iterator[None]:
        """Run in double precision for a while, and without autocast."""
        pairs = (*self._tensors.state, *self._tensors.trainable)
        self.double_precision = True
        try:
            for _, made in pairs:
                made.data = to_double(made.data)
            yield
        finally:
            self.double_precision = False
            for source, made in pairs:
                _copy_into(made, source)

    def switch_to_eval(self) -> None:
        """Run in evaluation mode from now on, where nothing should be drawn."""
        self._snapshot.restore()
        for module in self._modules:
            module.__dict__["training"] = False
        self._snapshot = Snapshot(self._modules)
        self._initial_dicts = [(module, dict(module.__dict__)) for module in self._modules]

    def run(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any], dict[str, list[Any]]]:
        """What a call gives, and by dotted name the attributes that it sets and what else it leaves behind.

        Then everything is put back.
        """
        self._rng.track(generators_in([*args, *kwargs.values()]))
        try:
            with self._run_context():
                function = self.module if method == "forward" else getattr(self.module, method)
                output = map_tensors(_detached_clone, function(*args, **kwargs))
                attributes = {name: map_tensors(_detached_clone, value) for name, value in self._assigned_attributes()}
                left: dict[str, list[Any]] = {}
                for place, value in self._other_changes(attributes):
                    left.setdefault(str(place.without_indices()), []).append(map_tensors(_detached_clone, value))
            self.used_rng = self.used_rng or self._rng.has_advanced() or self._snapshot.used_rng()
            run_uninterrupted(self._restore)
            return output, attributes, left
        except BaseException:
            run_uninterrupted(self._restore)
            raise

    def gradients(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        weigh: Callable[[Any], Tensor | None],
    ) -> list[Tensor | None]:
        """The parameters' gradients of what a call gives, made into one number; then everything is put back."""
        leaves = [made for _, made in self._tensors.trainable]
        try:
            with self._run_context(), torch.enable_grad():
                function = self.module if method == "forward" else getattr(self.module, method)
                number = weigh(function(*args, **kwargs))
                self._tensors.guard.set(True)
                if number is None:
                    return [None] * len(leaves)
                found = torch.autograd.grad(number, leaves, allow_unused=True)
            self.used_rng = self.used_rng or self._rng.has_advanced() or self._snapshot.used_rng()
            return list(found)
        finally:
            self._tensors.guard.set(False)
            self._restore()

    def assign_shard(self, slot: CarriedValue, value: Any) -> None:
        """Give the next run a part of the state that an earlier call left on the module."""
        made = self._clones.get(id(slot.module))
        if made is not None:
            here = map_tensors(lambda tensor: tensor.detach().to(self.device), value)
            (made._buffers if slot.name in made._buffers else made.__dict__)[slot.name] = here
            self._assigned_shards[id(made), slot.name] = here

    def initial_value(self, name: str) -> Any:
        """The value of an attribute before a run, by its dotted name; None if there is none."""
        owner, _, key = name.rpartition(".")
        modules = [module for module in self._modules if self._names.get(id(module)) == owner]
        return modules[0].__dict__.get(key) if modules else None

    def _restore(self) -> None:
        self._rng.restore()
        self._snapshot.restore()
        with torch.no_grad(), set_inference_mode(False):
            for source, made in self._tensors.state:
                _copy_into(made, to_double(source) if self.double_precision else source)
            if (
                self._writes_parameters is None and not self.double_precision
            ):  # a forward that writes to its weights does so in every run
                found = [source for source, made in self._tensors.trainable if not tensors_equal(source, made)]
                self._writes_parameters = bool(found)
                self.written_parameters = [source for source in found if id(source) not in self._renormalized]
            for source, made in self._tensors.trainable if self._writes_parameters else ():
                _copy_into(made, to_double(source) if self.double_precision else source)

    def _assigned_attributes(self) -> Iterator[tuple[str, Any]]:
        """Attributes that hold tensors or numbers and that a run has set to another object."""
        for module, then in self._initial_dicts:
            for name, value in self._rebound_entries(module, module.__dict__, then):
                if isinstance(value, (int, float)) or is_number_sequence(value) or any(True for _ in tensors_in(value)):
                    yield name, value

    def _rebound_entries(
        self, module: nn.Module, table: dict[str, Any], then: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Attributes or buffers that a run has set to another object, by dotted name."""
        name = self._names.get(id(module))
        for key, value in table.items() if name is not None else ():
            if key in REGISTRIES_AND_HOOKS or key == "training" or value is then.get(key, _MISSING):
                continue
            if value is not self._assigned_shards.get((id(module), key), _MISSING):
                yield (f"{name}.{key}" if name else key), value

    def _other_changes(self, attributes: Collection[str]) -> Iterator[tuple[StatePath, Any]]:
        """What a run changed beside these attributes: buffers, other attributes, what containers and objects hold."""
        for source, made in self._tensors.state:
            owner = self._owners.find(made)
            if owner.module is not None and not tensors_equal(source, made.to(source.device)):
                yield StatePath(owner.path), made
        changed = self._snapshot.changed()
        if not changed:
            return
        places = SharedContainers(self._modules, module_names(self.module, self._modules), self._cloner).paths
        homes = {id(table): module for module in self._modules for table in (module.__dict__, module._buffers)}
        for held, then in changed:
            if id(held) in homes:
                for key, value in self._rebound_entries(homes[id(held)], held, then.by_key()):
                    if key not in attributes:
                        yield StatePath(key), value
            elif id(held) in places:
                yield from _changed_entries(places[id(held)], held, then)

    def _run_context(self) -> ExitStack:
        """The caller's own, without gradients, compiled code, or casts that autocast would keep."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self.device.type != "cpu":
            stack.enter_context(torch.get_device_module(self.device).device(self.device))
        stack.enter_context(force_eager())
        if self.double_precision:
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
        kept = torch.is_autocast_cache_enabled()
        stack.callback(torch.set_autocast_cache_enabled, kept)
        torch.set_autocast_cache_enabled(False)
        return stack


def _changed_entries(place: StatePath, held: Any, then: Contents) -> Iterator[tuple[StatePath, Any]]:
    """What came into a container, or took the place of something in it."""
    if isinstance(held, (list, deque)):
        grown = len(held) > len(then.items) and all(map(is_, held, then.items))
        known = set() if grown else set(map(id, then.items))
        first = len(then.items) if grown else 0
        yield from ((place, (at, v)) for at, v in enumerate(held) if at >= first and id(v) not in known)
    elif isinstance(held, (set, np.ndarray)):
        yield place, held.copy()
    else:
        before, now = then.by_key(), read_contents(held).by_key()
        yield from (
            (place.child(key), (key, value)) for key, value in now.items() if value is not before.get(key, _MISSING)
        )


def to_double(tensor: Tensor) -> Tensor:
    """The same numbers in double precision; a tensor of anything else than fractions as it is."""
    return tensor.detach().double() if tensor.is_floating_point() and tensor.layout is torch.strided else tensor


def _detached_clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copy_into(made: Tensor, source: Tensor) -> None:
    if made.shape == source.shape and made.dtype == source.dtype and made.layout is torch.strided:
        made.data.copy_(source.detach())
    else:
        made.data = source.detach().to(made.device, copy=True)


def _remove_user_hooks(module: nn.Module) -> None:
    """Take the user's hooks off; those by which libraries do their work (weight_norm, pruning) stay."""
    module.__dict__["_compiled_call_impl"] = None
    for name in REGISTRIES_AND_HOOKS:
        hooks = module.__dict__.get(name)
        if name not in MODULE_REGISTRIES and hooks:
            mine = {id(hook) for hook in user_defined(hooks.values())}
            for key in [key for key, hook in hooks.items() if id(hook) in mine]:
                del hooks[key]


def is_number_sequence(value: Any) -> bool:
    """Whether a value is a list or tuple of numbers, such as a shape."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (int, float)) for item in value)


def copy_arguments(values: Sequence[Any]) -> list[Any]:
    """Arguments of their own for a run, which may write to them."""
    memo: dict[int, Any] = {id(t): t.detach().clone() for value in values for t in tensors_in(value)}
    return [copy.deepcopy(value, memo) for value in values]
