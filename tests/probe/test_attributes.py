"""What the probe says of what `forward` leaves on the module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

from .helpers import both_engines


@both_engines
@pytest.mark.parametrize("private", [False, True])
def test_a_loss_that_is_left_on_the_module(wrap: Any, engine: str, private: bool) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            self.kl, self.attn, self.energy = h.pow(2).mean(), h.transpose(0, 1), h.abs().sum()
            return h

    net = Keeps()
    plain, x = copy.deepcopy(net), torch.randn(7, 3)
    model = wrap(net, engine=engine, private_copies=private)
    for _ in range(3):
        net.zero_grad()
        plain.zero_grad()
        for each in (model, plain):
            (each(x).sum() + net.kl + 2 * net.energy if each is model else 0)
        out, expected = model(x), plain(x)
        (out.sum() + net.kl + 2 * net.energy + net.attn[0].sum()).backward()
        (expected.sum() + plain.kl + 2 * plain.energy + plain.attn[0].sum()).backward()
        for name in ("kl", "attn", "energy"):
            torch.testing.assert_close(getattr(net, name), getattr(plain, name))
        torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


def test_a_running_total_is_not_taken_for_a_sum(wrap: Any) -> None:
    class Totals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.total = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + float(x.abs().sum())
            return self.layer(x)

    net = Totals()
    with pytest.raises(instep.StateError, match="'total'"):
        wrap(net)(torch.randn(6, 3))
    assert net.total == 0.0


@both_engines
def test_numbers_that_are_left_on_the_module(wrap: Any, engine: str) -> None:
    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.samples, self.level = len(x), float(x.mean())
            return super().forward(x)

    net = Notes(3, 4)
    model = wrap(net, engine=engine)
    for batch in (5, 7, 7, 4):
        x = torch.randn(batch, 3)
        model(x)
        assert net.samples == batch
        assert net.level == pytest.approx(float(x.mean()), abs=1e-6)


def test_a_total_that_begins_in_forward_is_noticed_at_the_second_call(wrap: Any) -> None:
    class Totals(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.total = getattr(self, "total", 0) + len(x)
            return super().forward(x)

    net = Totals(3, 4)
    model, x = wrap(net), torch.randn(6, 3)
    model(x)
    assert net.total == 6
    with pytest.raises(instep.StateError, match="'total'"):
        model(x)
    assert net.total == 6


@both_engines
def test_doubt_about_an_attribute_stays(wrap: Any, engine: str) -> None:
    """A mean over weights, tried on others and then on equal ones, is no mean over samples for that."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor, w: Tensor) -> Any:
            z = self.layer(x)
            self.score = ((z.square().mean(1) * w).sum() / w.sum()).detach()
            return z, (z * 0).sum()  # of which nothing is known after one trial

    net, x = Scores(), torch.randn(12, 3)
    model = wrap(net, engine=engine)
    for w in (torch.rand(12), torch.ones(12), torch.ones(12), torch.rand(12)):
        with pytest.raises(instep.StateError, match="'score'"):
            model(x, w)
        assert not hasattr(net, "score")


@both_engines
def test_what_weights_alone_make_is_kept_with_its_gradient(wrap: Any, engine: str) -> None:
    """Penalties and weights that a smaller network makes are alike on all replicas, each in a graph of its own."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.maker, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(2, 12), nn.Linear(3, 4)
            self.kept: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.weight = self.maker(self.code).view(4, 3)
            self.penalty, self.kept["norms"] = self.weight.square().sum(), [p.norm() for p in self.layer.parameters()]
            return self.layer(x) + x @ self.weight.T

    net = Makes().double()
    plain = copy.deepcopy(net)
    model = wrap(net, engine=engine)
    for size in (7, 6):
        x = torch.randn(size, 3, dtype=torch.float64)
        for each, run in ((plain, plain), (net, model)):
            each.zero_grad()
            (run(x).sin().sum() + each.penalty + each.weight.sum() + sum(each.kept["norms"])).backward()
        torch.testing.assert_close(net.weight, plain.weight)
        torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_a_list_of_tensors_that_is_equal_on_all_replicas(wrap: Any) -> None:
    """torchvision's anchor generators assign one, moved to the device of the images."""

    class Anchors(nn.Linear):
        anchors: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            self.anchors = [torch.arange(3.0), torch.arange(6.0).view(2, 3)]
            return super().forward(x) + self.anchors[1].sum()

    net = Anchors(3, 2)
    wrap(net, engine="serial")(torch.randn(5, 3))
    assert [anchor.shape for anchor in net.anchors] == [(3,), (2, 3)]
