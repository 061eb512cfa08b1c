"""Knowledge distillation: a small student learns the soft targets of a teacher in evaluation mode."""

import torch
from torch import nn
from torch.nn import functional as F


def network(width):
    return nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def run(wrap):
    torch.manual_seed(0)
    teacher, student = network(64), network(8)
    teacher(torch.randn(50, 10))  # moves its running statistics
    teacher, student = wrap(teacher.eval()), wrap(student)
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    temperature, losses = 2.0, []
    x, y = torch.randn(27, 10), torch.randint(0, 4, (27,))
    for inputs, target in zip(x.split(8), y.split(8), strict=True):
        with torch.no_grad():
            soft = F.softmax(teacher(inputs) / temperature, dim=1)
        logits = student(inputs)
        distance = F.kl_div(F.log_softmax(logits / temperature, dim=1), soft, reduction="batchmean") * temperature**2
        loss = 0.5 * distance + 0.5 * F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert not teacher.training
    return losses
