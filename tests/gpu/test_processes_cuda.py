"""Replicas in worker processes on CUDA: several on one GPU, and on a GPU and the CPU.

With `private`, tensors are sent through host memory, as between two GPUs; otherwise by CUDA IPC.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep

from .models import FirstReplicaUsesGather, Pairs, Tagger, conv_net
from .sharing import each_transport, mlp, wrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("gpu_workers"),
]

DEVICES: dict[str, list[int | str]] = {
    "two": [0, 0],
    "four": [0] * 4,
    "gpu and cpu": [0, "cpu"],
    "cpu and gpu": ["cpu", 0],
}
LAYOUTS = [
    pytest.param(private, devices, id=f"{'private' if private else 'cuda-ipc'}-{name}")
    for private in (False, True)
    for name, devices in DEVICES.items()
]
each_layout = pytest.mark.parametrize(("private", "devices"), LAYOUTS)


def weighted_loss(out: Tensor) -> Tensor:
    """A loss that gives each entry of an output a different weight."""
    return (out.sin() * torch.linspace(0.5, 2, out.numel(), device=out.device).view_as(out)).sum()


def assert_same_training(
    build: Callable[[], nn.Module],
    batches: Callable[[], Sequence[Tensor]],
    private: bool,
    devices: Sequence[int | str],
    steps: int = 4,
    **options: Any,
) -> None:
    """Assert that outputs, gradients and state over a few steps equal those of the plain module on the GPU."""
    net = build().double()
    plain = copy.deepcopy(net).cuda()
    with wrap(net, devices, private, **options) as model:
        ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, plain))
        for _ in range(steps):
            args = batches()
            out, expected = model(*args), plain(*(a if a.dim() == 1 else a.cuda() for a in args))
            assert out.device == next(net.parameters()).device
            torch.testing.assert_close(out.cuda(), expected, rtol=1e-9, atol=1e-9)
            for optimizer, result in ((ours, out), (theirs, expected)):
                optimizer.zero_grad()
                weighted_loss(result).backward()
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.cuda(), other.grad, rtol=1e-8, atol=1e-8)
            ours.step()
            theirs.step()
        if not private and devices.count(0) > 1:
            assert "tensors are sent through CUDA IPC" in repr(model)
        state = {name: value.cuda() for name, value in net.state_dict().items()}
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-6, atol=1e-8)


@each_layout
def test_an_mlp(private: bool, devices: Sequence[int | str]) -> None:
    assert_same_training(mlp, lambda: [torch.randn(11, 6).double()], private, devices)


@each_layout
def test_a_conv_net_with_batch_normalization(private: bool, devices: Sequence[int | str]) -> None:
    assert_same_training(conv_net, lambda: [torch.randn(7, 3, 8, 8).double().cuda()], private, devices)


@each_layout
def test_packed_sequences(private: bool, devices: Sequence[int | str]) -> None:
    ids, lengths = torch.randint(20, (7, 9)), torch.tensor([9, 3, 7, 1, 5, 9, 2])
    assert_same_training(Tagger, lambda: [ids, lengths], private, devices, place={"lengths": "cpu"})


@each_layout
def test_all_gather_and_all_reduce(private: bool, devices: Sequence[int | str]) -> None:
    assert_same_training(Pairs, lambda: [torch.randn(9, 6).double()], private, devices, steps=2)


@pytest.mark.parametrize("width", [4, 4096])  # sent through host memory, and on the device if possible
@each_transport
def test_a_gathered_tensor_that_one_replica_uses(private: bool, width: int) -> None:
    net, x = FirstReplicaUsesGather(width).double(), torch.randn(9, 6).double()
    plain = copy.deepcopy(net.layer)
    with wrap(net, [0, 0, 0], private) as model:
        for _ in range(2):
            net.zero_grad()
            plain.zero_grad()
            y = plain(x).tanh()
            expected = torch.cat([y[:3] + y.mean(0), y[3:]])
            out = model(x)
            torch.testing.assert_close(out.cpu(), expected)
            weighted_loss(out).backward()
            weighted_loss(expected).backward()
            torch.testing.assert_close(net.layer.weight.grad.cpu(), plain.weight.grad)


@each_transport
def test_calls_on_a_stream_of_the_caller(private: bool) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_same_training(Pairs, lambda: [torch.randn(64, 6).double()], private, [0, 0, 0])
        assert_same_training(mlp, lambda: [torch.randn(64, 6).double().cuda()], private, [0, 0])
    torch.cuda.synchronize()


@each_transport
def test_input_gradients_with_outputs_on_another_device(private: bool) -> None:
    net = mlp().double()
    plain = copy.deepcopy(net)
    with wrap(net, [0, 0, "cpu"], private, output_device="cpu") as model:
        for place in ("cpu", "cuda"):
            x = torch.randn(8, 6, dtype=torch.float64, device=place, requires_grad=True)
            y = x.detach().cpu().requires_grad_()
            out, expected = model(x * 2), plain(y * 2)
            assert out.device.type == "cpu"
            torch.testing.assert_close(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
            assert x.grad.device == x.device
            torch.testing.assert_close(x.grad.cpu(), y.grad)


@each_transport
def test_autocast_reaches_workers(private: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    x = torch.randn(6, 8, device="cuda")
    with wrap(net, [0, 0], private) as model, torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            out, expected = model(x), net(x)
            assert out.dtype is torch.bfloat16
            torch.testing.assert_close(out, expected)
            with torch.no_grad():
                net[0].weight.mul_(2)
        out.float().sum().backward()
        assert net[0].weight.grad.dtype is torch.float32


def test_backend_flags_reach_workers() -> None:
    class ReadsFlags(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            flags = torch.backends.cudnn.benchmark, torch.backends.cuda.math_sdp_enabled()
            return x * 0 + torch.tensor([float(flag) for flag in flags], device=x.device)

    with wrap(ReadsFlags(), [0, 0]) as model, torch.backends.cudnn.flags(benchmark=True):
        assert (model(torch.zeros(4, 2, device="cuda")) == 1).all()
        torch.backends.cudnn.benchmark = False
        assert model(torch.zeros(4, 2, device="cuda")).tolist() == [[0, 1]] * 4


@each_transport
def test_with_loss(private: bool) -> None:
    net = mlp().double().cuda()
    plain = copy.deepcopy(net)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double().cuda()
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    with wrap(instep.with_loss(net, loss), [0, 0, 0], private) as model:
        for _ in range(2):
            x, y = torch.randn(7, 6).double(), torch.randint(4, (7,))
            value, expected = model(x, y), loss(plain(x.cuda()), y.cuda())
            torch.testing.assert_close(value, expected)
            value.backward()
            expected.backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@each_transport
def test_no_sync(private: bool) -> None:
    net = mlp().double()
    plain = copy.deepcopy(net).cuda()
    with wrap(net, [0, 0, 0], private) as model:
        with model.no_sync():
            for _ in range(3):
                x = torch.randn(7, 6).double()
                model(x).square().sum().backward()
                plain(x.cuda()).square().sum().backward()
            assert net[0].weight.grad is None
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


class Regions(nn.Module):
    """Checkpointed dropout on the device, scaled by a random factor from the CPU."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = checkpoint(self.region, x, use_reentrant=self.reentrant)
        return x

    def region(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.02) * self.scale * (torch.rand(()) + 0.5).item()


