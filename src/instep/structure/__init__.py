"""Splitting and merging of batches of any structure. Pure: no devices, no threads."""

from __future__ import annotations

from instep.structure import graph_arguments, types_hf, types_torch

types_torch.register_torch_types()
types_hf.register_optional_types()
graph_arguments.register_graph_arguments()
