"""One script for one device, for the GPUs of one machine, and for many machines. It prints the same losses each time.

python train.py                       # one process
instep run train.py                   # one rank for each GPU; on a CPU: instep run --nproc 2 train.py
torchrun --nnodes 2 ... train.py      # several machines
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).double()
    model = instep.DataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    x = torch.randn(203, 8, dtype=torch.float64)
    data = TensorDataset(x, (x[:, :3] * x[:, 3:6]).argmax(1))
    loader = DataLoader(data, batch_size=32, shuffle=True)  # whole batches, no sampler: the wrapper splits them
    for epoch in range(3):
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y.to(out.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if instep.is_primary():
            print(f"epoch {epoch}: loss {loss.item():.8f}")
    if instep.is_primary():
        torch.save(model.state_dict(), "net.pt")


if __name__ == "__main__":
    main()
