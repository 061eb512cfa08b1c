"""The structure layer: what a batch is made of, how it is cut and put together. Pure: no devices, no threads."""

from __future__ import annotations

from instep.structure import types_hf, types_torch

types_torch.register_torch_types()
types_hf.register_optional_types()
