"""Prepared runs of workers that share a GPU. The CPU's are tested in `test_prepared_run.py`, in more cases."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.processes.controller.test_prepared_run import (
    Changing,
    Dying,
    Failing,
    Mixed,
    Net,
    Prediction,
    Predicts,
    SometimesCheckpointed,
    runs,
    set_attribute,
    subtract_mean,
    write_buffer,
)
from torch import Tensor, nn

import instep

from .sharing import kill_worker

__all__ = ["runs"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("gpu_workers"),
]


def wrap(net: nn.Module, count: int = 2, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net.cuda(), [0] * count, engine="processes", **options)


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, 4, device="cuda")


def check_step(model: instep.DataParallel, plain: nn.Module, x: Tensor) -> None:
    """A training step of both; outputs and gradients have to agree."""
    for module in (model, plain):
        module.zero_grad()
    output, expected = model(x), plain(x.cuda())
    torch.testing.assert_close(output, expected)
    output.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def warm_up(model: instep.DataParallel, plain: nn.Module, runs: list[str]) -> None:
    """Run steps until prepared runs run them."""
    for _ in range(5):
        check_step(model, plain, rows())
    assert runs[-2:] == ["forward", "backward"], runs
    runs.clear()


def copied(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net).cuda()


@pytest.mark.parametrize("count", [2, 3])
def test_training_is_that_of_the_plain_module(runs: list[str], count: int) -> None:
    """Also with batches on the CPU, and calls on other streams."""
    torch.manual_seed(0)
    net = Net()
    plain, stream = copied(net), torch.cuda.Stream()
    with wrap(net, count) as model:
        optimizers = [torch.optim.AdamW(module.parameters(), 0.01) for module in (model, plain)]
        for step in range(24):
            x = rows(7 if step % 3 else 5)
            if step % 5 == 4:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    check_step(model, plain, x)
                torch.cuda.current_stream().wait_stream(stream)
            else:
                check_step(model, plain, x.cpu() if step % 5 == 3 else x)
            for optimizer in optimizers:
                optimizer.step()
    assert runs.count("forward") == runs.count("backward") > 12
    assert "lost" not in runs


@pytest.mark.parametrize("autocast", [False, True])
def test_dictionaries_strings_keywords_and_draws(runs: list[str], autocast: bool) -> None:
    """The same bits as by the general path, with the same draws and the same advance of the generators."""
    results = []
    for enabled in (True, False):
        torch.manual_seed(1)
        net = Mixed()
        with wrap(net) as model:
            model._instep_runner.prepared_calls.enabled = enabled
            found: list[Tensor] = []
            for step in range(8):
                batch = {"a": rows(5), "b": rows(5)}
                names = [f"name {step} {i}" for i in range(5)]
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    output = model(batch, names, gain=2.0)
                assert output["more"][1] == [name.upper() for name in names]
                output["more"][0].sum().backward()
                weight: Any = net.left.weight
                found += [output["hidden"].detach(), weight.grad.clone(), torch.get_rng_state()]
                found.append(torch.cuda.get_rng_state())
        results.append(found)
        assert ("forward" in runs) is enabled
        assert ("backward" in runs) is enabled
        runs.clear()
    assert all(map(torch.equal, *results))


def test_outputs_in_containers_of_other_classes(runs: list[str]) -> None:
    net = Predicts()
    plain = copied(net)
    with wrap(net) as model:
        for _ in range(8):
            x, names = rows(5), list("abcde")
            output, expected = model(x, names), plain(x, names)
            assert type(output) is OrderedDict
            one, other = output["prediction"], expected["prediction"]
            assert type(one) is Prediction
            torch.testing.assert_close([*one.scores, output["total"]], [*other.scores, expected["total"]])
            output["total"].sum().backward()
            expected["total"].sum().backward()
            torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert runs.count("forward") == runs.count("backward") >= 4
    assert "lost" not in runs


def test_calls_without_gradients(runs: list[str]) -> None:
    net = Net()
    with wrap(net) as model, torch.no_grad():
        for _ in range(6):
            x = rows()
            torch.testing.assert_close(model(x), net(x))
    assert runs[-1] == "forward"


def test_several_graphs_and_backwards(runs: list[str]) -> None:
    """Two forwards before a backward, `retain_graph`, a part of the outputs, accumulation, and `no_sync`."""
    net = Net()
    plain = copied(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        x, y = rows(), rows()
        for module in (model, plain):
            module.zero_grad()
            first, second = module(x).sum(), module(y).pow(2)
            second[:3].sum().backward(retain_graph=True)
            second.sum().backward()
            first.backward()
        with model.no_sync():
            model(x).sum().backward()
        plain(x).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        loss = model(x).pow(2).sum()
        with torch.no_grad():
            net.outer.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert runs.count("backward") == 4


@pytest.mark.parametrize(
    ("action", "check"),
    [
        (set_attribute, lambda net: net.seen == 1),
        (write_buffer, lambda net: net.count.item() == 6),
        (subtract_mean, lambda _: True),
    ],
)
def test_a_forward_that_does_something_new(
    runs: list[str], action: Callable[[Changing, Tensor], Any], check: Callable[[Changing], bool]
) -> None:
    net = Changing(action)
    plain = copied(net)
    with wrap(net, state={"count": "sum"}) as model:
        warm_up(model, plain, runs)
        for _ in range(2):
            x = rows().clamp(max=9) + 10.0
            output = model(x)
            if action is subtract_mean:
                hidden = torch.tanh(plain.inner(x))
                torch.testing.assert_close(output, plain.finish(hidden - hidden.mean(0)))
            else:
                torch.testing.assert_close(output, plain(x))
                assert check(net)
            net.count.zero_()
        assert ("lost" in runs) is (action is subtract_mean)
        check_step(model, plain, rows().clamp(max=9))


def test_checkpoints_and_nested_backwards_in_some_calls_only(runs: list[str]) -> None:
    net = SometimesCheckpointed()
    plain = copied(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        for value in (10.0, 9.0, -10.0, 1.0):
            check_step(model, plain, torch.full((6, 4), value, device="cuda"))
        assert runs == ["forward", "backward"] * 4


def test_settings_and_changes_of_the_caller(runs: list[str]) -> None:
    net = Net()
    plain = copied(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        for module in (net, plain):
            module.offset.fill_(2.0)
        check_step(model, plain, rows())
        assert runs == ["forward", "backward"]
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction ^= True
        try:
            check_step(model, plain, rows())
            assert runs == ["forward", "backward"]  # by the general path
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction ^= True
        for parameter in (net.inner.weight, plain.inner.weight):
            parameter.requires_grad_(False)
        for _ in range(4):
            for module in (model, plain):
                module.zero_grad()
            x = rows()
            model(x).sum().backward()
            plain(x).sum().backward()
            assert net.inner.weight.grad is None
            torch.testing.assert_close(net.inner.bias.grad, plain.inner.bias.grad)
        assert runs[-1] == "backward"


@pytest.mark.parametrize("index", [0, 1])
def test_an_exception_keeps_its_type_and_names_the_replica(runs: list[str], index: int) -> None:
    net = Failing()
    plain = copied(net)
    with wrap(net) as model:
        warm_up(model, plain, runs)
        x = torch.zeros(6, 4, device="cuda")
        x[3 * index] = 10.0
        with pytest.raises(ArithmeticError, match="too large") as caught:
            model(x)
        assert f"raised in replica {index} on cuda:0" in caught.value.__notes__
        assert runs == ["forward"]
        for _ in range(5):
            check_step(model, plain, torch.zeros(6, 4, device="cuda"))
        assert runs[-1] == "backward"


@pytest.mark.parametrize("when", ["before", "in forward", "between", "in backward"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_worker_that_dies_is_replaced(runs: list[str], tmp_path: Path, when: str, count: int) -> None:
    net = Dying(tmp_path / "mark", in_backward=when == "in backward")
    plain = copied(net)
    with wrap(net, count) as model:
        warm_up(model, plain, runs)
        x = rows()
        gradients: list[list[Tensor]] = []
        for fails in (False, True):
            net.zero_grad()
            if fails and when.startswith("in "):
                net.mark.touch()
            started = time.monotonic()
            if fails and when == "before":
                kill_worker(model, 1)
            output = model(x)
            if fails and when == "between":
                kill_worker(model, 1)
            output.sum().backward()
            torch.cuda.synchronize()
            assert time.monotonic() - started < 30
            gradients.append([parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None])
        assert not net.mark.exists()
        assert all(map(torch.equal, *gradients))
        for _ in range(4):
            check_step(model, plain, rows())
        assert runs[-1] == "backward"
