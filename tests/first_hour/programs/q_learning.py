"""Deep Q-learning from a replay memory: a policy network, a target network, and the best next action."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, state):
        return self.layers(state)


def run(wrap):
    torch.manual_seed(0)
    random.seed(0)
    network = QNetwork()
    policy, target = wrap(network), wrap(copy.deepcopy(network))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    memory = [(torch.randn(4), i % 3, torch.rand(()), torch.randn(4)) for i in range(40)]
    losses = []
    for step, count in enumerate((10, 10, 7, 10)):
        states, actions, rewards, following = zip(*random.sample(memory, count), strict=True)
        values = policy(torch.stack(states)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = torch.stack(rewards) + 0.9 * target(torch.stack(following)).max(1).values
        loss = F.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 2:
            target.load_state_dict(policy.state_dict())
        losses.append(loss.item())
    return losses
