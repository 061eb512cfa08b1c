"""These tests need torchvision and timm. `tests/ecosystem/test_vision.py` runs them in a process that has both."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = ["torchvision_operators.py"]
if find_spec("torchvision") is None or find_spec("timm") is None:
    collect_ignore_glob = ["*.py"]
