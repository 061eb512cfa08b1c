"""`DataParallel`: a whole batch in, a whole batch out, computed on several devices in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from instep.call.explain import Explanation, explain, explain_one_device
from instep.call.options import (
    MethodBinding,
    Options,
    as_dict,
    as_tuple,
    check_shares,
    refuse_outer_wrapper,
    unwrap_module,
)
from instep.call.runner import ParallelRunner
from instep.call.transparent import Transparent
from instep.collectives.sync_batchnorm import SyncBatchNormPatch, running_stats_rule
from instep.devices import (
    DeviceLike,
    module_device,
    resolve_device,
    resolve_devices,
)
from instep.engines.base import Engine
from instep.engines.select import EngineChoice, choose_engine, create_engine, fallback_engine
from instep.errors import CannotCross, WrapError
from instep.replicas.clone import ModuleWrapper
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.merge import StateMerger
from instep.replicas.state.rules import check_state_rule
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.modes import disable_compile
from instep.runtime.process_role import inside_worker
from instep.structure.merge import Merger
from instep.structure.spec import AUTO, strip_marks

_FRAMES_FROM_FORWARD, _FRAMES_FROM_RUN = 1, 3
"""How many calls of ours there are from `forward` on, where it is asked who called it."""


class DataParallel(Transparent, ModuleWrapper):
    """Runs `module` on several devices and gives back what one device would have given.

    The first four arguments are those of `torch.nn.DataParallel`. `device_ids` also takes `"cpu"` and repeats
    (`["cpu"] * 4`, `[0, 0]`); left out, it is every accelerator, or the one place where the module is.

    >>> import torch, instep
    >>> net = torch.nn.Linear(3, 2)
    >>> with instep.DataParallel(net, device_ids=["cpu", "cpu"]) as model:
    ...     x = torch.randn(5, 3)
    ...     bool(torch.allclose(model(x), net(x)))
    True

    Args:
        engine: `"threads"`, `"processes"`, `"serial"`, or `"auto"`, which says in `repr(model)` what it chose and why.
        in_dims: where the batch is in the arguments, as `torch.vmap` takes it, or by argument name.
        out_dims: likewise for outputs.
        merge: what outputs that are not joined along the batch mean: `{"loss": "mean"}`.
        state: what state that `forward` changes means: `{"steps": "sum"}`.
        methods: other methods that run in parallel when they are called on the wrapper.
        min_shard: the fewest samples that a replica is given.
        shares: how much of a batch each device takes, for devices that are not equally fast: `[2, 1]`.
        cost: what each sample costs, for samples that are not equally large: the name of an argument, or a function of
            arguments by name (`lambda lengths: lengths`); shards then have about equal cost. It is read at each call.
        place: leaves that go to another device than their replica's: `{"lengths": "cpu"}`.
        on_unmerged_state: `"error"`, or `"warn"` to keep the first replica's state where no rule is given.
        hooks: `"whole"` shows hooks that were put on submodules whole batches, by running such calls on one device;
            `"per_replica"` shows them shards.
        private_copies: give every replica memory of its own even on the source's device.
        sync_batchnorm: normalise over the whole batch, as one device does; False is faster and takes each shard alone.
        probe: try a few samples in parts and together before the first call of each structure, to know what its outputs
            mean; without it they are merged by what their shapes say.
        restarts: how many deaths of worker processes within a minute are made good by running the step again.
        timeout: seconds without a word from a worker process, after which it is given up; and that replicas which meet
            wait for one that does not move.
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
        methods: Sequence[str] = (),
        min_shard: int = 1,
        shares: Sequence[float] | None = None,
        cost: str | Callable[..., Any] | None = None,
        place: Mapping[str, DeviceLike] | None = None,
        on_unmerged_state: str = "error",
        hooks: str = "whole",
        private_copies: bool = False,
        sync_batchnorm: bool = True,
        probe: bool = True,
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
            min_shard=min_shard,
            shares=as_tuple("shares", shares or ()),
            cost=cost,
            place=as_dict("place", place),
            on_unmerged_state=on_unmerged_state,
            hooks=hooks,
            private_copies=private_copies,
            sync_batchnorm=sync_batchnorm,
            probe=probe,
            restarts=restarts,
            timeout=timeout,
        )
        super().__init__(unwrap_module(module))
        self._set_up(options)

    def _set_up(self, options: Options) -> None:
        for pattern, rule in options.state.items():
            check_state_rule(pattern, rule)
        for name in options.methods:
            if not callable(getattr(self.module, name, None)):
                kind = type(self.module).__name__
                raise WrapError(f"methods={list(options.methods)}: {kind} has no method {name!r}.")
        if options.on_unmerged_state not in ("error", "warn"):
            raise WrapError(f"on_unmerged_state={options.on_unmerged_state!r}: write 'error' or 'warn'.")
        if options.hooks not in ("whole", "per_replica"):
            raise WrapError(f"hooks={options.hooks!r}: write 'whole' or 'per_replica'.")
        devices = resolve_devices(options.device_ids, self.module)
        check_shares(options.shares, len(devices))
        if module_device(self.module) not in (None, devices[0]):
            self.module.to(devices[0])
        self._instep_options = options
        self._instep_devices = devices
        self._instep_output = devices[0] if options.output_device is None else resolve_device(options.output_device)
        self._instep_pass_through = (
            len(devices) == 1 and devices[0].type == self._instep_output.type == "cpu" and not options.place
        )
        """Whether forward is the module's own: nothing is split and nothing moves."""
        self._start_engine(choose_engine(options.engine, devices))

    def _start_engine(self, choice: EngineChoice, methods: dict[str, MethodBinding] | None = None) -> None:
        """Set up an engine, its replicas, and the runner of calls."""
        options, devices = self._instep_options, self._instep_devices
        engine: Engine = create_engine(choice, devices, options.restarts, options.timeout)
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
        state_merger = StateMerger(options.state, attribute_merger, options.on_unmerged_state, running_stats_rule)
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._instep_pass_through:  # nothing is split, nothing moves: the compiler sees through it
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
        """Continue with another engine if `auto` chose one that cannot send what the call needs."""
        choice = fallback_engine(self._instep_choice, error)
        before, runner, frozen = self._instep_engine, self._instep_runner, self._instep_replicas.frozen
        runner.check_rerun_allowed()
        warn_caller(f"falling back to engine={choice.name!r}: {choice.reason}.")
        self._start_engine(choice, runner.methods)
        self._instep_replicas.frozen = frozen
        before.close()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`: the module is compiled, and so is each replica."""
        self.module.compile(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Show what happens to each leaf of such a call, and why. Nothing runs: ``print(model.explain(batch))``."""
        runner, devices = self._instep_runner, self._instep_devices
        binding = runner.binding("forward")
        names, values = binding.bind(args, kwargs)
        if len(devices) == 1:
            return explain_one_device(names, values, devices[0])
        plan = binding.plan(names, values, self._instep_options.cost)
        trial = ""
        if binding.probe is not None:
            record = binding.probe.find_record(plan, values, self._instep_replicas.fingerprint.current)
            trial = "not tried yet" if record is None else record.summary
        reason = runner.one_device.explain("forward", plan)
        return explain(
            plan, values, devices, self._chosen(), binding.merger, trial, "" if reason is None else reason.name
        )

    def _chosen(self) -> EngineChoice:
        """The engine, why it was chosen, and how tensors come to its replicas."""
        choice, words = self._instep_choice, self._instep_engine.describe_transport()
        return choice._replace(reason=f"{choice.reason}; {words}") if words else choice

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on the replicas while inside; they are reduced once, on the way out."""
        with self._instep_engine.no_sync():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Promise that no value of the module changes while inside: nothing is sent to the replicas again."""
        replicas = self._instep_replicas
        outer = replicas.frozen
        if len(self._instep_devices) > 1:
            for replica in replicas.sync():
                replica.sync_state()
        replicas.frozen = True
        try:
            yield
        finally:
            replicas.frozen = outer

    def close(self) -> None:
        """Give threads and worker processes back; the wrapper starts anew if it is called again."""
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
        return super().__getattr__(name)

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._instep_devices)
        choice = self._chosen()
        inner = repr(self.module).replace("\n", "\n  ")
        return f"DataParallel(\n  engine={choice.name} ({choice.reason}), devices=[{devices}]\n  {inner}\n)"

    def __getstate__(self) -> dict[str, Any]:
        hooks = {name: value for name, value in self.__dict__.items() if name.endswith("_hooks") and value}
        return {"module": self.module, "options": self._instep_options, "hooks": hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Transparent.__init__(self, state["module"])
        self.__dict__.update(state["hooks"])
        options: Options = state["options"]
        if options.engine == "processes" and inside_worker():  # part of a module that was sent to this one
            options = replace(options, engine="threads")
        self._set_up(options)
