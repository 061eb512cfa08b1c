"""Private torch APIs that instep uses, each with a fallback where torch does not have it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from instep.runtime.locks import ForkSafeLock

_autograd: Any = torch._C._autograd
_functorch: Any = torch._C._functorch


def is_graph_retained() -> bool:
    """Inside a backward: whether it retains the graph; True if torch does not say."""
    getter: Callable[[], bool] | None = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return True if getter is None else bool(getter())


def will_accumulate_grad(parameter: Tensor) -> bool:
    """Inside a backward: whether it accumulates into this leaf's `.grad`."""
    if not parameter.is_leaf:
        return False
    getter: Any = getattr(torch._C, "_will_engine_execute_node", None)
    if getter is None:
        return False
    try:
        return bool(getter(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # in `torch.autograd.grad` the engine does not execute such nodes
        return False


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The active saved-tensor hooks of this thread, except those of checkpointing.

    Checkpointing matches tensors by the order in which they are saved, which replicas do not preserve. Without its
    hooks the call is recomputed as a whole.
    """
    hooks = _top_saved_tensor_hooks()
    return None if _is_checkpointing(hooks) else hooks


def without_checkpoint_hooks() -> AbstractContextManager[Any]:
    """Context manager: tensors are saved as they are, where checkpointing would recompute them."""
    if not _is_checkpointing(_top_saved_tensor_hooks()):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    getter: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    return None if getter is None else getter(False)


def _is_checkpointing(hooks: tuple[Any, Any] | None) -> bool:
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def has_no_saved_tensor_hooks() -> bool:
    """Whether no saved-tensor hooks are active, including those of checkpointing; False if unknown."""
    getter: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    return getter is not None and getter(False) is None


def inference_guard(on: bool) -> AbstractContextManager[Any]:
    """`torch.inference_mode(on)` without Python code in which an interruption could leave it half entered."""
    guard: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)
    entered: AbstractContextManager[Any] = guard(on)
    return entered


def has_compiled_code() -> bool:
    """Whether this process has compiled functions or modules. torch imports dynamo for optimizers too."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends: Any = getattr(frames, "cached_backends", None)
    return frames is not None and (backends is None or any(backend is not None for backend in backends.values()))


def load_dynamo_rules() -> None:
    """Make dynamo look up torch's functions, by which it knows them later, before one is replaced in its module."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules") if has_compiled_code() else None
    load = getattr(rules, "get_torch_obj_rule_map", None)
    if load is not None:
        load()


FUNCTIONAL_CALL_CODE: Any = torch.nn.utils.stateless._functional_call.__code__
"""The code in which `torch.func.functional_call` refuses an `nn.DataParallel`."""


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The original module of `torch.compile(module)`; any other module itself."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", None)
    while kind is not None and isinstance(module, kind):
        module = module._orig_mod
    return module


def default_device() -> torch.device | None:
    """The default device that is set in this thread, if any."""
    for mode in reversed(_function_modes()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


def _function_modes() -> list[Any]:
    """The active function modes, the innermost last."""
    return torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []


def has_thread_local_transform() -> bool:
    """Whether a transform is active that sees the ops of its own thread only.

    That is `torch.func`, forward-mode AD, tracing, cached parametrizations, and function or dispatch modes.
    """
    return (
        _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or bool(parametrize._cache_enabled)
        or not all(isinstance(mode, DeviceContext) for mode in _function_modes())
    )


_recorders: list[RegisteredHooks] = []
_recorders_lock = ForkSafeLock(_recorders.clear)


def register_own_hook(
    tensor: Tensor, hook: Callable[[Tensor], Tensor | None], *, after_accumulation: bool = False
) -> RemovableHandle:
    """Register a hook of instep on a tensor, which no `RegisteredHooks` reports, in this thread or another."""
    with _recorders_lock:
        register: Any = tensor.register_post_accumulate_grad_hook if after_accumulation else tensor.register_hook
        handle: RemovableHandle = register(hook)
        for recorder in _recorders:
            recorder.own_ids.add(handle.id)
    return handle


class RegisteredHooks:
    """Records the ids of hooks that are registered inside a `with` block, except by torch.compile while it traces."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.own_ids: set[int] = set()
        """The ids of hooks by `register_own_hook`."""
        self.compilation_ids: set[int] = set()
        """The ids of hooks by torch.compile."""

    def __enter__(self) -> RegisteredHooks:
        with _recorders_lock:
            _recorders.append(self)
            self._first = RemovableHandle.next_id
        dynamo = sys.modules.get("torch._dynamo.callback")  # without it, nothing is compiled
        if dynamo is not None:
            _compilation_watch.register(dynamo.callback_handler)
        return self

    def __exit__(self, *_: object) -> None:
        with _recorders_lock:
            _recorders.remove(self)
            if RemovableHandle.next_id != self._first:
                self.ids = set(range(self._first, RemovableHandle.next_id)) - self.compilation_ids - self.own_ids


class _CompilationWatch:
    """Tells every `RegisteredHooks` which hooks torch.compile has registered. Stays for the life of the process."""

    def __init__(self) -> None:
        self._first = 0

    def register(self, handler: Any) -> None:
        """Have dynamo call this object from now on, also if its callbacks were cleared."""
        if self._start not in handler.start_callbacks:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)

    def _start(self, _: object) -> None:
        self._first = RemovableHandle.next_id

    def _end(self, _: object) -> None:
        found = range(self._first, RemovableHandle.next_id)
        with _recorders_lock:
            for recorder in _recorders:
                recorder.compilation_ids.update(found)


_compilation_watch = _CompilationWatch()


class _CheckpointCounter:
    """Counts reentrant checkpoints, from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        function: Any = torch.utils.checkpoint.CheckpointFunction
        forward = function.forward

        def count_and_forward(*args: Any) -> Any:
            self.count += 1
            return forward(*args)

        function.forward = staticmethod(count_and_forward)


_get_checkpoint_counter = cache(_CheckpointCounter)


def reentrant_checkpoints() -> int:
    """The number of reentrant checkpoints in this process since the first call of this function."""
    return _get_checkpoint_counter().count


_storage_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def storage_use_count(tensor: Tensor) -> int:
    """The number of tensors that use a tensor's storage; `sys.maxsize` if torch does not say."""
    if _storage_use_count is None:
        return sys.maxsize
    storage = tensor.untyped_storage()  # held while counting: torch 2.8 does not keep the object alive
    return int(_storage_use_count(storage._cdata)) - 1  # one use is the storage object


_engine_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor], keep: bool) -> None:
    """`torch.autograd.backward` without its checks, for gradients that autograd has computed."""
    if _engine_run_backward is None or any(type(output) is not Tensor for output in outputs):
        torch.autograd.backward(outputs, gradients, retain_graph=keep)
    else:
        _engine_run_backward(
            tuple(outputs), tuple(gradients), keep, False, (), allow_unreachable=True, accumulate_grad=True
        )


