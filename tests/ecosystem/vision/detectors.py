"""Detectors of torchvision whose losses are divided by counts over the whole batch, as in `docs/packages.md`."""

from __future__ import annotations

from typing import Any

from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import instep


def over_whole_batch(losses, count):
    """Means over `count` entries of a shard, as means over the entries of all replicas."""
    total = max(instep.all_reduce(count), 1)
    return [instep.all_reduce(loss * max(count, 1)) / total for loss in losses]


class WholeBatchFCOSHead(FCOSHead):
    def compute_loss(self, targets, head_outputs, anchors, matched_idxs):
        losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        count = sum(int((matched >= 0).sum()) for matched in matched_idxs)
        return dict(zip(losses, over_whole_batch(losses.values(), count)))


class WholeBatchRPN(RegionProposalNetwork):
    def compute_loss(self, objectness, pred_bbox_deltas, labels, regression_targets):
        losses = super().compute_loss(objectness, pred_bbox_deltas, labels, regression_targets)
        size = self.fg_bg_sampler.batch_size_per_image
        positive = [min(int((label >= 1).sum()), int(size * self.fg_bg_sampler.positive_fraction)) for label in labels]
        negative = [min(int((label == 0).sum()), size - count) for label, count in zip(labels, positive)]
        return over_whole_batch(losses, sum(positive) + sum(negative))


class WholeBatchRoIHeads(RoIHeads):
    def forward(self, features, proposals, image_shapes, targets=None):
        if not self.training or self.has_mask() or self.has_keypoint():
            return super().forward(features, proposals, image_shapes, targets)
        proposals, _, labels, regression_targets = self.select_training_samples(proposals, targets)
        boxes = self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        losses = fastrcnn_loss(*self.box_predictor(boxes), labels, regression_targets)
        return [], dict(zip(("loss_classifier", "loss_box_reg"), over_whole_batch(losses, sum(map(len, labels)))))


class WholeBatchTransform(GeneralizedRCNNTransform):
    def max_by_axis(self, sizes):
        return instep.all_reduce(super().max_by_axis(sizes), "max")


def use_whole_batch(net: Any) -> Any:
    """Give the parts of a detector these classes. Their parameters and settings stay."""
    net.transform.__class__ = WholeBatchTransform
    if hasattr(net, "roi_heads"):
        net.rpn.__class__, net.roi_heads.__class__ = WholeBatchRPN, WholeBatchRoIHeads
    if isinstance(getattr(net, "head", None), FCOSHead):
        net.head.__class__ = WholeBatchFCOSHead
    return net
