"""Replicas on CUDA: several on one GPU, and a GPU and the CPU as two different devices."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import instep

from .models import Tagger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICES = {"one gpu twice": [0, 0], "one gpu four times": [0] * 4, "gpu and cpu": [0, "cpu"]}
LAYOUTS = [
    pytest.param(engine, private, devices, id=f"{engine}-{'private' if private else 'aliased'}-{name}")
    for engine in ("serial", "threads")
    for private in (False, True)
    for name, devices in DEVICES.items()
]


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).eval()


def assert_parity(
    net: nn.Module, args: Sequence[Tensor], engine: str, private: bool, devices: Sequence[int | str]
) -> None:
    plain = copy.deepcopy(net).cuda()
    place = {"lengths": "cpu"} if len(args) > 1 else {}
    with instep.DataParallel(net, devices, engine=engine, private_copies=private, place=place) as model:
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for _ in range(5):
            out, expected = model(*args), plain(*(a if a.dim() == 1 else a.cuda() for a in args))
            assert out.device == torch.device("cuda", 0)
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
            for optimizer, result in ((ours, out), (theirs, expected)):
                optimizer.zero_grad()
                result.pow(2).mean().backward()
                optimizer.step()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("engine", "private", "devices"), LAYOUTS)
def test_parity_of_a_conv_net(engine: str, private: bool, devices: Sequence[int | str]) -> None:
    assert_parity(conv_net().double(), [torch.randn(7, 3, 8, 8).double()], engine, private, devices)


@pytest.mark.parametrize(("engine", "private", "devices"), LAYOUTS)
def test_parity_of_packed_sequences(engine: str, private: bool, devices: Sequence[int | str]) -> None:
    ids, lengths = torch.randint(20, (7, 9)), torch.tensor([9, 3, 7, 1, 5, 9, 2])
    assert_parity(Tagger().double(), [ids, lengths], engine, private, devices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_autocast_reaches_every_replica(engine: str, dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    x = torch.randn(6, 8, device="cuda")
    with instep.DataParallel(net, [0, 0], engine=engine) as model, torch.autocast("cuda", dtype):
        out, expected = model(x), net(x)
        assert out.dtype is dtype
        torch.testing.assert_close(out, expected)
        with torch.no_grad():
            net[0].weight.mul_(2)
        torch.testing.assert_close(model(x), net(x))


def test_cpu_batches_are_moved_and_cpu_lengths_stay() -> None:
    net = Tagger().double().cuda()
    ids, lengths = torch.randint(20, (5, 9)), torch.tensor([9, 3, 7, 1, 5])
    with instep.DataParallel(net, [0, 0]) as model:
        out = model(ids.cuda(), lengths)  # another leaf is on the GPU, so the CPU leaf stays
        torch.testing.assert_close(out, net(ids.cuda(), lengths))
    pinned = torch.randn(5, 4).pin_memory()
    linear = nn.Linear(4, 2).cuda()
    with instep.DataParallel(linear, [0, 0]) as model:
        torch.testing.assert_close(model(pinned), linear(pinned.cuda()))


def test_checkpointing_and_input_gradients() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
            return torch.utils.checkpoint.checkpoint(self.layer, y, use_reentrant=False)

    net = Block().double().cuda()
    plain = copy.deepcopy(net)
    x = torch.randn(5, 4, dtype=torch.float64, device="cuda", requires_grad=True)
    z = x.detach().clone().requires_grad_()
    with instep.DataParallel(net, [0, 0]) as model:
        model(x * 2).pow(2).sum().backward()
        plain(z * 2).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


def test_the_default_devices_are_all_gpus() -> None:
    model = instep.DataParallel(nn.Linear(2, 2))
    assert len(model._instep_devices) == torch.cuda.device_count()
    assert model(torch.randn(4, 2)).device.type == "cuda"
    model.close()


def test_a_failed_call_restores_the_gpu_rng_state() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3, device=x.device)
            raise ZeroDivisionError

    with instep.DataParallel(Draws(), [0, 0]) as model:
        before = torch.cuda.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(4, 2))
        assert torch.equal(torch.cuda.get_rng_state(), before)


def test_outputs_go_to_the_output_device() -> None:
    net = nn.Linear(2, 2)
    with instep.DataParallel(net, [0, 0], output_device="cpu") as model:
        out = model(torch.randn(4, 2))
        assert out.device.type == "cpu"
        out.sum().backward()
        assert net.weight.grad.device.type == "cuda"


STREAMS: list[int] = []


def test_replicas_run_on_the_callers_stream() -> None:
    class RecordsStream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            STREAMS.append(torch.cuda.current_stream().cuda_stream)
            return self.layer(x)

    net = RecordsStream().cuda()
    stream = torch.cuda.Stream()
    with instep.DataParallel(net, [0, 0]) as model, torch.cuda.stream(stream):
        model(torch.randn(4, 2, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    assert len(STREAMS) >= 2
    assert set(STREAMS) == {stream.cuda_stream}


class StoresDevice(nn.Module):
    """Stores its device and an unregistered tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.device = nn.Linear(3, 2), torch.ones(2), torch.device("cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift + torch.ones(2, device=self.device)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_stored_devices_and_plain_tensors_are_moved_to_each_replica(engine: str) -> None:
    net = StoresDevice()
    plain, x = copy.deepcopy(net), torch.randn(7, 3)
    with instep.DataParallel(net, [0, "cpu"], engine=engine) as model:
        net.device = torch.device("cuda", 0)
        for _ in range(2):
            torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-5, atol=1e-5)
