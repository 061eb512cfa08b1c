"""A list of [C, H, W] images, which nn.DataParallel splits along C."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import StructureError

from .common import on_each_engine, torch_scatter


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.colour = nn.Conv2d(3, 1, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> list[Tensor]:
        assert all(image.shape[0] == 3 for image in images)
        return [self.colour(i[None])[0, 0] + t["box"].sum() for i, t in zip(images, targets, strict=True)]


def detection(count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images = [torch.randn(3, 4 + index, 5) for index in range(count)]
    return images, [{"box": torch.randn(index, 4)} for index in range(count)]


def test_torch_splits_every_image_along_its_channels() -> None:
    images, _ = detection(4)
    for (shard,), channels in zip(torch_scatter(images, devices=2), (2, 1), strict=True):
        assert [len(image) for image in shard] == [channels] * 4


@on_each_engine
def test_a_list_of_images_is_split_by_image(engine: str) -> None:
    batch, net = detection(4), Sizes()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for mine, plain in zip(model(*batch), net(*batch), strict=True):
            torch.testing.assert_close(mine, plain)


@on_each_engine
def test_as_many_images_as_channels(engine: str) -> None:
    """Both readings fit the sizes. The probe tries them; without it, one has to be written."""
    batch, net = detection(3), Sizes()
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False) as model,
        pytest.raises(StructureError, match="what 'images' is: 'samples' if"),
    ):
        model(*batch)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for mine, plain in zip(model(*batch), net(*batch), strict=True):
            torch.testing.assert_close(mine, plain)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, in_dims={"images": "samples"}) as model:
        for mine, plain in zip(model(*batch), net(*batch), strict=True):
            torch.testing.assert_close(mine, plain)
