"""Unexpected key(s) in state_dict: "module.weight"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import instep

from .common import on_each_engine


@on_each_engine
def test_saved_keys_have_no_prefix_and_prefixes_are_accepted(tmp_path: Path, engine: str) -> None:
    net = nn.Linear(3, 2)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        torch.save(model.state_dict(), tmp_path / "net.pt")
        saved = torch.load(tmp_path / "net.pt", weights_only=True)
        nn.Linear(3, 2).load_state_dict(saved)
        for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
            with torch.no_grad():
                net.weight.zero_()
            model.load_state_dict({prefix + key: value for key, value in saved.items()})
            assert torch.equal(net.weight, saved["weight"])


def test_torch_adds_a_prefix() -> None:
    saved = nn.DataParallel(nn.Linear(3, 2)).state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        nn.Linear(3, 2).load_state_dict(saved)
