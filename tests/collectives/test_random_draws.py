"""Random draws of replicas that use collectives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import instep


class Noisy(nn.Module):
    """Dropout before and after batch normalisation, which exchanges statistics between replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.BatchNorm1d(32)
        )
        self.last = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.last(torch.ones(len(x), 64))


def draw(engine: str, replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    net, x = copy.deepcopy(Noisy()), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * replicas, engine=engine) as model:
        torch.manual_seed(7)
        for _ in range(2):
            out, mask = model(x)
        return out.detach(), mask.detach(), torch.get_rng_state()


def test_engines_draw_the_same() -> None:
    serial, threads, again = draw("serial", 2), draw("threads", 2), draw("threads", 2)
    for one, other, third in zip(serial, threads, again, strict=True):
        torch.testing.assert_close(one, other)
        assert torch.equal(other, third)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_replicas_draw_different_masks_and_the_callers_generator_advances_once(engine: str) -> None:
    states = []
    for replicas in (2, 3):
        _, mask, state = draw(engine, replicas)
        first, second = mask[:2], mask[6 // replicas :][:2]
        assert not torch.equal(first, second)
        states.append(state)
    assert torch.equal(*states)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_failed_call_leaves_the_generator_alone(engine: str) -> None:
    class Fails(Noisy):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            super().forward(x)
            raise ZeroDivisionError

    with instep.DataParallel(Fails(), ["cpu"] * 2, engine=engine) as model:
        before = torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(5, 4))
            assert torch.equal(torch.get_rng_state(), before)
