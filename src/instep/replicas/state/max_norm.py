"""`nn.Embedding(max_norm=...)`: a layer that rewrites rows of its own trainable weight in `forward`.

Each replica has a copy of such a weight. A row is rewritten to the same values on every replica that uses it, so the
rows that a replica rewrote are copied to the source. If other code reads the weight too, it would not see the rows that
other replicas rewrite, so such a module runs on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from instep.replicas.object_graph import tensors_equal
from instep.replicas.state.code_reads import code_reads_attribute


def max_norm_weights(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """The trainable weights with `max_norm`, by id."""
    layers = (m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None)
    return {id(layer.weight): layer.weight for layer in layers if layer.weight.requires_grad}


def is_weight_shared(modules: Sequence[nn.Module], weights: Mapping[int, Tensor]) -> bool:
    """Whether another module has one of these weights, or code of the modules may read it."""
    holders = [id(p) for module in modules for p in module._parameters.values() if id(p) in weights]
    return len(holders) > len(set(holders)) or (bool(weights) and code_reads_attribute(modules, "weight"))


def merge_renormed_rows(weight: Tensor, copies: Sequence[Tensor]) -> Tensor | None:
    """The weight with the rows that the replicas rewrote, or None if there are none.

    Raises `ValueError` if replicas rewrote a row to different values: something else than the norm wrote to it.
    """
    merged: Tensor | None = None
    done = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
    with torch.no_grad():
        for copy in copies:
            values = copy.detach().to(weight.device)
            rows = (values != weight.detach()).flatten(1).any(1)
            if not bool(rows.any()):
                continue
            merged = weight.detach().clone() if merged is None else merged
            both = rows & done
            if bool(both.any()) and not tensors_equal(merged[both], values[both]):
                raise ValueError("replicas rewrote a row to different values")
            merged[rows] = values[rows]
            done |= rows
    return merged
