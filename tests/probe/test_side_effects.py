"""Nobody notices a trial: not the module, its state, its hooks, its generators, nor its compiled code."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.probe.trial_call import TrialCall

from .helpers import Net, is_probing, probe_of

COUNTED: list[int] = []
CALLS = 0


class Restless(nn.Module):
    """Changes whatever it can reach."""

    table: dict[str, int] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.plain = torch.zeros(2)
        self.history: list[Any] = []
        self.notes: dict[str, Any] = {"deep": {"list": []}}
        self.array = np.zeros(2)
        self.helper = type("Helper", (), {})()
        self.helper.seen = 0
        self.generator = torch.Generator()

    def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
        global CALLS
        CALLS += 1
        COUNTED.append(len(x))
        self.table["n"] = len(x)
        self.mean.add_(1)
        self.again = self.again + 1
        self.frozen.data.add_(1)
        self.plain += 1
        self.history.append(x)
        self.notes["deep"]["list"].append(1)
        self.notes["new"] = 1
        self.array += 1
        self.helper.seen += 1
        self.fresh = len(x)
        random.random()
        np.random.rand()
        torch.rand(1)
        torch.rand(1, generator=self.generator)
        x.mul_(2)
        extra["seen"].append(1)
        extra["x"].zero_()
        return self.layer(x)


def test_a_trial_has_no_side_effects() -> None:
    net = Restless()
    model = instep.DataParallel(net, ["cpu"] * 2, engine="serial")
    x, extra = torch.randn(6, 3), {"seen": [], "x": torch.ones(6, 2)}
    known = model._instep_runner.binding("forward")
    assert known.probe is not None
    values = (x, extra)
    plan = known.planner.plan(("x", "extra"), values)
    fired: list[Any] = []
    net.layer.register_forward_hook(lambda *_: fired.append(1))
    before = copy.deepcopy({k: v for k, v in net.__dict__.items() if not k.startswith("_")} | dict(net.state_dict()))
    generators = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        net.generator.get_state(),
    )
    held = {name: id(value) for name, value in net.__dict__.items()}
    versions = {name: t._version for name, t in net.state_dict(keep_vars=True).items()}
    known.probe.prepare(TrialCall(net, torch.device("cpu"), plan, values, 2, lambda shard: shard), 0)
    assert known.probe.last_record.trials.count == 1
    assert "with the same random numbers for each sample" in known.probe.last_record.summary
    assert not fired
    assert {name: id(value) for name, value in net.__dict__.items()} == held
    assert {name: t._version for name, t in net.state_dict(keep_vars=True).items()} == versions
    assert torch.equal(x, values[0])
    assert extra["seen"] == []
    assert extra["x"].sum() == 12
    assert (CALLS, COUNTED, Restless.table) == (0, [], {})
    now = {k: v for k, v in net.__dict__.items() if not k.startswith("_")} | dict(net.state_dict())
    assert net.helper.seen == 0
    for name in before.keys() - {"helper", "generator"}:
        same = torch.equal if isinstance(before[name], Tensor) else np.array_equal
        assert (
            same(before[name], now[name]) if name in ("plain", "array", "mean") else str(before[name]) == str(now[name])
        )
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert generators[2] == np.random.get_state()[1].tolist()
    assert torch.equal(generators[3], net.generator.get_state())
    model.close()


def test_a_module_that_writes_to_its_weights_is_restored() -> None:
    net = Net(lambda s, h: h * s.layer.weight.data.mul_(0.5).sum())
    before = net.layer.weight.detach().clone()
    with instep.DataParallel(net, ["cpu"] * 2) as model, pytest.raises(instep.StateError, match="trainable parameter"):
        model(torch.randn(6, 3))
    assert torch.equal(net.layer.weight, before)


def test_hooks_run_once_per_replica_and_not_in_trials(wrap: Any) -> None:
    net, fired = Net(lambda _, h: h), []
    net.layer.register_forward_hook(lambda *_: fired.append(is_probing()))
    net.layer.register_forward_pre_hook(lambda *_: fired.append(is_probing()))
    wrap(net, hooks="per_replica")(torch.randn(6, 3))
    assert fired
    assert not any(fired)


def test_weight_norm_still_has_its_weight(wrap: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.utils.weight_norm(nn.Linear(3, 4))
    x = torch.randn(6, 3)
    model = wrap(net)
    torch.testing.assert_close(model(x), net(x))
    assert probe_of(model).last_record.trials.count == 1


def test_compiled_code_is_not_compiled_for_a_trial(wrap: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(is_probing())
        return graph

    net, x = nn.Linear(3, 4), torch.randn(6, 3)
    net.compile(backend=backend)
    model = wrap(net, engine="serial")
    torch.testing.assert_close(model(x), nn.functional.linear(x, net.weight, net.bias))
    assert probe_of(model).last_record.outputs
    assert not any(graphs)
    torch._dynamo.reset()


def test_the_callers_autocast_is_kept(wrap: Any) -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.seen = seen

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            if is_probing() and out.dtype is not torch.bfloat16:
                raise AssertionError
            return out.float().mean()

    net, x = Looks(), torch.randn(6, 3)
    model = wrap(net)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), net(x), rtol=2e-2, atol=2e-2)
    assert probe_of(model).last_record.trials.count == 1
    assert probe_of(model).last_record.outputs