def states() -> list[Tensor]:
    return [torch.get_rng_state(), torch.cuda.get_rng_state(0)]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("devices", [[0, 0], [0, 0, 0], [0, "cpu"]], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_masks_are_reproducible_and_equal_those_of_threads(devices: list[int | str], reentrant: bool) -> None:
    net = Regions(reentrant).double().cuda()
    x = torch.ones(4 * len(devices), 50, dtype=torch.float64, device="cuda", requires_grad=True)
    runs = []
    for engine in ("processes", "threads"):
        with instep.DataParallel(net, devices, engine=engine) as model:
            for _ in range(3):
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


def test_a_transformer_with_dropout_draws_what_threads_draw() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    x = torch.randn(7, 5, 16, device="cuda")
    outs, grads = [], []
    for engine in ("threads", "processes", "processes"):
        with instep.DataParallel(net, [0] * 3, engine=engine) as model:
            torch.manual_seed(5)
            net.zero_grad()
            out = model(x)
            out.square().mean().backward()
            outs.append(out.detach())
            grads.append([p.grad.clone() for p in net.parameters()])
    assert torch.equal(outs[1], outs[2])
    torch.testing.assert_close(outs[0], outs[1])
    for one, other in zip(grads[0], grads[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class HasGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.rand(x.shape, generator=self.generator, device=x.device)


def test_a_cuda_generator_of_the_module() -> None:
    net = HasGenerator().cuda()
    x = torch.zeros(6, 4, device="cuda")
    with wrap(net, [0, 0, 0]) as model:
        runs = []
        for _ in range(2):
            net.generator.manual_seed(5)
            start = net.generator.get_state()
            runs.append(model(x))
            assert not torch.equal(net.generator.get_state(), start)
        assert torch.equal(*runs)
        assert len({tuple(row) for row in runs[0].tolist()}) == 6


class StoresDevice(nn.Module):
    """Stores its device and an unregistered tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.device = nn.Linear(3, 2), torch.ones(2), torch.device("cpu")

    def forward(self, x: Tensor) -> Tensor:
        self.last_device = x.device
        return self.layer(x) + self.shift + torch.ones(2, device=self.device)


def test_stored_devices_and_plain_tensors_are_moved_to_each_replica() -> None:
    net = StoresDevice()
    plain, x = copy.deepcopy(net), torch.randn(7, 3)
    with wrap(net, [0, "cpu"]) as model:
        net.device = torch.device("cuda", 0)
        for _ in range(2):
            torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-5, atol=1e-5)
        assert net.last_device == torch.device("cuda", 0)


def test_a_collective_in_a_checkpointed_region_raises() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: instep.all_reduce(self.layer(y).mean(0)) + y, x, use_reentrant=True)

    with wrap(Inside(), [0, 0]) as model, pytest.raises(instep.CollectiveError, match="checkpoint"):
        model(torch.randn(4, 4, device="cuda", requires_grad=True))
