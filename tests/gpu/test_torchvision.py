"""Detection models of torchvision: lists of images and of target dictionaries in, a dictionary of losses out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

detection: Any = pytest.importorskip("torchvision.models.detection", reason="needs torchvision")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EVERYTHING = {"rpn_batch_size_per_image": 1 << 20, "box_batch_size_per_image": 1 << 20, "rpn_post_nms_top_n_train": 50}
"""Options of Faster R-CNN: every anchor and proposal is sampled, so that the draws of the samplers do not matter."""
SIZE = {"min_size": 96, "max_size": 96, "weights": None, "weights_backbone": None, "num_classes": 5}


def make(name: str, **options: Any) -> Any:
    """A network in float64 with frozen batch norm, as torchvision trains them: rounding errors do not grow."""
    torch.manual_seed(0)
    net = getattr(detection, name)(**SIZE, **options).double().cuda()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return net


def batch(count: int, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of one size, with one to three boxes each."""
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, 96, 96, generator=generator, dtype=torch.double) for _ in range(count)]
    targets = []
    for i in range(count):
        corners = torch.rand(1 + i % 3, 2, generator=generator, dtype=torch.double) * 40
        sizes = 20 + torch.rand(1 + i % 3, 2, generator=generator, dtype=torch.double) * 30
        labels = torch.randint(1, 5, (1 + i % 3,), generator=generator)
        targets.append({"boxes": torch.cat([corners, corners + sizes], 1), "labels": labels})
    return images, targets


def to_cuda(images: list[Tensor], targets: list[dict[str, Tensor]]) -> tuple[Any, Any]:
    return [image.cuda() for image in images], [{k: v.cuda() for k, v in target.items()} for target in targets]


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_retinanet_trains_as_on_one_device(engine: str) -> None:
    plain, module = make("retinanet_resnet50_fpn"), make("retinanet_resnet50_fpn")
    with instep.DataParallel(module, [0, 0], engine=engine) as model:
        optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (plain, model)]
        for step, count in enumerate((4, 5, 3)):
            losses = [m(*to_cuda(*batch(count, step))) for m in (plain, model)]
            assert losses[1].keys() == losses[0].keys() == {"classification", "bbox_regression"}
            for name, expected in losses[0].items():
                torch.testing.assert_close(losses[1][name], expected, rtol=1e-7, atol=1e-9)
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                sum(loss.values()).backward()
                optimizer.step()
        for (name, expected), actual in zip(plain.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("name", ["fcos_resnet50_fpn", "fasterrcnn_resnet50_fpn"])
def test_losses_over_the_whole_batch(name: str, engine: str) -> None:
    """With the classes of `docs/packages.md`. torchvision computes one loss of Faster R-CNN in float32."""
    from ..ecosystem.vision.detectors import use_whole_batch

    options = EVERYTHING if name.startswith("faster") else {}
    tolerance = 1e-5 if options else 1e-7
    plain, module = make(name, **options), use_whole_batch(make(name, **options))
    rules = {"in_dims": {"images": "samples"}, "state": {"*.cell_anchors": "first"}}
    with instep.DataParallel(module, [0, 0], engine=engine, **rules) as model:
        for step, count in enumerate((4, 5, 3)):
            losses = [m(*to_cuda(*batch(count, step))) for m in (plain, model)]
            assert losses[1].keys() == losses[0].keys()
            for key, expected in losses[0].items():
                torch.testing.assert_close(losses[1][key], expected, rtol=tolerance, atol=tolerance)
            for m, loss in zip((plain, model), losses, strict=True):
                m.zero_grad()
                sum(loss.values()).backward()
            for (key, expected), actual in zip(plain.named_parameters(), module.parameters(), strict=True):
                if expected.grad is None:
                    assert actual.grad is None, key
                else:
                    difference = (actual.grad - expected.grad).norm() / (expected.grad.norm() + 1e-6)
                    assert difference < tolerance, (key, float(difference))


@pytest.mark.parametrize("name", ["fcos_resnet50_fpn", "fasterrcnn_resnet50_fpn"])
def test_losses_over_counts_of_the_whole_batch_are_refused(name: str) -> None:
    """These divide by a number of boxes or anchors that only forward knows, and that is the whole batch's."""
    module = make(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with instep.DataParallel(module, [0, 0], engine="threads") as model:
        with pytest.raises(instep.MergeError) as raised:
            model(*to_cuda(*batch(6)))
        print(raised.value)
        assert "instep.with_loss" in str(raised.value) or "all_reduce" in str(raised.value)
        for key, value in module.state_dict().items():
            assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "fcos_resnet50_fpn", "fasterrcnn_resnet50_fpn"])
def test_detections_are_those_of_one_device(name: str) -> None:
    module: nn.Module = make(name).eval()
    images, _ = to_cuda(*batch(5))
    with torch.no_grad(), instep.DataParallel(module, [0, 0], engine="threads") as model:
        expected, actual = module(images), model(images)
    assert len(actual) == len(expected) == 5
    for found, wanted in zip(actual, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert len(found["boxes"]) == len(wanted["boxes"])
        torch.testing.assert_close(found["scores"], wanted["scores"], rtol=1e-7, atol=1e-9)
