"""The object in this process for a replica that runs in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from instep.replicas.replica import Replica, TensorPair
from instep.replicas.tensors import ReplicaTensors, leaf_like
from instep.runtime.modes import set_inference_mode


class SourceViews(ReplicaTensors):
    """The tensors of a remote replica: views of the source's memory, until its process reports writes."""

    def copy(self, source: Tensor) -> Tensor:
        with set_inference_mode(False), torch.no_grad():
            data = source.detach()
            if isinstance(source, nn.Parameter):
                return leaf_like(source, data)
            data.__dict__ = source.__dict__
            return data


class ReplicaStandIn(Replica):
    """A replica that runs in another process. Its modules and tensors show what that process has reported."""

    tensors_class = SourceViews
    is_remote = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._written: list[TensorPair] = []
        super().__init__(*args, **kwargs)

    def _find_statistics(self) -> None:
        """The replica in the other process has them."""

    def write_state(self, values: Mapping[int, Tensor]) -> list[TensorPair]:
        """Show what the replica wrote to state, by `id()` of the source's tensors, until `restore_views`."""
        for source, view in self.tensors.state if values else ():
            value = values.get(id(source))
            if value is not None:
                view.data = value.to(view.device)
                self._written.append((source, view))
        return list(self._written)

    def restore_views(self) -> None:
        """Make state views of the source's memory again."""
        for source, view in self._written:
            view.data = source.detach()
        self._written = []
