"""Random number streams of replicas on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS = [
    pytest.param(engine, devices, id=f"{engine}-{devices}")
    for engine in ("serial", "threads")
    for devices in ([0, 0], [0, 0, 0], [0, "cpu"])
]


class Regions(nn.Module):
    """Checkpointed dropout on the device, scaled by a random factor from the CPU."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        drop = functools.partial(F.dropout, p=0.02)
        for _ in range(20):
            x = checkpoint(
                lambda y: drop(y) * self.scale * (torch.rand(()) + 0.5).item(), x, use_reentrant=self.reentrant
            )
        return x


def states() -> list[Tensor]:
    return [torch.get_rng_state(), torch.cuda.get_rng_state(0)]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:forward draws on the CPU:UserWarning")  # read below
@pytest.mark.filterwarnings("ignore:calls run on one device because forward draws:UserWarning")  # see the next test
@pytest.mark.parametrize(("engine", "devices"), LAYOUTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_masks_are_reproducible_and_recomputed(engine: str, devices: list[int | str], reentrant: bool) -> None:
    net = Regions(reentrant).double().cuda()
    size = 4 * len(devices)
    x = torch.ones(size, 50, dtype=torch.float64, device="cuda", requires_grad=True)
    with instep.DataParallel(net, devices, engine=engine) as model:
        runs = []
        for _ in range(4):
            torch.manual_seed(3)
            x.grad = None
            out = model(x)
            after = states()
            out.sum().backward()
            torch.testing.assert_close(x.grad, out.detach())
            assert equal(states(), after)
            runs.append((out.detach(), after))
        assert all(torch.equal(out, runs[0][0]) and equal(after, runs[0][1]) for out, after in runs)
        parts = (runs[0][0] != 0).cpu().split(4)
        assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
        torch.manual_seed(3)
        assert not equal(runs[0][1], states())


def test_cpu_random_numbers_in_a_checkpoint_run_on_one_device() -> None:
    """One backward over a GPU and the CPU would set the CPU generator on two threads at once."""
    net = Regions(False).double().cuda()
    x = torch.ones(8, 50, dtype=torch.float64, device="cuda")
    torch.manual_seed(3)
    plain = net(x)
    after = states()
    with instep.DataParallel(net, [0, "cpu"], engine="serial") as model:
        torch.manual_seed(3)
        with pytest.warns(UserWarning, match="forward draws random numbers on the CPU in a checkpointed region"):
            out = model(x)
        assert torch.equal(out, plain)
        assert equal(states(), after)


def test_the_callers_rng_advances_equally_for_any_replica_count() -> None:
    net = nn.Dropout().cuda()
    x = torch.ones(12, 20, device="cuda")
    seen = []
    for engine in ("serial", "threads"):
        for count in (2, 3, 4):
            with instep.DataParallel(net, [0] * count, engine=engine) as model:
                for _ in range(2):
                    torch.manual_seed(1)
                    model(x)
                    seen.append(states())
                net.eval()
                before = states()
                model(x)
                assert equal(states(), before)
                net.train()
    assert all(equal(state, seen[0]) for state in seen)


class HasGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.rand(x.shape, generator=self.generator, device=x.device)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_cuda_generator_of_the_module(engine: str) -> None:
    net = HasGenerator().cuda()
    x = torch.zeros(6, 4, device="cuda")
    with instep.DataParallel(net, [0, 0, 0], engine=engine) as model:
        runs = []
        for _ in range(2):
            net.generator.manual_seed(5)
            start = net.generator.get_state()
            runs.append(model(x))
            assert not torch.equal(net.generator.get_state(), start)
        assert torch.equal(*runs)
        assert len({tuple(row) for row in runs[0].tolist()}) == 6
