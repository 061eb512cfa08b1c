"""A copy of the module for trial runs, restored to its initial state after every run."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import is_
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from instep.collectives.sync_batchnorm import TrialBatchNorms, use_trial_batch_norm
from instep.probe.draws import TrialDraws
from instep.probe.snapshot import RngSnapshot, Snapshot
from instep.replicas.clone import MODULE_REGISTRIES, REGISTRIES_AND_HOOKS, Cloner
from instep.replicas.names import TensorOwners, module_names
from instep.replicas.object_graph import Contents, mutable_storage, read_contents, tensors_equal
from instep.replicas.shared_containers import SharedContainers, StatePath
from instep.replicas.state.batch_norm import has_standard_forward
from instep.replicas.state.carried import CarriedValue
from instep.replicas.state.max_norm import max_norm_weights
from instep.replicas.tensors import ParameterSharing, ReplicaTensors
from instep.replicas.user_hooks import user_defined
from instep.runtime.locks import run_uninterrupted
from instep.runtime.modes import force_eager, set_inference_mode
from instep.runtime.rng import generators_in
from instep.structure.tree import map_tensors, tensors_in

T = TypeVar("T")
_MISSING = object()


class TrialFailed(Exception):
    """The module or an argument does not support a trial. The call itself may succeed."""


def call_user_code(function: Callable[..., T], *args: Any) -> T:
    """Call a function that runs user code. Raises `TrialFailed` for any exception."""
    try:
        return function(*args)
    except Exception as error:
        raise TrialFailed(f"{type(error).__name__}: {error}".strip().splitlines()[0]) from error


class RunResult(NamedTuple):
    """What a run returned and changed."""

    output: Any
    attributes: dict[str, Any]
    """The attributes that it assigned, by dotted name."""
    changes: dict[str, list[Any]]
    """Other state that it changed, by dotted name: tensors, and entries of containers as (key, value)."""

    def value_of(self, name: str, before: Any) -> Any:
        """The value of an attribute after the run."""
        if name in self.attributes:
            return self.attributes[name]
        entries = self.changes.get(name)
        if entries is None:
            return before
        if isinstance(before, (list, deque)):
            items = list(before)
            for index, value in entries:
                items[index : index + 1] = [value]
            return items
        return entries[-1][1] if isinstance(entries[-1], tuple) else entries[-1]


class Sandbox:
    """A temporary copy of a module on one device. Every run starts from the same state."""

    def __init__(self, source: nn.Module, device: torch.device) -> None:
        self.device = device
        self.draws: TrialDraws | None = None
        """Replaces the random numbers of torch in later runs."""
        self.seed: int | None = None
        """The seed of all generators in later runs; None for the states of the caller."""
        self.takes_gradients = False
        """Whether runs have gradients enabled, because `forward` takes gradients itself."""
        self.in_evaluation_mode = False
        """Whether `switch_to_eval` was called."""
        self.batch_norms = TrialBatchNorms()
        self._drawn: list[Any] = []
        self._tensors = ReplicaTensors(device, ParameterSharing.COPY)
        # Generators are shared with the source, and restored after every run.
        cloner = Cloner(self._tensors.create, lambda generator: generator)
        self._cloner = cloner
        self.module: nn.Module = cloner.clone(source.__dict__.get("_modules", {}).get("_orig_mod", source))
        modules = [clone for _, clone in cloner.modules]
        for module in modules:
            _remove_user_hooks(module)
            if isinstance(module, (_InstanceNorm, _DropoutNd)) or has_standard_forward(module):
                module.__dict__["training"] = False
        self._modules = modules
        self._clones = {id(source): clone for source, clone in cloner.modules}
        self._assigned_shards: dict[tuple[int, str], Any] = {}
        self._owners = TensorOwners(self.module)
        self._names = {id(module): name for name, module in self.module.named_modules()}
        self._snapshot = Snapshot(modules)
        self._initial_dicts = [(module, dict(module.__dict__)) for module in modules]
        self._rng = RngSnapshot(device)
        self._writes_parameters: bool | None = None
        self.double_precision = False
        """Whether runs use double precision."""
        self._renormalized = max_norm_weights(source.modules())
        self.written_parameters: list[Tensor] = []
        """Source parameters whose copies the first run wrote to, except weights that `max_norm` renormalizes."""

    def start_runs(self) -> None:
        """Before runs that `drew_alike` compares."""
        self._drawn = []

    def drew_alike(self) -> bool:
        """Whether the runs since `start_runs` drew no random numbers, or all the same ones.

        If the generators of Python and NumPy are in the same state after each run, each has drawn the same numbers.
        """
        return all(drawn == self._drawn[0] for drawn in self._drawn)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The floating-point dtypes of the parameters."""
        return {tensor.dtype for _, tensor in self._tensors.trainable if tensor.is_floating_point()}

    @contextmanager
    def in_double_precision(self) -> Iterator[None]:
        """Runs inside the context use double precision, without autocast."""
        pairs = (*self._tensors.state, *self._tensors.trainable)
        self.double_precision = True
        try:
            for _, tensor in pairs:
                tensor.data = to_double(tensor.data)
            yield
        finally:
            self.double_precision = False
            for source, tensor in pairs:
                _copy_into(tensor, source)

    def switch_to_eval(self) -> None:
        """Use evaluation mode for later runs, in which modules should not draw random numbers."""
        self.in_evaluation_mode = True
        self._snapshot.restore()
        for module in self._modules:
            module.__dict__["training"] = False
        self._snapshot = Snapshot(self._modules)
        self._initial_dicts = [(module, dict(module.__dict__)) for module in self._modules]

    def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunResult:
        """Call a method, then restore the sandbox."""
        self._start_run(args, kwargs)
        try:
            with self._run_context(torch.enable_grad() if self.takes_gradients else torch.no_grad()):
                function = self.module if method == "forward" else getattr(self.module, method)
                output = map_tensors(_detached_clone, function(*args, **kwargs))
                attributes = {name: map_tensors(_detached_clone, value) for name, value in self._assigned_attributes()}
                changes: dict[str, list[Any]] = {}
                for path, value in self._other_changes(attributes):
                    changes.setdefault(str(path.without_indices()), []).append(map_tensors(_detached_clone, value))
            self._record_draws()
            run_uninterrupted(self._restore)
            return RunResult(output, attributes, changes)
        except BaseException:
            run_uninterrupted(self._restore)
            raise

    def gradients(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reduce_output: Callable[[Any], Tensor | None],
    ) -> list[Tensor | None]:
        """Call a method and return the parameter gradients of its reduced output, then restore the sandbox.

        `reduce_output` maps the output to a scalar, or to None if there is nothing to differentiate.
        """
        leaves = [parameter for _, parameter in self._tensors.trainable]
        self._start_run(args, kwargs)
        try:
            with self._run_context(torch.enable_grad()):
                function = self.module if method == "forward" else getattr(self.module, method)
                scalar = reduce_output(function(*args, **kwargs))
                self._tensors.guard.set(True)
                if scalar is None:
                    return [None] * len(leaves)
                gradients = torch.autograd.grad(scalar, leaves, allow_unused=True)
            self._record_draws()
            return list(gradients)
        finally:
            self._tensors.guard.set(False)
            self._restore()

    def assign_shard(self, carried: CarriedValue, shard: Any) -> None:
        """Set a shard of the state that an earlier call left on the module, for the next run."""
        clone = self._clones.get(id(carried.module))
        if clone is not None:
            local_value = map_tensors(lambda tensor: tensor.detach().to(self.device), shard)
            (clone._buffers if carried.name in clone._buffers else clone.__dict__)[carried.name] = local_value
            self._assigned_shards[id(clone), carried.name] = local_value

    def assign(self, name: str, value: Any) -> None:
        """Set an attribute, a buffer or an entry of a dictionary for the next run, by dotted name."""
        path, table = self._locate(name)
        if table is None:
            return
        key = _find_key(table, (path.keys or path.attribute.split("."))[-1])
        current, local_value = table.get(key), map_tensors(_detached_clone, value)
        if isinstance(current, Tensor) and any(tensor is current for _, tensor in self._tensors.state):
            _copy_into(current, local_value)
            return
        table[key] = local_value
        for module in self._modules:
            if table is module.__dict__:
                self._assigned_shards[id(module), key] = local_value

    def read(self, name: str, default: Any) -> Any:
        """A copy of an attribute, a buffer or an entry of a dictionary before a run, by dotted name."""
        path, table = self._locate(name)
        key = (path.keys or path.attribute.split("."))[-1]
        value = default if table is None else table.get(_find_key(table, key), default)
        return map_tensors(_detached_clone, value)

    def path_of(self, name: str) -> StatePath:
        """A dotted name as an attribute of a module and the keys from there."""
        return self._locate(name)[0]

    def _locate(self, name: str) -> tuple[StatePath, dict[Any, Any] | None]:
        """The path of a dotted name, and the dictionary that holds its last key; None if there is none."""
        modules = {self._names[id(module)]: module for module in self._modules if id(module) in self._names}
        names = name.split(".")
        count = max(count for count in range(len(names)) if ".".join(names[:count]) in modules)
        module, key, keys = modules[".".join(names[:count])], names[count], tuple(names[count + 1 :])
        path = StatePath(".".join(names[: count + 1]), keys)
        table: Any = module._buffers if key in module._buffers else module.__dict__
        for next_key in keys:
            table = mutable_storage(table.get(_find_key(table, key)))
            if not isinstance(table, dict):
                return path, None
            key = next_key
        return path, table

    def _start_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._rng.track(generators_in([*args, *kwargs.values()]))
        self._tensors.guard.set(self.takes_gradients)
        if self.draws is not None:
            self.draws.start_run()
        if self.seed is not None:
            self._rng.reseed(self.seed)

    def _record_draws(self) -> None:
        """Record what the run drew: nothing (None), numbers of torch (equal to no other run), numbers of the host."""
        used_torch = self._rng.torch_has_advanced() or self._snapshot.used_rng()
        self._drawn.append(object() if used_torch else self._rng.host_state())

    def _restore(self) -> None:
        self._rng.restore()
        self._snapshot.restore()
        with torch.no_grad(), set_inference_mode(False):
            for source, tensor in self._tensors.state:
                _copy_into(tensor, to_double(source) if self.double_precision else source)
            # A forward that writes to its parameters is assumed to do so in every run, so the first one decides.
            if self._writes_parameters is None and not self.double_precision:
                written = [source for source, tensor in self._tensors.trainable if not tensors_equal(source, tensor)]
                self._writes_parameters = bool(written)
                self.written_parameters = [source for source in written if id(source) not in self._renormalized]
            for source, tensor in self._tensors.trainable if self._writes_parameters else ():
                _copy_into(tensor, to_double(source) if self.double_precision else source)

    def _assigned_attributes(self) -> Iterator[tuple[str, Any]]:
        """Attributes with tensors or numbers that a run has assigned, by dotted name."""
        for module, initial in self._initial_dicts:
            for name, value in self._rebound_entries(module, module.__dict__, initial):
                if isinstance(value, (int, float)) or is_number_sequence(value) or any(True for _ in tensors_in(value)):
                    yield name, value

    def _rebound_entries(
        self, module: nn.Module, table: dict[str, Any], initial: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Attributes or buffers that a run has assigned, by dotted name."""
        name = self._names.get(id(module))
        for key, value in table.items() if name is not None else ():
            if key in REGISTRIES_AND_HOOKS or key == "training" or value is initial.get(key, _MISSING):
                continue
            if value is not self._assigned_shards.get((id(module), key), _MISSING):
                yield (f"{name}.{key}" if name else key), value

    def _other_changes(self, attributes: Collection[str]) -> Iterator[tuple[StatePath, Any]]:
        """State that a run changed, except these attributes: buffers, other attributes, contents of containers."""
        for source, tensor in self._tensors.state:
            owner = self._owners.find(tensor)
            if owner.module is not None and not tensors_equal(source, tensor.to(source.device)):
                yield StatePath(owner.path), tensor
        changed = self._snapshot.changed()
        if not changed:
            return
        paths = SharedContainers(self._modules, module_names(self.module, self._modules), self._cloner).paths
        owners = {id(table): module for module in self._modules for table in (module.__dict__, module._buffers)}
        for container, before in changed:
            if id(container) in owners:
                for key, value in self._rebound_entries(owners[id(container)], container, before.by_key()):
                    if key not in attributes:
                        yield StatePath(key), value
            elif id(container) in paths:
                yield from _changed_entries(paths[id(container)], container, before)

    def _run_context(self, grad_mode: AbstractContextManager[Any]) -> ExitStack:
        """The caller's context, with this grad mode, without compiled code and the autocast cache."""
        stack = ExitStack()
        stack.enter_context(grad_mode)
        stack.enter_context(use_trial_batch_norm(self.batch_norms))
        if self.device.type != "cpu":
            stack.enter_context(torch.get_device_module(self.device).device(self.device))
        stack.enter_context(force_eager())
        if self.double_precision:
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
        cache_enabled = torch.is_autocast_cache_enabled()
        stack.callback(torch.set_autocast_cache_enabled, cache_enabled)
        torch.set_autocast_cache_enabled(False)
        if self.draws is not None:
            stack.enter_context(self.draws)
        return stack


def _find_key(table: Mapping[Any, Any], name: str) -> Any:
    """The key of a dictionary whose text is `name`; `name` itself if there is none."""
    return next((key for key in table if str(key) == name), name)


def _changed_entries(path: StatePath, container: Any, saved: Contents) -> Iterator[tuple[StatePath, Any]]:
    """The entries of a container that were added or replaced."""
    if isinstance(container, (list, deque)):
        only_appended = len(container) > len(saved.items) and all(map(is_, container, saved.items))
        saved_ids = set() if only_appended else set(map(id, saved.items))
        first = len(saved.items) if only_appended else 0
        yield from (
            (path, (index, v)) for index, v in enumerate(container) if index >= first and id(v) not in saved_ids
        )
    elif isinstance(container, (set, np.ndarray)):
        yield path, container.copy()
    else:
        before, now = saved.by_key(), read_contents(container).by_key()
        yield from (
            (path.child(key), (key, value)) for key, value in now.items() if value is not before.get(key, _MISSING)
        )


def to_double(tensor: Tensor) -> Tensor:
    """Convert a strided floating-point tensor to float64. Other tensors are returned unchanged."""
    return tensor.detach().double() if tensor.is_floating_point() and tensor.layout is torch.strided else tensor


def _detached_clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copy_into(target: Tensor, source: Tensor) -> None:
    if target.shape == source.shape and target.dtype == source.dtype and target.layout is torch.strided:
        target.data.copy_(source.detach())
    else:
        target.data = source.detach().to(target.device, copy=True)


def _remove_user_hooks(module: nn.Module) -> None:
    """Remove the user's hooks. Hooks of libraries (weight_norm, pruning) stay, because the computation needs them."""
    module.__dict__["_compiled_call_impl"] = None
    for name in REGISTRIES_AND_HOOKS:
        hooks = module.__dict__.get(name)
        if name not in MODULE_REGISTRIES and hooks:
            user_hooks = {id(hook) for hook in user_defined(hooks.values())}
            for key in [key for key, hook in hooks.items() if id(hook) in user_hooks]:
                del hooks[key]


def is_number_sequence(value: Any) -> bool:
    """Whether a value is a list or tuple of numbers, such as a shape."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (int, float)) for item in value)


def copy_arguments(values: Sequence[Any], *, double: bool = False, gradients: bool = False) -> list[Any]:
    """Copy the arguments of a run, which may write to them.

    With `gradients`, copies of tensors that need a gradient need one too.
    """
    memo: dict[int, Any] = {id(t): _copy_tensor(t, double, gradients) for value in values for t in tensors_in(value)}
    return [copy.deepcopy(value, memo) for value in values]


def _copy_tensor(tensor: Tensor, double: bool, gradients: bool) -> Tensor:
    copied = tensor.detach().clone()
    copied = to_double(copied) if double else copied
    if not (gradients and tensor.requires_grad):
        return copied
    with torch.enable_grad():
        return copied.requires_grad_().clone()  # not a leaf, which must not be written to
