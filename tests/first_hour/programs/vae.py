"""A variational autoencoder: the noise is drawn in `forward`, the loss is computed outside of it."""

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mu, self.logvar = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def forward(self, x):
        hidden = self.encoder(x.flatten(1))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        reconstruction = self.decoder(self.reparameterize(mu, logvar))
        return reconstruction.view_as(x), mu, logvar


def loss_function(reconstruction, x, mu, logvar):
    error = F.binary_cross_entropy_with_logits(reconstruction, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (error + kl) / len(x)


def run(wrap):
    torch.manual_seed(0)
    model = wrap(VAE())
    images = (torch.rand(46, 1, 8, 8) > 0.8) * torch.ones(())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        for x in images.split(16):
            optimizer.zero_grad()
            reconstruction, mu, logvar = model(x)
            loss = loss_function(reconstruction, x, mu, logvar)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
