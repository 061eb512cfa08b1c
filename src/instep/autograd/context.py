"""What the bridge knows of a replica's context: the collectives of its forward."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

GRAPH_FREED_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
"""torch's own message for a freed graph."""


class GraphContext(Protocol):
    """The collectives in which a replica took part in its forward. `collectives.group.ReplicaContext` implements it."""

    tokens: list[Tensor]
    """One token for each collective through which gradients flow, in order. Backward starts at them too."""

    def with_group(self, group: Any) -> Any:
        """The context of the same replica in the group of a backward."""
        ...
