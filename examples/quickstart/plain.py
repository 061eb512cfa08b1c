"""A classifier of names, trained on one device."""

import torch
from torch import nn

NAMES = ["anna", "bert", "carlotta", "dmitri", "eve", "fredericka", "gus", "hildegard", "ivo"]


class Net(nn.Module):
    """Classifies names as short or long, and returns the logits and the names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(27, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, batch: dict) -> dict:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(batch["ids"]), batch["lengths"], batch_first=True, enforce_sorted=False
        )
        _, hidden = self.rnn(packed)
        return {"logits": self.head(hidden[-1]), "names": batch["names"]}


def make_batch() -> dict:
    rows = [torch.tensor([ord(letter) - 96 for letter in name]) for name in NAMES]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"ids": ids, "lengths": torch.tensor([len(row) for row in rows]), "names": NAMES}


def main() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = make_batch()
    target = (batch["lengths"] > 4).long()
    for step in range(5):
        out = model(batch)
        assert out["names"] == NAMES
        loss = nn.functional.cross_entropy(out["logits"], target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
