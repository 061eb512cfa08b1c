"""A detector: a list of images and a list of dictionaries with boxes and labels; `forward` returns a dict of losses."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 3


class Detector(nn.Module):
    """Predicts a class and a box in every cell of a grid; a box belongs to the cell in which its center is."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.classes = nn.Conv2d(16, CLASSES + 1, 1)
        self.boxes = nn.Conv2d(16, 4, 1)

    def forward(self, images, targets=None):
        features = self.backbone(torch.stack(images))
        classes, boxes = self.classes(features), self.boxes(features)
        if self.training:
            return self.losses(classes, boxes, targets)
        results = []
        for scores, box in zip(classes.softmax(1)[:, 1:].flatten(2), boxes.flatten(2), strict=True):
            score, label = scores.max(0)
            kept = score > 0.3
            results.append({"boxes": box[:, kept].T, "scores": score[kept], "labels": label[kept]})
        return results

    def losses(self, classes, boxes, targets):
        wanted = torch.zeros_like(classes[:, 0], dtype=torch.long)
        box_losses = []
        for i, target in enumerate(targets):
            for box, label in zip(target["boxes"], target["labels"], strict=True):
                column, row = ((box[:2] + box[2:]) / 8).long().tolist()
                wanted[i, row, column] = label + 1
                box_losses.append(F.smooth_l1_loss(boxes[i, :, row, column], box))
        return {
            "classification": F.cross_entropy(classes, wanted),
            "box": torch.stack(box_losses).mean(),
        }


def sample(generator, count):
    corner = torch.randint(0, 8, (count, 2), generator=generator)
    size = torch.randint(2, 8, (count, 2), generator=generator)
    boxes = torch.cat([corner, corner + size], dim=1) * torch.ones(())
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.rand(3, 16, 16, generator=generator), {"boxes": boxes, "labels": labels}


def run(wrap):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    samples = [sample(generator, 1 + i % 4) for i in range(17)]
    model = wrap(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = []
    for start in range(0, len(samples), 6):
        images, targets = zip(*samples[start : start + 6], strict=True)
        losses = model(list(images), list(targets))
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history += [loss.item(), losses["box"].item()]
    model.eval()
    with torch.no_grad():
        results = model([image for image, _ in samples[:7]])
    return history + [len(result["boxes"]) for result in results]
