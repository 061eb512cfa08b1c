"""The caller's random state around a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


class RandomState:
    """The state of torch's generators when this was made, for a call with replicas on these devices."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = Counter(device for device in devices if device.type != "cpu")
        self._host, self._others = self._now()

    def _now(self) -> tuple[Tensor, dict[torch.device, Tensor]]:
        others = {device: torch.get_device_module(device).get_rng_state(device) for device in self._devices}
        return torch.get_rng_state(), others

    def moved(self) -> bool:
        """Whether numbers were drawn from a generator that several replicas share."""
        host, others = self._now()
        if not torch.equal(host, self._host):
            return True
        shared = [device for device, count in self._devices.items() if count > 1]
        return any(not torch.equal(others[device], self._others[device]) for device in shared)

    def restore(self) -> None:
        """Put every generator back."""
        torch.set_rng_state(self._host)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)
