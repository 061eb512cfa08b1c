"""The same classifier on all GPUs, or on two CPU replicas without GPUs. Two lines differ from plain.py."""

import torch
from plain import NAMES, Net, make_batch
from torch import nn

import instep


def main() -> None:
    torch.manual_seed(0)
    devices = None if torch.cuda.device_count() > 1 else ["cpu"] * 2
    model = instep.DataParallel(Net(), devices, place={"batch.lengths": "cpu"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = make_batch()
    target = (batch["lengths"] > 4).long()
    for step in range(5):
        out = model(batch)
        assert out["names"] == NAMES
        loss = nn.functional.cross_entropy(out["logits"], target.to(out["logits"].device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
