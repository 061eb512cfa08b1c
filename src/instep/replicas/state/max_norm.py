"""`nn.Embedding(max_norm=...)`: a layer that rewrites rows of its own trainable weight in `forward`.

Each replica has such a weight in memory of its own. A row comes out the same wherever it was used, so rows that some
replica has rewritten are the module's. That is so as long as the layer alone uses the weight: tied to another one, it
would show there which rows the other replicas' samples have used, so such a module runs on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from instep.replicas.object_graph import tensors_equal
from instep.replicas.state.code_reads import code_reads_attribute

_TensorPair = tuple[Tensor, Tensor]


def max_norm_weights(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """By their ids, the trainable weights whose rows `forward` keeps below a norm."""
    layers = (m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None)
    return {id(layer.weight): layer.weight for layer in layers if layer.weight.requires_grad}


def is_weight_shared(modules: Sequence[nn.Module], weights: Mapping[int, Tensor]) -> bool:
    """Whether another module has one of these weights too, or some code of the modules reads a weight by itself."""
    holders = [id(p) for module in modules for p in module._parameters.values() if id(p) in weights]
    return len(holders) > len(set(holders)) or (bool(weights) and code_reads_attribute(modules, "weight"))


def merge_renormed_rows(weight: Tensor, copies: Sequence[Tensor]) -> Tensor | None:
    """The weight with the rows that the replicas rewrote, or None if there are none.

    Raises `ValueError` where replicas rewrote a row differently, which no norm does.
    """
    merged: Tensor | None = None
    done = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
    with torch.no_grad():
        for copy in copies:
            near = copy.detach().to(weight.device)
            rows = (near != weight.detach()).flatten(1).any(1)
            if not bool(rows.any()):
                continue
            merged = weight.detach().clone() if merged is None else merged
            both = rows & done
            if bool(both.any()) and not tensors_equal(merged[both], near[both]):
                raise ValueError("replicas rewrote a row differently")
            merged[rows] = near[rows]
            done |= rows
    return merged
