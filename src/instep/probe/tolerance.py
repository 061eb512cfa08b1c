"""Tolerances for comparing the outputs of a trial, by dtype and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from instep.probe.sandbox import Sandbox
from instep.structure.tree import tensors_in

# The tolerance for tensors, and the smaller one for sums and means.
_TOLERANCES = {torch.float64: (1e-8, 1e-9), torch.float32: (3e-4, 2e-5), torch.float16: (2e-2, 3e-3)}


def tolerances(sandbox: Sandbox, inputs: Mapping[str, Any], outputs: Sequence[Any]) -> tuple[float, float]:
    """Relative tolerances for tensors and for reductions, by the lowest precision among state, inputs and outputs."""
    device_type = sandbox.device.type
    dtypes = sandbox.dtypes | _float_dtypes(inputs) | _float_dtypes(list(outputs))
    if torch.is_autocast_enabled(device_type) and not sandbox.double_precision:
        dtypes.add(torch.get_autocast_dtype(device_type))
    dtypes = dtypes or {torch.get_default_dtype()}
    tolerance, reduction_tolerance = max(_TOLERANCES.get(dtype, (5e-2, 1e-2)) for dtype in dtypes)
    if device_type != "cpu" and torch.float32 in dtypes and tolerance < 1e-2:
        return 10 * tolerance, 10 * reduction_tolerance  # accelerators may multiply in TF32
    return tolerance, reduction_tolerance


def uses_low_precision(sandbox: Sandbox, inputs: Mapping[str, Any]) -> bool:
    """Whether the module computes in less than single precision."""
    dtypes = sandbox.dtypes | _float_dtypes(inputs)
    return torch.is_autocast_enabled(sandbox.device.type) or any(dtype.itemsize < 4 for dtype in dtypes)


def _float_dtypes(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}
