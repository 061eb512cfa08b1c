"""The CUDA kernels of synchronized batch normalization."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.collectives.batch_norm import normalize
from instep.collectives.batch_norm_kernels import RunningStatistics
from instep.collectives.group import ReplicaContext, ReplicaInfo, use_context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
each_engine = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])


def weighted(output: Tensor) -> Tensor:
    return (output.float().sin() * torch.linspace(0.5, 2, output.numel(), device="cuda").view_as(output)).sum()


def compare(
    net: nn.Module,
    batches: list[Tensor],
    engine: str,
    replicas: int = 3,
    tolerance: float = 1e-4,
    autocast: bool = False,
) -> list[Tensor]:
    """Outputs, gradients of inputs and parameters, and state, over some steps. Returns the last outputs."""
    net = net.cuda()
    plain = copy.deepcopy(net)
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    outputs: list[Tensor] = []
    with instep.DataParallel(net, [0] * 3, engine=engine) as model:
        for x in batches:
            inputs = [x.detach().requires_grad_() for _ in range(2)]
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                outputs = [each(value) for each, value in zip((plain, model), inputs, strict=True)]
            for output in outputs:
                weighted(output).backward()
            assert outputs[1].dtype == outputs[0].dtype
            torch.testing.assert_close(outputs[1], outputs[0], **close)
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **close)
            grads = [[p.grad for p in each.parameters()] for each in (plain, model)]
            torch.testing.assert_close(grads[1], grads[0], rtol=10 * tolerance, atol=10 * tolerance)
            torch.testing.assert_close(model.state_dict(), plain.state_dict(), **close)
    return outputs


def images(dtype: torch.dtype = torch.float32, channels_last: bool = False, steps: int = 3) -> list[Tensor]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return [(1 + 2 * torch.randn(7, 16, 6, 6, device="cuda")).to(dtype, memory_format=layout) for _ in range(steps)]


@each_engine
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_dtypes_and_memory_formats(engine: str, channels_last: bool, dtype: torch.dtype, weights: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 0.05)
    outputs = compare(nn.BatchNorm2d(16).to(weights), images(dtype, channels_last), engine, tolerance=tolerance)
    kept = channels_last and engine != "processes"  # tensors are sent between processes in the contiguous format
    assert outputs[1].is_contiguous(memory_format=torch.channels_last if kept else torch.contiguous_format)


@each_engine
@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.5, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_options(engine: str, options: dict[str, Any]) -> None:
    compare(nn.BatchNorm2d(16, **options), images(), engine)
    compare(nn.BatchNorm2d(16, **options), images(torch.bfloat16), engine, tolerance=0.05)


@each_engine
@pytest.mark.parametrize("shape", [(7, 16), (7, 16, 5), (5, 16, 3, 2, 4), (3, 16)], ids=str)
def test_shapes(engine: str, shape: tuple[int, ...]) -> None:
    make = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 5: nn.BatchNorm3d}[len(shape)]
    compare(make(16).double(), [torch.randn(*shape, dtype=torch.float64, device="cuda")], engine, tolerance=1e-9)


@each_engine
def test_transposed_inputs(engine: str) -> None:
    compare(nn.BatchNorm2d(16), [x.transpose(2, 3)[..., ::2] for x in images()], engine)


@each_engine
def test_autocast(engine: str) -> None:
    net = nn.Sequential(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    compare(net, images(), engine, tolerance=0.05, autocast=True)


class Routed(nn.Module):
    """Normalizes some of the samples."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels).double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros_like(x).index_put((mask,), self.norm(x[mask]))


@each_engine
@pytest.mark.parametrize("chosen", [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]])
def test_replicas_without_samples(engine: str, chosen: list[int]) -> None:
    x, mask = torch.randn(6, 4, dtype=torch.float64, device="cuda"), torch.tensor(chosen, device="cuda").bool()
    net = Routed(4).cuda()
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, [0] * 3, engine=engine) as model:
        inputs = [x.detach().requires_grad_() for _ in range(2)]
        for each, value in zip((plain, model), inputs, strict=True):
            weighted(each(value, mask)).backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)
        one = torch.tensor([0, 0, 0, 1, 0, 0], device="cuda").bool()
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model(x, one)


class Penalty(nn.Module):
    """A gradient penalty inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.norm(self.layer(x)).tanh()
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out[:, 0] + grad.square().sum(1)


def test_a_gradient_penalty_inside_forward() -> None:
    net = Penalty().double().cuda()
    plain, x = copy.deepcopy(net), torch.randn(7, 4, dtype=torch.float64, device="cuda")
    with instep.DataParallel(net, [0, 0], engine="processes", probe=False) as model:
        for each in (plain, model):
            weighted(each(x)).backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-6)


class MirroredGroup:
    """A group of two replicas with the same input, of which one runs."""

    def __init__(self, joint_graph: bool) -> None:
        self.joint_graph = joint_graph

    def enter(self, index: int) -> None: ...

    def leave(self, index: int, error: BaseException | None = None) -> None: ...

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        return [payload, payload]

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:
        return torch.stack([row, row])

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None: ...


@contextmanager
def raise_on_synchronization() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_does_not_wait_for_the_device(joint: bool, momentum: float | None, dtype: torch.dtype) -> None:
    context = ReplicaContext(MirroredGroup(joint), ReplicaInfo(0, 2, torch.device("cuda", 0)))
    layer = nn.BatchNorm2d(16).cuda()
    tracked = torch.ones((), dtype=torch.long, device="cuda")
    x = images(dtype)[0].requires_grad_()
    gradient = torch.randn_like(x)
    for _ in range(3):
        factor = 1.0 / tracked if momentum is None else momentum
        with raise_on_synchronization(), use_context(context):
            running = RunningStatistics(context, layer.running_mean, layer.running_var, factor)
            context.forward_done = False
            output = normalize(context, x, layer.weight, layer.bias, layer.eps, running)
            context.forward_done = True
            output.backward(gradient)
    assert x.grad is not None
    expected = nn.BatchNorm2d(16).cuda()
    both = expected(torch.cat([x, x]))
    torch.testing.assert_close(output, both[: len(x)], rtol=0.02, atol=0.02)
