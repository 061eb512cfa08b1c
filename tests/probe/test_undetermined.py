"""What a few samples do not show: zeros, rows in order, parts that weigh nothing, numbers too close together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import instep

from .helpers import Net, assert_same

SERIAL = {"engine": "serial"}


@pytest.mark.parametrize(
    "fixed",
    [
        lambda h: torch.zeros(3),
        lambda h: torch.zeros(3, 2, dtype=torch.bool),
        lambda h: (h - 1000).relu().mean(0)[:3],
        lambda h: (h > 1000).sum(0)[:3],
        lambda h: h.mean(0)[:3] * float("nan"),
    ],
)
def test_nothing_of_a_fixed_shape_is_not_taken_for_rows(wrap: Any, fixed: Any) -> None:
    """Its size is the shard's, and it is no batch for that."""
    net = Net(lambda _, h: (h, fixed(h)))
    for batch in (9, 7, 6):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(wrap(net, 3, **SERIAL)(x), net(x), equal_nan=True)


def test_a_tuple_as_long_as_its_shard_is_no_batch_for_that(wrap: Any) -> None:
    net, x = Net(lambda _, h: (h, ("a", "b", "c"), (1, 2, 3))), torch.randn(9, 3)
    assert wrap(net, 3, **SERIAL)(x)[1:] == (("a", "b", "c"), (1, 2, 3))


def test_a_tuple_with_one_entry_a_sample_is_joined(wrap: Any) -> None:
    net, x = Net(lambda _, h: h.unbind(0)), torch.randn(7, 3)
    model = wrap(net, 3, **SERIAL)
    assert type(model(x)) is tuple
    torch.testing.assert_close(model(x), net(x))


@pytest.mark.parametrize("first", [2, 4, 5])
def test_a_batch_cut_in_half_is_an_error(wrap: Any, first: int) -> None:
    """Two halves of few samples may look like one entry per sample."""
    model = wrap(Net(lambda _, h: h.chunk(2)), 4, **SERIAL)

    def calls() -> None:
        for batch in (first, 16):
            model(torch.randn(batch, 3))

    with pytest.raises(instep.MergeError):
        calls()


@pytest.mark.parametrize(
    "look",
    [
        lambda h, ids: ids.unique(),
        lambda h, ids: ids.sort()[0],
        lambda h, ids: ids.sort(descending=True)[0],
        lambda h, ids: ids.cummax(0)[0],
        lambda h, ids: sorted(ids.tolist()),
        lambda h, ids: sorted(str(i) for i in ids.tolist()),
        lambda h, ids: h[ids.argsort()],
        lambda h, ids: h[ids.argsort(descending=True)][None],
    ],
)
def test_rows_that_were_in_order_already_are_turned_round(wrap: Any, look: Any) -> None:
    net = Net(lambda _, h, ids: (h, look(h, ids)))
    model = wrap(net, **SERIAL)
    with pytest.raises(instep.MergeError, match=r"order of the samples|together"):
        model(torch.randn(9, 3), ids=torch.tensor([0, 1, 2, 3, 4, 7, 6, 5, 1]))
    rows = Net(lambda _, h, ids: (ids * 2, ids.tolist(), [str(i) for i in ids.tolist()]))
    for ids in (torch.arange(9), torch.arange(9).flip(0)):
        x = torch.randn(9, 3)
        assert_same(wrap(rows, **SERIAL)(x, ids=ids), rows(x, ids=ids))
        assert wrap(rows, **SERIAL)(x, ids=ids)[1:] == rows(x, ids=ids)[1:]


def test_rows_that_were_all_selected_may_be_fewer_later(wrap: Any) -> None:
    net = Net(lambda _, h, keep: h[keep])
    model = wrap(net, **SERIAL)
    for keep in (torch.ones(8).bool(), torch.tensor([1, 1, 0, 1, 0, 0, 1, 1]).bool(), torch.zeros(8).bool()):
        x = torch.randn(8, 3)
        torch.testing.assert_close(model(x, keep=keep), net(x, keep=keep))


