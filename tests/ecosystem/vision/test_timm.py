"""Networks of timm train as on one device: attention, and batch normalization with a forward of its own."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import instep

ENGINES = ["threads", pytest.param("processes", marks=pytest.mark.slow)]
NETWORKS = ["mobilenetv3_small_050", "vit_tiny_patch16_224", pytest.param("convnext_atto", marks=pytest.mark.slow)]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 64} if name.startswith("vit") else {}
    model: nn.Module = timm.create_model(name, num_classes=4, drop_rate=0.0, **size)
    return model.double()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NETWORKS)
def test_training_equals_one_device(name: str, engine: str) -> None:
    plain, module = make(name), make(name)
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
        optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (plain, model)]
        for step, count in enumerate((6, 7, 4)):
            x = torch.randn(count, 3, 64, 64, dtype=torch.double, generator=torch.Generator().manual_seed(step))
            outputs = [m(x) for m in (plain, model)]
            tolerance = 1e-10 if step == 0 else 1e-8  # batch norm of few values enlarges rounding errors
            torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
            for optimizer, output in zip(optimizers, outputs, strict=True):
                optimizer.zero_grad()
                output.square().mean().backward()
            for (key, expected), actual in zip(plain.named_parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(
                    actual.grad, expected.grad, rtol=1e-7, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}"
                )
            for optimizer in optimizers:
                optimizer.step()
        for (key, expected), actual in zip(plain.state_dict().items(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-8, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_timm_has_batch_norm_with_a_forward_of_its_own() -> None:
    layers = [layer for layer in make("mobilenetv3_small_050").modules() if isinstance(layer, nn.BatchNorm2d)]
    assert any(type(layer).forward is not nn.BatchNorm2d.forward for layer in layers)
