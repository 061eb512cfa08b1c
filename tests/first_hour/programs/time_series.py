"""Forecasting a time series: a Transformer encoder over windows `[batch, time, features]`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, size=16, window=12):
        super().__init__()
        self.enter = nn.Linear(2, size)
        self.register_buffer("position", torch.randn(1, window, size) * 0.1)
        layer = nn.TransformerEncoderLayer(size, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.head = nn.Linear(size, 1)

    def forward(self, window):
        mask = nn.Transformer.generate_square_subsequent_mask(window.size(1))
        x = self.encoder(self.enter(window) + self.position, mask=mask, is_causal=True)
        return self.head(x[:, -1]).squeeze()


def windows():
    t = torch.arange(34) * 0.3
    series = torch.stack([t.sin(), (2 * t).cos()], dim=1)
    inputs = torch.stack([series[i : i + 12] for i in range(21)])
    return TensorDataset(inputs, series[12:33, 0])


def run(wrap):
    torch.manual_seed(0)
    model = wrap(Forecaster())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for _ in range(2):
        for window, target in DataLoader(windows(), batch_size=8, shuffle=True):
            loss = nn.functional.mse_loss(model(window), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses
