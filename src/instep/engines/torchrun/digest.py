"""Digests by which ranks find out that their batches or modules differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.structure.tree import SCALARS, flatten_one_level

_SAMPLES = 1024
"""At most this many elements of a tensor enter its digest, evenly spaced."""


def digest_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """A digest of the arguments of a call: types, sizes, and values of some elements."""
    digest = hashlib.blake2b(digest_size=8)
    for value in (*args, *kwargs.items()):
        _add_value(digest, value)
    return digest.hexdigest()


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """A digest of sizes, dtypes, and some elements of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        _add_value(digest, tensor)
    return digest.hexdigest()


def _add_value(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_nested and not value.is_meta and value.numel():
            with torch.no_grad():
                flat = value.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu().resolve_conj().resolve_neg()
                digest.update(sample.view(torch.uint8).numpy().tobytes())
        return
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            _add_value(digest, torch.as_tensor(array, device="cpu"))
        else:
            digest.update(f"{array.dtype} {array.shape} {array.reshape(-1)[:_SAMPLES].tolist()}".encode())
        return
    node = flatten_one_level(value)
    if node is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            digest.update(repr(key).encode())
            _add_value(digest, child)
    elif isinstance(value, SCALARS):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())