def capture_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor], keep: bool
) -> list[Tensor | None] | None:
    """Like `run_backward`, but returns the gradients of these leaves, and accumulates none. None if torch cannot."""
    if _engine_run_backward is None or any(type(output) is not Tensor for output in outputs):
        return None
    captured: Any = _engine_run_backward(
        tuple(outputs), tuple(gradients), keep, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )
    return list(captured)


def is_batched_gradient(gradient: Tensor) -> bool:
    """Whether a gradient is batched by `is_grads_batched=True`."""
    return bool(_functorch.is_legacy_batchedtensor(gradient))


def make_tensor_guard(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Dynamo's guard on tensors: a check that returns True only if sizes, strides, dtypes, devices and `requires_grad`
    have not changed.

    False proves nothing: the check also depends on modes such as autocast, and is always False without dynamo.
    """
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None:
        return lambda: False
    try:
        check = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return partial(check, *tensors) if check(*tensors) else lambda: False
    except (TypeError, RuntimeError, ValueError):
        return lambda: False


def make_global_state_guard() -> Callable[[], bool] | None:
    """Dynamo's guard on global state: a check that grad mode, autocast, the default dtype, deterministic algorithms
    and the number of threads have not changed. None without dynamo."""
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Any = getattr(guards, "GlobalStateGuard", None)
    return None if make is None else make().check


_eval_frame: Any = getattr(torch._C, "_dynamo", None) and torch._C._dynamo.eval_frame


def _no_eval_frame(_: Any) -> Any:
    """Fallback for torch without dynamo."""


set_eval_frame: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", _no_eval_frame)
"""Sets dynamo's frame evaluation callback of this thread (None for none); returns the previous one."""


def skip_frame(function: Any) -> None:
    """Make dynamo skip a function's own frame, if torch can."""
    strategy: Any = getattr(_eval_frame, "set_code_exec_strategy", None)
    skip: Any = getattr(_eval_frame, "skip_code", None)
    if strategy is not None:
        action = _eval_frame._FrameAction
        strategy(function.__code__, _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif skip is not None:
        skip(function.__code__)


_RNG_KEY_NAME: Any = "TESTING_ONLY_GenericMode"
_libraries: list[torch.library.Library] = []


@cache
def _rng_key() -> Any:
    return torch._C._parse_dispatch_key(_RNG_KEY_NAME)


def register_rng_kernels(pick: Callable[[], torch.Generator | None]) -> None:
    """Make ATen's random ops on the CPU get their generator from `pick`, in threads with `set_rng_dispatch(True)`.

    Uses a dispatch key that falls through for all ops but those that take a generator. Raises if torch does not have
    the key, or if it is used by something else.
    """
    below: Any = torch._C._dispatch_keyset_full_after(_rng_key())
    fallthrough = torch.library.Library("_", "IMPL", _RNG_KEY_NAME)
    fallthrough.fallback(torch.library.fallthrough_kernel)
    kernels = torch.library.Library("aten", "IMPL")
    _libraries.extend([fallthrough, kernels])
    for schema in torch._C._jit_get_all_schemas():
        index = next((i for i, a in enumerate(schema.arguments) if str(a.type) == "Optional[Generator]"), None)
        if index is None or not schema.name.startswith("aten::"):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        overload = schema.overload_name or "default"
        if overload in packet.overloads():
            kernel = _rng_kernel(getattr(packet, overload), index, below, pick)
            full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            kernels.impl(full, kernel, _RNG_KEY_NAME, with_keyset=True)


def _rng_kernel(
    operation: Any, index: int, below: Any, pick: Callable[[], torch.Generator | None]
) -> Callable[..., Any]:
    """A kernel that passes the generator from `pick` to a random op that was called without one.

    It does so only for plain CPU tensors. Modes and tensor subclasses see the op without a generator; the op that they
    finally call comes here again.
    """
    cpu, python = torch._C.DispatchKey.CPU, torch._C.DispatchKey.Python
    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    name = operation._schema.arguments[index].name
    positional = not operation._schema.arguments[index].kwarg_only

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        is_positional = positional and len(args) > index
        generator = args[index] if is_positional else kwargs.get(name)
        if generator is None and keys.has(cpu) and not keys.has(python) and not keys.has(front):
            chosen = pick()
            if is_positional:
                args = (*args[:index], chosen, *args[index + 1 :])
            else:
                kwargs[name] = chosen
        return operation.redispatch(keys & below, *args, **kwargs)

    return kernel


def set_rng_dispatch(on: bool) -> None:
    """Set whether random ops of this thread use `register_rng_kernels`.

    Autograd propagates it to the threads of a backward.
    """
    torch._C._dispatch_tls_set_dispatch_key_included(_rng_key(), on)


def is_rng_dispatch_enabled() -> bool:
    """Whether random ops of this thread use `register_rng_kernels`."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_rng_key()))


def replace_default_generator(proxy: Any) -> None:
    """Replace the generator that `torch.get_rng_state`, `torch.manual_seed` etc. use.

    Raises if they take it from elsewhere.
    """
    functions: Any = torch.random
    if functions.default_generator is not torch.default_generator:
        raise RuntimeError("torch.random keeps its generator elsewhere")
    functions.default_generator = proxy


def _import_class(module: str, name: str) -> Any:
    """Import a private class; None if it does not exist."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


spectral_norm_class: Any = _import_class("torch.nn.utils.parametrizations", "_SpectralNorm")
"""The parametrization of `spectral_norm`; if None, its vectors have to be equal on every replica."""


_global_hooks: dict[str, Any] = {
    kind: getattr(torch.nn.modules.module, f"_global_{kind}", {})
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
}


def global_hooks() -> list[tuple[str, list[Any]]]:
    """Global module hooks, by kind; empty if torch keeps them elsewhere."""
    return [(kind.replace("_", " ")[:-1], list(table.values())) for kind, table in _global_hooks.items() if table]


def custom_function(node: Any) -> Any:
    """The `torch.autograd.Function` of a graph node; None for torch's own nodes."""
    return getattr(node, "_forward_cls", None)


def nccl_group_class() -> Any:
    """`ProcessGroupNCCL`; None if torch does not have it, or if it cannot be aborted."""
    kind: Any = getattr(torch.distributed, "ProcessGroupNCCL", None) if torch.distributed.is_available() else None
    return kind if any(hasattr(kind, name) for name in _ABORT_METHODS) else None


_ABORT_METHODS = ("abort", "_abort")


def make_file_store(path: str, size: int) -> Any:
    """A `FileStore` for the rendezvous of a group."""
    kind: Any = vars(torch.distributed)["FileStore"]
    return kind(path, size)


def make_nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A new NCCL group. Its first collective creates the communicator, without blocking."""
    kind = nccl_group_class()
    options = kind.Options()
    options._timeout = timeout
    config: Any = getattr(options, "config", None)
    if hasattr(config, "blocking"):  # else initialization blocks forever if a peer is missing
        config.blocking = 0
    return kind(store, rank, size, options)


def make_gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A new Gloo group on the loopback interface."""
    kind: Any = torch.distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(interface="lo")]
    return kind(store, rank, size, options)


def abort_group(group: Any) -> None:
    """Abort the running collectives of an NCCL group; other groups fail when their connections close."""
    end: Any = next((getattr(group, name) for name in _ABORT_METHODS if hasattr(group, name)), None)
    if end is not None and isinstance(group, nccl_group_class() or ()):
        end()


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend of a process group for the tensors of a device."""
    return group._get_backend(device)


def all_gather_flat(output: Tensor, row: Tensor, group: Any) -> None:
    """All-gather of equal rows into one flat tensor, without the Python checks of `all_gather_into_tensor`."""
    group._allgather_base(output, row).wait()


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def call_when_cuda_starts(function: Callable[[], None]) -> None:
    """Call a function when CUDA is initialized in this process; at once if it already is."""
    lazy_call: Any = torch.cuda._lazy_call
    lazy_call(function)
