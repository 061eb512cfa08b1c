"""Detectors of torchvision: lists of images and of target dictionaries in, a dictionary of losses out."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou, nms, roi_align

import instep

from . import detectors
from .detectors import use_whole_batch

ENGINES = ["threads", pytest.param("processes", marks=pytest.mark.slow)]
SIZE = {"min_size": 64, "max_size": 64}
EVERYTHING = 4096
"""A number of proposals to sample for each image that is larger than any: the draws of the sampler do not matter."""
TOLERANCES = {"RetinaNet": 1e-10, "FCOS": 1e-10, "FasterRCNN": 1e-6}  # torchvision has one loss of the last in float32
OPTIONS = {"in_dims": {"images": "samples"}, "state": {"*.cell_anchors": "first"}}
"""What the probe does not find out in a module with collectives."""
MEANS = {"RetinaNet": {"merge": {"classification": "mean", "bbox_regression": "mean"}}}

roi_align(torch.zeros(1, 1, 4, 4), torch.zeros(1, 5), 1)  # its Python operator replaces itself at the first call


class Backbone(nn.Module):
    """Two convolutions: one level of features for each 8 pixels."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 4, 1), nn.Conv2d(32, 32, 3, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"0": self.second(self.first(x).tanh()).tanh()}


def make(name: str) -> Any:
    torch.manual_seed(0)
    if name == "FCOS":
        return detection.FCOS(
            Backbone(), 5, anchor_generator=AnchorGenerator(((16,),), ((1.0,),)), score_thresh=0.0, **SIZE
        ).double()
    anchors = AnchorGenerator(((16, 32),), ((1.0,),))
    if name == "RetinaNet":
        return detection.RetinaNet(Backbone(), 5, anchor_generator=anchors, score_thresh=0.0, **SIZE).double()
    return detection.FasterRCNN(
        Backbone(),
        5,
        rpn_anchor_generator=anchors,
        rpn_pre_nms_top_n_train=60,
        rpn_post_nms_top_n_train=20,
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_test=20,
        rpn_batch_size_per_image=EVERYTHING,
        box_batch_size_per_image=EVERYTHING,
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
        box_score_thresh=0.0,
        **SIZE,
    ).double()


def batch(count: int, seed: int = 0, *, one_size: bool = True) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images with one to three boxes each. Only the first one is wide, unless they are of one size."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = [], []
    for i in range(count):
        width = 64 if one_size or i == 0 else 32
        images.append(torch.rand(3, 64, width, generator=generator, dtype=torch.double))
        corners = torch.rand(1 + i % 3, 2, generator=generator, dtype=torch.double) * 10
        sizes = 10 + torch.rand(1 + i % 3, 2, generator=generator, dtype=torch.double) * 12
        labels = torch.randint(1, 5, (1 + i % 3,), generator=generator)
        targets.append({"boxes": torch.cat([corners, corners + sizes], 1), "labels": labels})
    return images, targets


def assert_trains_as_plain(name: str, module: Any, engine: str, *, one_size: bool, **options: Any) -> None:
    plain, tolerance = make(name), TOLERANCES[name]
    close = {"rtol": tolerance, "atol": tolerance / 10}
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine, **options) as model:
        optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (plain, model)]
        for step, count in enumerate((4, 5, 3)):
            losses = [m(*batch(count, step, one_size=one_size)) for m in (plain, model)]
            assert losses[1].keys() == losses[0].keys()
            for key, expected in losses[0].items():
                torch.testing.assert_close(losses[1][key], expected, **close)
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                sum(loss.values()).backward()
            assert any(parameter.grad.abs().max() > 1e-3 for parameter in plain.parameters())
            for (key, expected), actual in zip(plain.named_parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(
                    actual.grad, expected.grad, **close, msg=lambda text, key=key: f"{key}: {text}"
                )
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("engine", ENGINES)
def test_retinanet_trains_as_it_is(engine: str) -> None:
    assert_trains_as_plain("RetinaNet", make("RetinaNet"), engine, one_size=True)


@pytest.mark.parametrize("one_size", [True, False], ids=["one size", "sizes"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TOLERANCES)
def test_losses_over_the_whole_batch(name: str, engine: str, one_size: bool) -> None:
    options: dict[str, Any] = {**OPTIONS, **MEANS.get(name, {})}
    assert_trains_as_plain(name, use_whole_batch(make(name)), engine, one_size=one_size, **options)


@pytest.mark.parametrize(
    ("name", "one_size"), [("FCOS", True), ("FasterRCNN", True), ("RetinaNet", False)], ids=lambda value: str(value)
)
def test_losses_over_a_shard_are_refused(name: str, one_size: bool) -> None:
    """Divided by a number of boxes or anchors that only forward knows, or of images that are padded to the largest."""
    module = make(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with (
        instep.DataParallel(module, ["cpu"] * 2, engine="threads") as model,
        pytest.raises(instep.MergeError, match="all_reduce"),
    ):
        model(*batch(6, one_size=one_size))
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", TOLERANCES)
def test_detections_are_those_of_one_device(name: str) -> None:
    module: nn.Module = use_whole_batch(make(name)).eval()
    images, _ = batch(5, one_size=False)
    with torch.no_grad(), instep.DataParallel(module, ["cpu"] * 2, engine="threads", **OPTIONS) as model:
        expected, actual = make(name).eval()(images), model(images)
    assert len(actual) == len(expected) == 5
    assert all(len(wanted["boxes"]) for wanted in expected)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_the_documentation_shows_these_classes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "packages.md").read_text("utf-8")
    names = [name for name, value in vars(detectors).items() if getattr(value, "__module__", "") == detectors.__name__]
    assert len(names) == 6
    for name in names:
        assert name == "use_whole_batch" or inspect.getsource(getattr(detectors, name)) in page, name


def test_non_maximum_suppression() -> None:
    boxes = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)) * 20
    boxes = torch.cat([boxes, boxes + 10], 1)
    scores = torch.rand(60, generator=torch.Generator().manual_seed(1))
    kept = nms(boxes, scores, 0.3)
    assert scores[kept].tolist() == sorted(scores[kept].tolist(), reverse=True)
    overlap = box_iou(boxes, boxes[kept])
    assert (overlap[kept].fill_diagonal_(0) <= 0.3).all()
    dropped = [i for i in range(60) if i not in kept]
    assert dropped
    for i in dropped:
        assert (overlap[i][scores[kept] > scores[i]] > 0.3).any()
    assert nms(boxes[:0], scores[:0], 0.3).shape == (0,)
