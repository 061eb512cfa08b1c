"""Numbers among the arguments: the first values are tried, further ones on a schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import instep
from instep.probe.record import EAGER_NUMBERS, MAX_CHECKS

from .helpers import Net, is_probing, probe_of, said

RUNS: list[int] = []


def annealed(_: Net, h: Tensor, temperature: float, step: int = 0) -> dict[str, Tensor]:
    if is_probing():
        RUNS.append(len(h))
    return {"p": (h / temperature).softmax(-1), "loss": (h / temperature).pow(2).mean() * (1 + step)}


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_an_annealed_temperature_is_tried_on_the_schedule(wrap: Any, engine: str) -> None:
    net, x = Net(annealed), torch.randn(6, 3)
    model = wrap(net, engine=engine)
    tried = []
    for step in range(40):
        before, numbers = len(RUNS), {"temperature": 2.0 - 0.01 * step, "step": step}
        ours, plain = model(x, **numbers), net(x, **numbers)
        tried += [step] if len(RUNS) > before else []
        torch.testing.assert_close(ours, plain)
    assert tried[:EAGER_NUMBERS] == list(range(EAGER_NUMBERS))
    assert len(tried) <= EAGER_NUMBERS + MAX_CHECKS
    assert tried[EAGER_NUMBERS:] == [5, 11, 23]  # twice as many changes as at the last trial
    assert len(probe_of(model)._records) == 1
    assert said(model, x, temperature=9.0)["loss"] == "mean weighted by samples (the probe)"


def test_a_number_that_was_tried_starts_no_trial(wrap: Any) -> None:
    model, x = wrap(Net(annealed), engine="serial"), torch.randn(6, 3)
    for temperature in (1.0, 2.0):
        model(x, temperature=temperature)
    before = len(RUNS)
    for _ in range(20):
        for temperature in (2.0, 1.0):
            model(x, temperature=temperature)
    assert len(RUNS) == before


@pytest.mark.parametrize("first", ["mean", "rows", "neither"])
def test_a_number_that_selects_the_reduction_becomes_part_of_the_structure(wrap: Any, first: str) -> None:
    """0: rows, 1: a mean, 2: a sum, 3: what no rule explains. A step changes at every call."""

    def then(_: Net, h: Tensor, step: int, mode: int) -> Tensor:
        return [h, h.pow(2).mean(), h.pow(2).sum(), h.std()][mode]

    net, x = Net(then), torch.randn(7, 3)
    model = wrap(net, engine="serial")
    start = {"mean": 1, "rows": 0, "neither": 3}[first]
    for step in range(60):
        mode = start if step < 50 else step % 4
        if mode == 3:
            with pytest.raises(instep.MergeError):
                model(x, step=step, mode=mode)
        else:
            torch.testing.assert_close(model(x, step=step, mode=mode), net(x, step=step, mode=mode))
    assert probe_of(model).numbers_matter


def test_numbers_that_hide_values_do_not_decide(wrap: Any) -> None:
    """At 0 the penalty proves nothing."""
    net, x = Net(lambda _, h, weight: {"h": h, "penalty": weight * h.pow(2).mean()}), torch.randn(7, 3)
    model = wrap(net, engine="serial")
    for weight in (0.0, 0.0, 0.5, 1.0):
        torch.testing.assert_close(model(x, weight=weight), net(x, weight=weight))
    assert said(model, x, weight=2.0)["penalty"] == "mean weighted by samples (the probe)"
    assert not probe_of(model).numbers_matter


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "0-d tensor"])
def test_a_weight_that_begins_at_zero_shows_what_it_weighs(wrap: Any, as_tensor: bool) -> None:
    """The first call is a sum over samples; the second adds a mean, which no rule explains."""

    def then(_: Net, h: Tensor, beta: Any) -> Tensor:
        return h.sum() + beta * h.pow(2).mean()

    net, x = Net(then), torch.randn(6, 3)
    model = wrap(net, engine="serial")
    weights = [torch.tensor(beta) if as_tensor else beta for beta in (0.0, 0.1, 0.2)]
    torch.testing.assert_close(model(x, beta=weights[0]), net(x, beta=weights[0]))
    for weight in weights[1:]:
        with pytest.raises(instep.MergeError, match="no sum, mean or constant explains it"):
            model(x, beta=weight)


@pytest.mark.parametrize("then", [lambda h: h.pow(2).mean(), lambda h: h], ids=["mean", "rows"])
@pytest.mark.parametrize("count", [7, 9, 40])
def test_a_number_of_samples_that_forward_uses_of_the_batch(wrap: Any, then: Any, count: int) -> None:
    """The few samples of the first trial are all used."""
    net = Net(lambda _, h, n: then(h[:n]))
    x = torch.randn(count + 1, 3)
    model = wrap(net, engine="serial")
    with pytest.raises(instep.MergeError):
        model(x, n=count)
    torch.testing.assert_close(model(x, n=count + 1), net(x, n=count + 1))


def test_a_number_of_positions_is_no_number_of_samples(wrap: Any) -> None:
    net = Net(lambda _, h, n: {"rows": h[:, :n], "loss": h[:, :n].pow(2).mean()})
    model, x = wrap(net, engine="serial"), torch.randn(12, 9, 3)
    for n in (6, 7, 8):
        torch.testing.assert_close(model(x, n=n), net(x, n=n))
