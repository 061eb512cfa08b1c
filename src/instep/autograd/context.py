"""The protocol of a replica's context that the bridge uses."""

from __future__ import annotations

GRAPH_FREED_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
