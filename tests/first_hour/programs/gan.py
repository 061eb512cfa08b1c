"""A GAN: two networks, each with its own optimizer; the generator's images are detached for the discriminator."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh()
        )

    def forward(self, z):
        return self.net(z).view(-1, 1, 8, 8)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)
        )

    def forward(self, image):
        return self.net(image).squeeze(1)


def run(wrap):
    torch.manual_seed(0)
    generator, discriminator = wrap(Generator()), wrap(Discriminator())
    loader = DataLoader(TensorDataset(torch.rand(22, 1, 8, 8)), batch_size=6, shuffle=True)
    criterion = nn.BCEWithLogitsLoss()
    g_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for (real,) in loader:
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            fake = generator(torch.randn(len(real), 6))

            d_optimizer.zero_grad()
            d_loss = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
            d_loss.backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            g_loss = criterion(discriminator(fake), ones)
            g_loss.backward()
            g_optimizer.step()
            losses += [d_loss.item(), g_loss.item()]
    return losses
