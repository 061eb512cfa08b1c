"""REINFORCE on a batch of environments: actions are drawn from a `Categorical`, and episodes end one by one."""

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, observation):
        return Categorical(logits=self.net(observation))


class Walk:
    """A position on a line that should come to zero."""

    def __init__(self, count):
        self.position, self.steps = torch.linspace(-2, 2, count), 0

    def observe(self):
        position = self.position
        return torch.stack([position, position.abs(), torch.full_like(position, self.steps)], dim=1)

    def step(self, action):
        self.position = self.position + 0.5 * (2 * action - 1)
        self.steps += 1
        return -self.position.abs()


def run(wrap):
    torch.manual_seed(0)
    policy = wrap(Policy())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    losses = []
    for count in (8, 8, 5):
        walk, log_probs, rewards = Walk(count), [], []
        for _ in range(4):
            distribution = policy(walk.observe())
            action = distribution.sample()
            log_probs.append(distribution.log_prob(action))
            rewards.append(walk.step(action))
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / returns.std()
        loss = -(torch.stack(log_probs) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
