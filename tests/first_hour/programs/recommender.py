"""Matrix factorization for ratings, with sparse gradients of the embeddings."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Factors(nn.Module):
    def __init__(self, users=12, items=15, size=6):
        super().__init__()
        self.user, self.item = nn.Embedding(users, size, sparse=True), nn.Embedding(items, size, sparse=True)
        self.user_bias, self.item_bias = nn.Embedding(users, 1, sparse=True), nn.Embedding(items, 1, sparse=True)

    def forward(self, user, item):
        score = (self.user(user) * self.item(item)).sum(1)
        return score + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


def run(wrap):
    torch.manual_seed(0)
    model = wrap(Factors())
    ratings = TensorDataset(torch.randint(0, 12, (45,)), torch.randint(0, 15, (45,)), 5 * torch.rand(45))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for user, item, rating in DataLoader(ratings, batch_size=16, shuffle=True):
        loss = nn.functional.mse_loss(model(user, item), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
