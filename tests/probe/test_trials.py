"""When the probe tries, how often, on which samples, and what it leaves to the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.probe.probe import MAX_RECORDS
from instep.probe.window import default_part_sizes, large_part_sizes
from instep.runtime.probe_flag import exempt_trial

from .helpers import Net, both_engines, is_probing, probe_of, said


def record_counts(model: Any) -> list[int]:
    return [len(records) for records in probe_of(model)._records.values()]


def test_zeros_are_tried_again(wrap: Any) -> None:
    net = Net(lambda s, h: {"loss": (h * s.gate).pow(2).mean()})
    net.gate = nn.Parameter(torch.zeros(()))
    model, x = wrap(net), torch.randn(6, 3)
    assert model(x)["loss"].item() == 0
    assert not probe_of(model).last_record.outputs["loss",].proven
    net.gate.data.fill_(1.0)
    torch.testing.assert_close(model(x)["loss"], net(x)["loss"])
    assert said(model, x)["loss"] == "mean weighted by samples (the probe)"


@pytest.mark.parametrize(
    "first",
    [
        torch.randn(1, 3),
        instep.Shards([torch.randn(1, 3), torch.randn(0, 3)]),
        instep.Shards([torch.randn(1, 3), torch.randn(1, 3)]),
    ],
    ids=["one sample", "one sample in shards", "two samples in shards"],
)
def test_calls_that_cannot_be_tried_do_not_prevent_later_trials(wrap: Any, first: Any) -> None:
    net = Net(lambda _, h: {"h": h, "loss": h.pow(2).mean()})
    model, x = wrap(net), torch.randn(5, 3)
    try:
        model(first)
    except instep.MergeError:  # the loss of a batch that came split
        assert isinstance(first, instep.Shards)
    assert model.explain(x).trial == "not tried yet"
    torch.testing.assert_close(model(x)["loss"], net(x)["loss"])
    assert model.explain(x).trial.startswith("tried on 2 and 3 samples")


@both_engines
def test_undetermined_outputs_are_tried_on_more_samples(wrap: Any, engine: str) -> None:
    """Five samples are all right, the next ones are not: a share, and a count."""
    net = Net(lambda _, h: {"share": (h[:, 0] > 0).float().mean(), "wrong": int((h[:, 0] <= 0).sum())})
    nn.init.zeros_(net.layer.bias)
    signs = torch.ones(20)
    signs[[6, 8, 9, 17]] = -1
    x = net.layer.weight[0].detach() * signs[:, None]
    model = wrap(net, engine=engine)
    torch.testing.assert_close(model(x)["share"], torch.tensor(16 / 20))
    assert model(x)["wrong"] == 4


def test_outputs_of_zeros_are_tried_again_later(wrap: Any) -> None:
    net = Net(lambda _, h: h - h.mean(0))
    nn.init.zeros_(net.layer.weight)
    model, x = wrap(net), torch.randn(6, 3)
    assert model(x).abs().max() < 1e-6
    nn.init.ones_(net.layer.weight)
    with pytest.raises(instep.MergeError, match="depend on other samples"):
        model(x)


def test_the_number_of_trials_is_bounded(wrap: Any) -> None:
    model, x = wrap(Net(lambda s, h: {"h": h, "scale": s.layer.weight.norm()})), torch.randn(6, 3)
    for _ in range(40):
        model(x)
    assert 1 < probe_of(model).last_record.trials.count <= 6
    known = wrap(Net(lambda _, h: h))
    for batch in (6, 7, 9, 3, 2):
        known(torch.randn(batch, 3))
    assert probe_of(known).last_record.trials.count == 1
    assert record_counts(known) == [1]


def test_a_new_structure_is_tried_anew(wrap: Any) -> None:
    def then(_: Net, h: Tensor, reduction: str = "mean") -> Tensor:
        return h.mean() if reduction == "mean" else h.sum()

    net, x = Net(then), torch.randn(7, 3)
    model = wrap(net)
    for reduction in ("mean", "sum", "mean", "sum"):
        torch.testing.assert_close(model(x, reduction=reduction), net(x, reduction=reduction))
    assert record_counts(model) == [2]
    for index in range(40):  # their verdicts differ: every value is tried, and the oldest record dropped
        kind = "mean" if index == 35 else f"kind {index}"
        torch.testing.assert_close(model(x, reduction=kind), net(x, reduction=kind))
    assert record_counts(model) == [MAX_RECORDS]
    assert probe_of(model).last_record.trials.count == 1


def test_the_number_of_tried_strings_is_bounded(wrap: Any) -> None:
    model, x = wrap(Net(lambda _, h, text: h.mean())), torch.randn(7, 3)
    for index in range(60):
        torch.testing.assert_close(model(x, text=f"text {index}"), model.layer(x).mean())
    assert record_counts(model) == [MAX_RECORDS]
    assert "which agree" in probe_of(model).last_record.summary


def test_explain_adds_no_records(wrap: Any) -> None:
    def then(_: Net, h: Tensor, scale: float) -> Tensor:
        return (h * scale).mean()

    net, x = Net(then), torch.randn(7, 3)
    model = wrap(net)
    for index in range(MAX_RECORDS + 8):
        assert model.explain(x, scale=float(index)).trial == "not tried yet"
    assert record_counts(model) == []
    torch.testing.assert_close(model(x, scale=99.0), net(x, scale=99.0))
    assert probe_of(model).last_record.status == "tried"


def test_booleans_and_enums_are_always_tried(wrap: Any) -> None:
    def then(_: Net, h: Tensor, step: int, total: bool = False) -> Tensor:
        return h.sum() if total else h.mean()

    net, x = Net(then), torch.randn(7, 3)
    model = wrap(net)
    for step in range(MAX_RECORDS + 4):
        torch.testing.assert_close(model(x, step=step), net(x, step=step))
    for step in range(50, 53):
        torch.testing.assert_close(model(x, step=step, total=True), net(x, step=step, total=True))


def test_other_methods_have_verdicts_of_their_own(wrap: Any) -> None:
    class Two(nn.Linear):
        def penalty(self, x: Tensor) -> Tensor:
            return self(x).pow(2).sum()

    net, x = Two(3, 4), torch.randn(5, 3)
    model = wrap(net)
    torch.testing.assert_close(model.call("penalty", x), net.penalty(x))
    torch.testing.assert_close(model(x), net(x))
    assert probe_of(model, "penalty").last_record.outputs != probe_of(model).last_record.outputs


@both_engines
def test_a_module_that_needs_more_samples_is_left_to_the_tables(wrap: Any, engine: str) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        assert len(h) >= 4, "at least four"
        return h

    net, x = Net(then), torch.randn(8, 3)
    model = wrap(net, engine=engine)
    torch.testing.assert_close(model(x), net(x))
    assert model.explain(x).trial == "not tried: AssertionError: at least four"


def test_an_interruption_passes(wrap: Any) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        if is_probing():
            raise KeyboardInterrupt
        return h

    model = wrap(Net(then))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(6, 3))
    assert not is_probing()


def test_a_collective_is_an_excuse(wrap: Any) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        exempt_trial("instep.all_gather")
        return h - h.mean(0)

    model, x = wrap(Net(then)), torch.randn(6, 3)
    assert model(x).shape == (6, 4)
    assert "only shapes count: instep.all_gather" in model.explain(x).trial


def test_sizes_of_parts() -> None:
    assert [default_part_sizes(batch, 3) for batch in (6, 7, 9)] == [(3, 3), (3, 4), (3, 4)]
    assert [large_part_sizes(batch) for batch in (2, 4, 5, 9, 100)] == [(1, 1), (1, 3), (2, 3), (4, 5), (16, 17)]
    assert [large_part_sizes(batch, 9) for batch in (18, 19, 100)] == [(9, 9), (9, 10), (16, 17)]


@both_engines
def test_rows_that_are_chosen_by_their_places_are_an_error(wrap: Any, engine: str) -> None:
    """Two samples and then three keep every second row in step; three and then two do not."""
    with pytest.raises(instep.MergeError, match="its shapes are"):
        wrap(Net(lambda _, h: (h[0::2], h[1::2])), engine=engine)(torch.randn(6, 3))


@both_engines
def test_a_module_that_takes_only_even_numbers_is_tried_on_them(wrap: Any, engine: str) -> None:
    """Two views of every image, one half after the other: samples meet."""

    def then(_: Net, h: Tensor) -> Tensor:
        one, two = h.view(2, -1, 4)
        return torch.cat([one - two, two - one])

    for batch in (4, 6, 12):
        with pytest.raises(instep.MergeError, match="depend on other samples"):
            wrap(Net(then), engine=engine)(torch.randn(batch, 3))
    pairs = Net(lambda _, h: h.view(-1, 2, 4).flip(1).reshape(-1, 4).mul(h).abs() if len(h) % 2 == 0 else 1 / 0)
    with pytest.raises(instep.MergeError):
        wrap(Net(lambda _, h: h.view(2, -1, 4).sum((1, 2))), engine=engine)(torch.randn(12, 3))
    model, x = wrap(pairs, engine=engine), torch.randn(8, 3)
    torch.testing.assert_close(model(x), pairs(x))
    assert model.explain(x).trial == "tried on 2 and 4 samples, separately and together"
