"""The structure layer: what a batch is made of, how it is cut and put together. Pure: no devices, no threads."""

from __future__ import annotations

from instep.structure import optional_kinds, torch_kinds

torch_kinds.install()
optional_kinds.install()
