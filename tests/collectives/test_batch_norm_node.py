"""The autograd node of synchronized batch normalization: which gradients there are, and that engines agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep

from ..replica_helpers import ENGINE_MODES, assert_close, assert_same_gradients, replicated, weighted_loss

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)


def normal(*shape: int) -> Tensor:
    return 2 + 3 * torch.randn(*shape, dtype=torch.float64)


def convolutions() -> nn.Sequential:
    blocks = [(nn.Conv2d(3 if at == 0 else 6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)) for at in range(3)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Flatten(), nn.Linear(24, 2))


@pytest.mark.parametrize("channels_last", [False, True])
def test_engines_agree_bit_for_bit(channels_last: bool) -> None:
    """Gradients of parameters are left out: engines sum those of the replicas in different orders."""
    net, x = convolutions(), torch.randn(7, 3, 8, 8)
    if channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    results = []
    for way in ENGINE_MODES:
        with replicated(net, way) as (_, model):
            value = x.detach().requires_grad_()
            output = model(value)
            weighted_loss(output).backward()
            results.append({"output": output.detach(), "gradient": value.grad, **dict(model.named_buffers())})
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@each_way
def test_four_steps_in_float32(way: str) -> None:
    batches = [torch.randn(7, 3, 8, 8) for _ in range(4)]
    with replicated(convolutions(), way) as (plain, model):
        for module in (plain, model):
            optimizer = torch.optim.SGD(module.parameters(), 0.01)
            for x in batches:
                optimizer.zero_grad()
                weighted_loss(module(x)).backward()
                optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-5)


@each_way
@pytest.mark.parametrize("shape", [(64, 32, 6, 6), (8, 70, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "expanded gradient"])
def test_memory_formats_of_large_inputs(way: str, shape: tuple[int, ...], layout: str) -> None:
    x = normal(*shape)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    elif layout == "transposed":
        x = x.transpose(2, 3)
    module = nn.BatchNorm2d if x.ndim == 4 else nn.BatchNorm3d
    with replicated(module(shape[1]).double(), way) as (plain, model):
        inputs = [x.detach().requires_grad_() for _ in range(2)]
        outputs = [each(value) for each, value in zip((plain, model), inputs, strict=True)]
        for output in outputs:
            (output.sum() if layout == "expanded gradient" else weighted_loss(output)).backward()
        assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=1e-10, atol=1e-10
        )


class Heads(nn.Module):
    """Two outputs by two layers. The output of a third layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        self.norms[2](self.unused(x))
        return self.norms[0](h), self.norms[1](h.tanh())


@each_way
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_are_absent_where_they_are_on_one_device(way: str, used: tuple[int, ...]) -> None:
    x = normal(7, 4)
    with replicated(Heads().double(), way) as (plain, model):
        for each in (plain, model):
            outputs = each(x)
            torch.stack([weighted_loss(outputs[at]) for at in used]).sum().backward()
        assert_same_gradients(model, plain)
        assert model.unused.weight.grad is None


class Masked(nn.Module):
    """Adds the normalized input to the output of some samples only; of a shard of others, nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(x)
        normed = self.norm(h)
        return h + normed * mask[:, None] if mask.any() else h * 1.0


@each_way
@pytest.mark.parametrize("chosen", [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0] * 6])
def test_replicas_whose_outputs_do_not_depend_on_the_layer(way: str, chosen: list[int]) -> None:
    x, mask = normal(6, 4), torch.tensor(chosen, dtype=torch.float64)
    with replicated(Masked().double(), way, probe=False) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x, mask)).backward()
        assert_same_gradients(model, plain)


@each_way
def test_retained_and_freed_graphs(way: str) -> None:
    x = normal(7, 4)
    with replicated(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), way) as (plain, model):
        for each in (plain, model):
            loss = weighted_loss(each(x))
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        assert_same_gradients(model, plain)


@each_way
def test_frozen_layers_record_no_graph(way: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    net[:2].requires_grad_(False)
    seen: list[bool] = []
    x = normal(7, 4)
    with replicated(net, way, hooks="per_replica") as (plain, model):
        if way != "processes":
            model.module[1].register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)
        assert_close(model.state_dict(), plain.state_dict())
    assert not any(seen)
    assert bool(seen) == (way != "processes")


@each_way
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_partly_frozen_layers(way: str, frozen: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    for name in ("weight", "bias") if frozen == "both" else (frozen,):
        getattr(net[1], name).requires_grad_(False)
    x = normal(7, 4)
    with replicated(net, way) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)


class OneParameter(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.value, self.layer = name, nn.Parameter(torch.rand(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.layer(x), None, None, **{self.name: self.value}, training=True)


@each_way
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weight_or_bias_alone(way: str, name: str) -> None:
    x = normal(7, 4)
    with replicated(OneParameter(name).double(), way) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)


@each_way
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_parameters_of_another_dtype_get_gradients_of_their_own(way: str, dtypes: tuple[Any, Any]) -> None:
    x = normal(8, 4, 5).to(dtypes[0])
    net = nn.BatchNorm1d(4, track_running_stats=False).to(dtypes[1])
    reference = copy.deepcopy(net).double()
    with replicated(net, way) as (_, model):
        for each, value in ((reference, x.double()), (model, x)):
            output = each(value)
            (output.double() ** 3).sum().backward()
        assert output.dtype == dtypes[0]
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None
            assert mine.grad.dtype == dtypes[1]
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=0.05, atol=0.5)


@each_way
def test_inputs_written_after_the_layer_are_torchs_error(way: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            out = self.norm(h)
            h.mul_(2)
            return out

    with replicated(Writes().double(), way) as (plain, model):
        for each in (plain, model):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                weighted_loss(each(normal(7, 4))).backward()


class Penalty(nn.Module):
    """A gradient penalty inside forward."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), norm, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.head(self.norm(self.layer(x)).tanh())
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out[:, 0] + grad.square().sum(1)


@pytest.mark.parametrize("way", ["threads", "processes"])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), OneParameter("bias")], ids=["affine", "plain", "bias"]
)
def test_a_gradient_penalty_inside_forward(way: str, norm: nn.Module) -> None:
    x = normal(7, 4)
    with replicated(Penalty(copy.deepcopy(norm)).double(), way, probe=False) as (plain, model):
        for each in (plain, model):
            weighted_loss(each(x)).backward()
        assert_same_gradients(model, plain)
        assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("way", ["serial", "joint"])
def test_a_gradient_inside_forward_of_a_joint_graph_is_an_error(way: str) -> None:
    with (
        replicated(Penalty(nn.BatchNorm1d(4)).double(), way, probe=False) as (_, model),
        pytest.raises(instep.CollectiveError, match="a gradient was taken inside forward through batch normalization"),
    ):
        model(normal(7, 4))


def test_batched_and_double_backward_on_serial() -> None:
    x = normal(5, 4)
    with replicated(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), "serial", replicas=2) as (plain, model):
        jacobians = [torch.autograd.functional.jacobian(each, x, vectorize=True) for each in (plain, model)]
        assert_close(jacobians[1], jacobians[0])
        for each in (plain, model):
            value = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(weighted_loss(each(value)), value, create_graph=True)
            (grad.square().sum() + grad.sin().sum()).backward()
        assert_same_gradients(model, plain)


@each_way
def test_statistics_of_a_large_mean(way: str) -> None:
    x = 1e4 + torch.randn(4096, 4)
    with replicated(nn.BatchNorm1d(4), way) as (_, model):
        model(x)
        torch.testing.assert_close(model.running_var.double(), 0.9 + 0.1 * x.double().var(0), rtol=1e-4, atol=1e-6)
