"""Relative links exist in the Markdown files that Sphinx does not build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_point_to_existing_files(page: str) -> None:
    path = ROOT / page
    broken = [link for link in LINK.findall(path.read_text("utf-8")) if not (path.parent / link).exists()]
    assert not broken
