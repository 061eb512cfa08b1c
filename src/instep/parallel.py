"""`DataParallel`: a whole batch in, a whole batch out, computed on several devices in step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from instep.accept import accept, refuse_outer_wrapper
from instep.crossing import Crossing
from instep.devices import (
    DeviceLike,
    device_of,
    devices_of,
    home_of,
    on_output_device,
    place,
    stays_on_host,
)
from instep.engines.choose import Choice, choose, start
from instep.engines.pool import inside_replica
from instep.engines.protocol import Engine
from instep.errors import WrapError
from instep.explain import Explanation, explain
from instep.face import Transparent
from instep.options import Method, Options
from instep.private import follows_one_thread
from instep.random import RandomState
from instep.replicas.ambient import Ambient
from instep.replicas.crew import Crew
from instep.replicas.settle import Settler, check_state_rule, refuse_writes
from instep.structure.dims import AUTO
from instep.structure.marks import bare
from instep.structure.merge import Merger
from instep.structure.plan import SplitPlan
from instep.structure.split import apply_plan


class DataParallel(Transparent):
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
        engine: `"threads"`, `"serial"`, or `"auto"`, which says in `repr(model)` what it chose and why.
        in_dims: where the batch is in the arguments, as `torch.vmap` takes it, or by argument name.
        out_dims: likewise for outputs.
        merge: what outputs that are not joined along the batch mean: `{"loss": "mean"}`.
        state: what state that `forward` changes means: `{"steps": "sum"}`.
        methods: other methods that run in parallel when they are called on the wrapper.
        min_shard: the fewest samples that a replica is given.
        place: leaves that go to another device than their replica's: `{"lengths": "cpu"}`.
        on_unmerged_state: `"error"`, or `"warn"` to keep the first replica's state where no rule is given.
        private_copies: give every replica memory of its own even on the source's device.
        probe: try a few samples in parts and together before the first call of each structure, to know what its outputs
            mean; without it they are merged by what their shapes say.
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
        place: Mapping[str, DeviceLike] | None = None,
        on_unmerged_state: str = "error",
        private_copies: bool = False,
        probe: bool = True,
    ) -> None:
        options = Options(
            device_ids=None if device_ids is None else tuple(device_ids),
            output_device=output_device,
            dim=dim,
            engine=engine,
            in_dims=in_dims,
            out_dims=out_dims,
            merge=merge,
            state=dict(state or {}),
            methods=tuple(methods),
            min_shard=min_shard,
            place=dict(place or {}),
            on_unmerged_state=on_unmerged_state,
            private_copies=private_copies,
            probe=probe,
        )
        super().__init__(accept(module))
        self._set_up(options)

    def _set_up(self, options: Options) -> None:
        for pattern, rule in options.state.items():
            check_state_rule(pattern, rule)
        if options.on_unmerged_state not in ("error", "warn"):
            raise WrapError(f"on_unmerged_state={options.on_unmerged_state!r}: write 'error' or 'warn'.")
        devices = devices_of(options.device_ids, self.module)
        if home_of(self.module) not in (None, devices[0]):
            self.module.to(devices[0])
        self._instep_options = options
        self._instep_devices = devices
        self._instep_output = devices[0] if options.output_device is None else device_of(options.output_device)
        self._instep_alone = len(devices) == 1
        self._instep_stays = devices[0].type == self._instep_output.type == "cpu" and not options.place
        self._instep_choice: Choice = choose(options.engine, devices)
        self._instep_engine: Engine = start(self._instep_choice, devices)
        self._instep_crew = Crew(self.module, devices, private=options.private_copies, joint=self._instep_engine.joint)
        self._instep_settler = Settler(
            options.state, Merger.of(options.merge, AUTO, options.dim), options.on_unmerged_state
        )
        self._instep_methods: dict[str, Method] = {}
        self._instep_called = False
        self._instep_restructured = self._instep_warned = False
        self._instep_lock = threading.RLock()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("forward", args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module in parallel: `model.call("generate", ids)`."""
        return self._run(method, args, kwargs)

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._instep_called:
            refuse_outer_wrapper()
            self._instep_called = True
        if self._instep_alone or inside_replica() or self._is_lazy() or follows_one_thread():
            return self._alone(method, args, kwargs)
        known = self._method(method)
        names, values = known.name(args, kwargs)
        plan = known.planner.plan(names, values)
        if plan.parts == 1:
            return self._alone(method, args, kwargs)
        with self._instep_lock, self._unharmed() as random:
            return self._together(method, known, plan, values, len(args), random)

    def _together(
        self,
        method: str,
        known: Method,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        random: RandomState,
    ) -> Any:
        """The algorithm: probe, split, place, cross, merge, settle."""
        if known.probe is not None:
            place, home = partial(self._place_one, plan), self._instep_devices[0]
            found = known.probe.before(self.module, home, plan, values, positional, place)
            self._instep_settler.found = found
        replicas = self._instep_crew.ready()[: plan.parts]
        if replicas[0].cloner.draws:
            self._instep_engine.in_turn = True
        shards = self._place(plan, apply_plan(plan, values))
        ambient = Ambient.capture(self._instep_devices)
        crossing = Crossing(self._instep_engine, replicas, method, ambient, self._instep_crew.behind)
        outcomes = crossing.run(shards, positional, plan.names)
        if not self._instep_engine.in_turn and random.moved():
            self._take_turns(random)
            return self._together(method, known, plan, values, positional, random)
        if any(outcome.changes.structure for outcome in outcomes):
            self._forget(random)
            kwargs = dict(zip(plan.names[positional:], values[positional:], strict=True))
            return self._alone(method, values[:positional], kwargs)
        refuse_writes(self.module, self._instep_crew.written())
        outputs = [on_output_device(outcome.output, self._instep_output) for outcome in outcomes]
        inputs = [dict(zip(plan.names, values, strict=True)) for values in shards]
        merged = known.merger.merge(outputs, plan.sizes, inputs)
        settler = self._instep_settler
        settler.inputs = inputs
        try:
            self._instep_crew.changed = settler.settle(self.module, replicas, outcomes, plan.sizes)
        finally:
            settler.inputs = ()
        return merged

    def _alone(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The module itself, on the first device."""
        function = self.module if method == "forward" else getattr(self.module, method)
        args, kwargs = bare(args), bare(kwargs)
        if self._instep_stays or inside_replica():
            return function(*args, **kwargs)
        device, rules = self._instep_devices[0], self._instep_options.place
        if device.type != "cpu" or rules:
            names, values = self._method(method).name(args, kwargs)
            keep = stays_on_host(values)
            moved = [place(value, (name,), device, keep, rules) for name, value in zip(names, values, strict=True)]
            args, kwargs = moved[: len(args)], dict(zip(names[len(args) :], moved[len(args) :], strict=True))
        output = function(*args, **kwargs)
        return output if self._instep_output == device else on_output_device(output, self._instep_output)

    def _place(self, plan: SplitPlan, shards: list[list[Any]]) -> list[list[Any]]:
        """Each replica's shards on its device; leaves that are there already are not touched."""
        rules = self._instep_options.place
        keep = stays_on_host(shards[0]) if any(d.type != "cpu" for d in self._instep_devices) else False
        return [
            [place(value, (name,), device, keep, rules) for name, value in zip(plan.names, values, strict=True)]
            for values, device in zip(shards, self._instep_devices, strict=False)
        ]

    def _place_one(self, plan: SplitPlan, shard: list[Any]) -> list[Any]:
        """One replica's arguments on the first device."""
        return self._place(plan, [shard])[0]

    def _take_turns(self, random: RandomState) -> None:
        """Forget a call in which replicas drew random numbers side by side; from now on they run in turn."""
        random.restore()
        self._instep_crew.discard()
        self._instep_engine.in_turn = True

    def _forget(self, random: RandomState) -> None:
        """Forget a call in which `forward` changed the structure of its replica.

        Layers or hooks that come to be in the first call do so on the module itself, and are there for the next one.
        """
        random.restore()
        self._instep_crew.discard()
        if self._instep_restructured and not self._instep_warned:
            warnings.warn(
                "forward adds, removes or replaces modules, parameters, hooks, or entries of a list or dictionary that "
                "holds tensors or modules, again and again: such calls run on one device.",
                stacklevel=5,
            )
            self._instep_warned = True
        self._instep_restructured = True

    @contextmanager
    def _unharmed(self) -> Iterator[RandomState]:
        """A call that fails leaves the random state as it was, and its replicas are not used again."""
        random = RandomState(self._instep_devices)
        try:
            yield random
        except BaseException:
            self._instep_crew.discard()
            random.restore()
            raise

    def _method(self, name: str) -> Method:
        known = self._instep_methods.get(name)
        if known is None:
            function = getattr(self.module, name)
            known = self._instep_methods[name] = Method(function, self._instep_options, len(self._instep_devices), name)
        return known

    def _is_lazy(self) -> bool:
        """A lazy module's first call runs on the source, where its parameters come to be."""
        if not getattr(self, "_instep_maybe_lazy", True):
            return False
        tensors = (*self.module.parameters(), *self.module.buffers())
        self._instep_maybe_lazy = any(
            isinstance(tensor, (UninitializedBuffer, UninitializedParameter)) for tensor in tensors
        )
        return self._instep_maybe_lazy

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What happens to each leaf of such a call, and why; nothing runs. `print(model.explain(batch))`."""
        known = self._method("forward")
        names, values = known.name(args, kwargs)
        if self._instep_alone:
            return Explanation(f"one device: the module itself runs on {self._instep_devices[0]}", (), ())
        plan = known.planner.plan(names, values)
        trial = "" if known.probe is None else known.probe.last.words
        return explain(plan, values, self._instep_devices, self._instep_choice, known.merger, trial)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on the replicas while inside; they are reduced once, on the way out."""
        with self._instep_engine.hold():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Promise that no value of the module changes while inside: nothing is sent to the replicas again."""
        crew = self._instep_crew
        outer = crew.frozen
        if not self._instep_alone:
            for replica in crew.ready():
                replica.follow_state()
        crew.frozen = True
        try:
            yield
        finally:
            crew.frozen = outer

    def close(self) -> None:
        """Give the threads back; the wrapper starts anew if it is called again."""
        self._instep_engine.close()
        self._instep_crew.discard()

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
        choice = self._instep_choice
        inner = repr(self.module).replace("\n", "\n  ")
        return f"DataParallel(\n  engine={choice.name} ({choice.why}), devices=[{devices}]\n  {inner}\n)"

    def __getstate__(self) -> dict[str, Any]:
        hooks = {name: value for name, value in self.__dict__.items() if name.endswith("_hooks") and value}
        return {"module": self.module, "options": self._instep_options, "hooks": hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Transparent.__init__(self, state["module"])
        self.__dict__.update(state["hooks"])
        self._set_up(state["options"])
