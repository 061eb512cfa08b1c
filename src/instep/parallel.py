"""`DataParallel`: runs a module on several devices with the results of one.

A call goes through these steps:

1. `MethodBinding` gives every argument a name; its planner decides how each leaf is split (a `SplitPlan`).
2. `ParallelRunner` brings the replicas up to date with the module, splits the arguments and places each shard.
3. The engine runs the replicas: one after another, in threads, or in worker processes.
4. The runner merges the outputs and applies what `forward` changed on the replicas to the module.

Where the result would not be that of one device, the runner runs the whole batch on the first device
(`instep.call.one_device` lists the reasons). This file creates these objects and holds the public methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from instep.call.explain import Explanation, explain, explain_one_device
from instep.call.interop import apparent_class, class_like, data_parallel_attributes, set_class, wrapper_class
from instep.call.options import (
    MethodBinding,
    Options,
    as_dict,
    as_tuple,
    check_options,
    check_shares,
    refuse_outer_wrapper,
    unwrap_module,
)
from instep.call.runner import ParallelRunner
from instep.call.transparent import OWN_ATTRIBUTES, Transparent
from instep.collectives.sync_batchnorm import SyncBatchNormPatch
from instep.devices import (
    DeviceLike,
    module_device,
    resolve_device,
    resolve_devices,
)
from instep.engines.base import Engine
from instep.engines.select import EngineChoice, choose_engine, create_engine, engine_class, fallback_engine
from instep.errors import CannotCross, WrapError
from instep.replicas.clone import ModuleWrapper
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.merge import StateMerger
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.modes import disable_compile
from instep.runtime.process_role import inside_worker
from instep.structure.merge import Merger
from instep.structure.spec import AUTO, strip_marks

_FRAMES_FROM_FORWARD, _FRAMES_FROM_RUN = 1, 3
"""Stack frames between `refuse_outer_wrapper` and the caller of `forward`, when called from `forward` and `_run`."""


class DataParallel(Transparent, ModuleWrapper):
    """Runs `module` on several devices and returns what one device would return.

    Each call splits the batch over the devices, runs a replica of the module on every shard, and merges the outputs.
    Outputs, gradients, buffers and attributes are those of one device with the whole batch. The wrapper shows the
    attributes, parameters and `state_dict` of `module`, without a prefix.

    The first four arguments are those of `torch.nn.DataParallel`.

    >>> import torch, instep
    >>> net = torch.nn.Linear(3, 2)
    >>> with instep.DataParallel(net, device_ids=["cpu", "cpu"]) as model:
    ...     x = torch.randn(5, 3)
    ...     bool(torch.allclose(model(x), net(x)))
    True

    Args:
        module: The module to run. It is moved to the first device.
        device_ids: The devices, one for each replica. A device may be repeated: `["cpu"] * 4`, `[0, 0]`. Default: all
            accelerators, or the device of the module if there are none.
        output_device: The device of the outputs. Default: the first device.
        dim: The batch dimension of tensors.
        engine: How replicas run: `"threads"`, `"processes"`, `"serial"`, `"torchrun"` (one replica in each process
            that torchrun has started), or `"auto"`, which chooses one of them. `repr(model)` shows the choice and the
            reason for it.
        in_dims: The batch dimension of arguments, in the form that `torch.vmap` takes or by name:
            `{"hidden": 1, "class_weights": None}`. None passes the whole argument to every replica. Default: inferred
            from the sizes of the arguments.
        out_dims: The batch dimension of outputs, in the same form. Default: inferred by the probe.
        merge: Rules for outputs that are not concatenated along the batch, by path or pattern:
            `{"loss": "mean", "aux.*": "sum"}`. A rule is a name, `instep.weighted_by(...)`, or a function
            `(parts, sizes) -> value`.
        state: Rules for attributes and buffers that `forward` changes differently on each replica:
            `{"steps": "sum"}`. `"cat"` splits and concatenates state that has one entry per sample. A rule is a name
            or a function `(old, new, sizes) -> value`.
        methods: Names of other methods that run in parallel when they are called on the wrapper. A dictionary gives
            each its own `in_dims`, `out_dims` and `merge`, also for `call`: `{"penalty": {"merge": "mean"}}`. Those of
            the wrapper are for `forward`, except that names in `in_dims` apply to every method.
        min_shard: The smallest number of samples per replica. Smaller batches use fewer replicas.
        shares: The relative size of each device's shard, for devices of unequal speed: `[2, 1]`.
        cost: The cost of each sample, for samples of unequal size: the name of an argument, or a function of arguments
            by name, such as `lambda lengths: lengths`. Shards then have about equal cost. Evaluated at every call.
        place: Devices of argument leaves that do not go to their replica's device: `{"lengths": "cpu"}`.
        on_unmerged_state: What to do if `forward` changes state differently on each replica and no rule is set for
            it: `"error"` raises `StateError`; `"warn"` keeps the value of the first replica.
        hooks: What hooks on submodules receive. `"whole"` runs calls with such hooks on one device, so that they see
            the whole batch; `"per_replica"` calls them on every replica with its shard.
        private_copies: Whether replicas on the module's own device copy its parameters instead of sharing their
            memory.
        sync_batchnorm: Whether batch normalization uses the statistics of the whole batch, as on one device.
            False is faster; each replica then normalizes over its own shard.
        probe: Whether to run a few samples, in parts and together, before the first call of each structure, to find
            out how outputs merge. Without the probe, they are merged by shape.
        batches: What each rank passes under torchrun. `"global"`: all ranks pass the whole batch. `"local"`: each rank
            passes a batch of its own, as with a `DistributedSampler`; the batch is their concatenation.
        gather: What a call returns under torchrun. `"all"`: every rank gets the outputs of all ranks. `"sharded"`: each
            rank gets those of its own samples. Its loss has to be a mean over these; gradients are those of the mean
            over all samples, and every call needs a sample for each rank. Default: `"all"`; with `batches="local"`,
            `"sharded"` unless `with_loss` computes the loss.
        reduce: How gradients are sent under torchrun: `"bf16"` or `"fp16"` sends half the bytes. A function
            `(bucket, group)` sums a flat tensor over the group in place, and may return a `Work` or `Future`.
        restarts: How many worker processes may die within a minute before a call fails. After each death the worker is
            replaced and the step runs again.
        timeout: Seconds to wait for a worker process that does not respond, and for a replica that does not reach a
            collective, before the call fails.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        engine: str = "auto",
        in_dims: Any = AUTO,
        out_dims: Any = AUTO,
        merge: Any = AUTO,
        state: Mapping[str, Any] | None = None,
        methods: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        min_shard: int = 1,
        shares: Sequence[float] | None = None,
        cost: str | Callable[..., Any] | None = None,
        place: Mapping[str, DeviceLike] | None = None,
        on_unmerged_state: str = "error",
        hooks: str = "whole",
        private_copies: bool = False,
        sync_batchnorm: bool = True,
        probe: bool = True,
        batches: str = "global",
        gather: str | None = None,
        reduce: str | Callable[..., Any] | None = None,
        restarts: int = 3,
        timeout: float = 600.0,
    ) -> None:
        options = Options(
            device_ids=None if device_ids is None else as_tuple("device_ids", device_ids),
            output_device=output_device,
            dim=dim,
            engine=engine,
            in_dims=in_dims,
            out_dims=out_dims,
            merge=merge,
            state=as_dict("state", state),
            methods=as_tuple("methods", methods),
            method_options=methods if isinstance(methods, Mapping) else {},
            min_shard=min_shard,
            shares=as_tuple("shares", shares or ()),
            cost=cost,
            place=as_dict("place", place),
            on_unmerged_state=on_unmerged_state,
            hooks=hooks,
            private_copies=private_copies,
            sync_batchnorm=sync_batchnorm,
            probe=probe,
            batches=batches,
            gather=gather,
            reduce=reduce,
            restarts=restarts,
            timeout=timeout,
        )
        super().__init__(unwrap_module(module))
        self._set_up(options)

    def _set_up(self, options: Options) -> None:
        """Resolve the options for this machine and create the engine, the replicas and the runner."""
        set_class(self, class_like(self.module, wrapper_class(self)))
        check_options(options, self.module)
        choice = choose_engine(options.engine, resolve_devices(options.device_ids, self.module))
        devices = engine_class(choice).resolve_devices(options.device_ids, self.module)
        check_shares(options.shares, len(devices))
        if module_device(self.module) not in (None, devices[0]):
            self.module.to(devices[0])
        self._instep_options = options
        self._instep_devices = devices
        self._instep_output = devices[0] if options.output_device is None else resolve_device(options.output_device)
        self._instep_pass_through = (
            len(devices) == 1 and devices[0].type == self._instep_output.type == "cpu" and not options.place
        )
        """Whether calls go straight to the module, because nothing is split and nothing is moved."""
        self._start_engine(choice)

    def _start_engine(self, choice: EngineChoice, methods: dict[str, MethodBinding] | None = None) -> None:
        """Create an engine, its replicas and the runner. `methods` are bindings of a previous runner to keep."""
        options, devices = self._instep_options, self._instep_devices
        engine: Engine = create_engine(choice, devices, options.restarts, options.timeout)
        engine.attach(self.module, options.for_ranks(self.module))
        batchnorm_patch = SyncBatchNormPatch(options.sync_batchnorm)
        replicas = ReplicaSet(
            self.module,
            devices,
            private_copies=options.private_copies,
            joint_graph=engine.joint_graph,
            patch=batchnorm_patch,
            share_tensors=None if options.private_copies else engine.share_tensors,
            replica_classes=engine.replica_classes(),
        )
        attribute_merger = Merger.from_options(options.merge, AUTO, options.dim)
        state_merger = StateMerger(
            options.state, attribute_merger, options.on_unmerged_state, batchnorm_patch.state_rule
        )
        self._instep_choice, self._instep_engine, self._instep_replicas = choice, engine, replicas
        self._instep_runner = ParallelRunner(
            self.module,
            devices,
            self._instep_output,
            engine,
            replicas,
            state_merger,
            batchnorm_patch,
            options,
            {} if methods is None else methods,
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return apparent_class(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `module.forward` on all devices and return the merged output."""
        if self._instep_pass_through:  # torch.compile traces through this branch
            if not is_compiling():
                refuse_outer_wrapper(_FRAMES_FROM_FORWARD)
            return self.module(*strip_marks(args), **strip_marks(kwargs))
        return self._run("forward", args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module in parallel: `model.call("generate", ids)`."""
        return self._run(method, args, kwargs)

    @disable_compile
    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        refuse_outer_wrapper(_FRAMES_FROM_RUN)
        try:
            return self._instep_runner.run(method, args, kwargs)
        except CannotCross as error:
            self._fall_back(error)
        return self._run(method, args, kwargs)

    def _fall_back(self, error: CannotCross) -> None:
        """Replace an engine that `auto` chose and that cannot send what the call needs. Raises for any other engine."""
        choice = fallback_engine(self._instep_choice, error)
        engine, runner, frozen = self._instep_engine, self._instep_runner, self._instep_replicas.frozen
        runner.check_rerun_allowed()
        warn_caller(f"falling back to engine={choice.name!r}: {choice.reason.rstrip('.')}.")
        self._start_engine(choice, runner.methods)
        self._instep_replicas.frozen = frozen
        engine.close()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module and every replica with `torch.compile`. Takes the arguments of `nn.Module.compile`."""
        self.module.compile(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explain how a call with these arguments is split and merged, without running it.

        `print(model.explain(batch))` prints a table with one row for each leaf of the arguments and of the outputs that
        were merged last.
        """
        runner, devices = self._instep_runner, self._instep_devices
        names, values = runner.binding("forward").bind(args, kwargs)
        if reason := runner.one_device.before():
            return explain_one_device(names, values, devices[0], reason.name)
        call = runner.bind("forward", args, kwargs)
        if reason := runner.known_reason(call):
            return explain_one_device(names, values, devices[0], reason.name, call.plan.batch_size)
        merger, trial, readings = call.binding.merger, runner.describe_trial(call), runner.describe_readings(call)
        return explain(call.plan, call.values, devices, self._described_choice(), merger, trial, readings)

    def _described_choice(self) -> EngineChoice:
        """The engine and the reason for it, with a description of how tensors reach the replicas."""
        choice, transport = self._instep_choice, self._instep_engine.describe_transport()
        return choice._replace(reason=f"{choice.reason}; {transport}") if transport else choice

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that accumulates gradients on the replicas and reduces them once, at its end."""
        with self._instep_engine.no_sync():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Context manager for inference that skips the synchronization of the replicas with the module.

        Parameters, buffers and attributes of the module must not change inside it.
        """
        replicas = self._instep_replicas
        was_frozen = replicas.frozen
        if len(self._instep_devices) > 1:
            with self._instep_runner.lock:
                for replica in replicas.sync():
                    replica.sync_state()
                replicas.finish_call()
        replicas.frozen = True
        try:
            yield
        finally:
            replicas.frozen = was_frozen

    def close(self) -> None:
        """Release threads, worker processes and replicas. The next call creates them again."""
        self._instep_engine.close()
        self._instep_replicas.discard()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("_instep_options")
        if options is not None and name in options.methods:
            return partial(self.call, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if options is None:
                raise
            own = data_parallel_attributes(self._instep_devices, self._instep_output, options.dim)
            if name not in own:
                raise
            return own[name]

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which would otherwise fail on the types of this class."""
        raise WrapError(
            "torch.jit.script cannot compile instep.DataParallel, which runs Python code on several devices.\n"
            "Script the plain module: torch.jit.script(model.module)."
        )

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._instep_devices)
        choice = self._described_choice()
        inner = repr(self.module).replace("\n", "\n  ")
        return f"DataParallel(\n  engine={choice.name} ({choice.reason}), devices=[{devices}]\n  {inner}\n)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_wrapper, (wrapper_class(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name.endswith("_hooks") and value}
        own.update({name: self.__dict__[name] for name in OWN_ATTRIBUTES if name in self.__dict__})
        return {"module": self.module, "options": self._instep_options, "attributes": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Transparent.__init__(self, state["module"])
        self.__dict__.update(state["attributes"])
        options: Options = state["options"]
        if options.engine == "processes" and inside_worker():  # a wrapper inside a module that was sent to a worker
            options = replace(options, engine="threads")
        self._set_up(options)


def _new_wrapper(cls: type[DataParallel]) -> DataParallel:
    """A wrapper without a module, for unpickling."""
    return cls.__new__(cls)
