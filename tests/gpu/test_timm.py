"""Networks of timm, whose batch normalization layers have forwards of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import instep

timm: Any = pytest.importorskip("timm", reason="needs timm, which needs torchvision")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "efficientnet_lite0", "vit_tiny_patch16_224"])
def test_training_equals_one_device(name: str, engine: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        size = {"img_size": 64} if name.startswith("vit") else {}
        model: nn.Module = timm.create_model(name, num_classes=4, drop_rate=0.0, **size)
        return model.double().cuda()

    plain, module = make(), make()
    with instep.DataParallel(module, [0, 0], engine=engine) as model:
        optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (plain, model)]
        for step, count in enumerate((6, 7, 4)):
            x = torch.randn(count, 3, 64, 64, dtype=torch.double, generator=torch.Generator().manual_seed(step)).cuda()
            outputs = [m(x) for m in (plain, model)]
            torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-7, atol=1e-7)
            for optimizer, output in zip(optimizers, outputs, strict=True):
                optimizer.zero_grad()
                output.square().mean().backward()
                optimizer.step()
        for (key, expected), actual in zip(plain.state_dict().items(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )
