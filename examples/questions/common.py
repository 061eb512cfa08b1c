"""Helpers of the examples: the devices to use, and the comparison with plain torch."""

import torch

# Every GPU where there are several; two replicas on the CPU otherwise.
DEVICES = None if torch.cuda.device_count() > 1 else ["cpu"] * 2


def compare(what: str, plain: torch.Tensor, parallel: torch.Tensor) -> None:
    """Assert that both tensors are equal up to rounding, and print it."""
    assert plain.shape == parallel.shape, f"{what}: {tuple(plain.shape)} and {tuple(parallel.shape)}"
    difference = (plain - parallel.to(plain.device)).abs().max().item()
    assert difference < 1e-4, f"{what}: they differ by {difference}"
    print(f"{what}: the same, {tuple(plain.shape)}")


def compare_weights(plain: torch.nn.Module, parallel: torch.nn.Module) -> None:
    """Compare all parameters of two modules."""
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in parallel.parameters()])
    compare("weights", torch.cat([parameter.detach().flatten() for parameter in plain.parameters()]), weights)