def test_counts_and_shares_that_are_nothing_at_first(wrap: Any) -> None:
    net = Net(lambda _, h, right: {"count": right.sum(), "number": int(right.sum()), "share": right.double().mean()})
    model = wrap(net, 3, **SERIAL)
    for places in ((), (), (4,), (1, 2, 4, 7), ()):
        right = torch.zeros(9, dtype=torch.bool)
        right[list(places)] = True
        x = torch.randn(9, 3)
        torch.testing.assert_close(model(x, right=right), net(x, right=right))


def test_the_place_of_the_largest_is_no_count(wrap: Any) -> None:
    model = wrap(Net(lambda _, h, score: score.argmax()), **SERIAL)
    with pytest.raises(instep.MergeError):
        model(torch.randn(8, 3), score=torch.tensor([9.0, 1.0, 3.0, 2.0, 8.0, 7.0, 1.0, 2.0]))


def test_shapes_are_merged_number_by_number(wrap: Any) -> None:
    net = Net(lambda _, h: (h.shape, h.shape[1:], h.t().shape))
    for batch in (8, 7):  # shards of 4, which is the width too
        x = torch.randn(batch, 3)
        assert wrap(net, **SERIAL)(x) == net(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_in_half_precision_are_recognized(wrap: Any, dtype: torch.dtype) -> None:
    """The parts differ by less than the rounding error, so the probe compares them in double precision."""
    for seed in range(3):
        torch.manual_seed(seed)
        net = Net(lambda _, h, y: (functional.cross_entropy(h, y), h.pow(2).sum(), h.abs().mean())).to(dtype)
        model = wrap(net, **SERIAL)
        for batch in (8, 5):
            x, y = torch.randn(batch, 3).to(dtype), torch.randint(0, 4, (batch,))
            ours, plain = model(x, y=y), net(x, y=y)
            assert [value.dtype for value in ours] == [value.dtype for value in plain]
            torch.testing.assert_close(ours, plain, rtol=3e-2, atol=1e-2)
    assert {p.dtype for p in net.parameters()} == {dtype}


def test_losses_close_to_zero_are_recognized(wrap: Any) -> None:
    net = nn.Embedding(10, 10, _weight=torch.eye(10) * 20 + torch.rand(10, 10))

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net.float()

        def forward(self, y: Tensor) -> Tensor:
            return functional.cross_entropy(self.net(y), y)

    learner, y = Learner(), torch.randint(0, 10, (8,))
    torch.testing.assert_close(wrap(learner, **SERIAL)(y), learner(y))


def test_hinges_that_one_part_does_not_reach(wrap: Any) -> None:
    net = Net(lambda _, h, target: (h.sum(1).detach() * 0 + target.clamp(min=0)).sum())
    target = torch.tensor([-1.0, -1, -1, 0.6, 0.5, -1, 0.9]).double()
    torch.testing.assert_close(wrap(net, **SERIAL)(torch.randn(7, 3), target=target), torch.tensor(2.0).double())


def test_a_part_that_weighs_nothing_proves_nothing(wrap: Any) -> None:
    """The largest of two parts is what one of them gave; so is a mean to which the other adds nothing."""
    for at in range(8):
        score = torch.zeros(8).double()
        score[at] = 1.0
        labels = (torch.arange(8) >= 3).long()
        model = wrap(Net(lambda _, h, score, labels: score.max() + score.sum() / 8), **SERIAL)
        with pytest.raises(instep.MergeError):
            model(torch.randn(8, 3), score=score + torch.arange(8) / 50, labels=labels)


def test_a_part_without_a_mean_is_no_part_of_a_mean_over_samples(wrap: Any) -> None:
    """All of a shard is ignored by weights that are made inside: NaN there, and not on one device."""

    def then(_: Net, h: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(h, y.where(y % 3 > 0, -100))

    model, x = wrap(Net(then), **SERIAL), torch.randn(6, 3)
    model(x, y=torch.ones(6, dtype=torch.long))
    with pytest.raises(instep.MergeError):
        model(x, y=torch.tensor([0, 0, 0, 1, 2, 1]))


def test_an_unexplained_output_stays_an_error(wrap: Any) -> None:
    model = wrap(Net(lambda _, h, score: score.median()), **SERIAL)
    for score in (torch.randn(6).double(), torch.ones(6).double(), torch.ones(6).double() * 2):
        with pytest.raises(instep.MergeError, match="no sum, mean or constant explains it"):
            model(torch.randn(6, 3), score=score)
