"""Operators of torchvision in Python, where compiled ones cannot be loaded: those for CUDA beside a torch for the CPU.

`make` copies this file beside torchvision, whose `extension` then imports it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision import extension

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The boxes that overlap with no kept box of a higher score."""
    left = scores.argsort(descending=True, stable=True)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        corners = torch.maximum(boxes[left, :2], boxes[best, :2]), torch.minimum(boxes[left, 2:], boxes[best, 2:])
        common = (corners[1] - corners[0]).clamp(min=0).prod(1)
        left = left[common / (areas[left] + areas[best] - common) <= iou_threshold]
    return torch.stack(kept) if kept else left


if not extension._has_ops():
    _OPERATORS.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    _OPERATORS.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")  # is only declared
    _OPERATORS.impl("nms", nms, "CPU")
    extension._assert_has_ops = lambda: None
