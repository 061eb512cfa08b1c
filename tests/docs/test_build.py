"""The documentation builds without warnings and without the network, and covers the public API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPTIONS = ["-W", "--keep-going", "-n", "-q", "-E", "-b", "html"]
REMOTE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//', re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", *OPTIONS, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder / "html"


def test_every_markdown_page_is_built(site: Path) -> None:
    sources = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert sources <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_pages_load_no_remote_resources(site: Path) -> None:
    remote = [f"{page.name}: {found[0]}" for page in site.glob("*.html") for found in REMOTE.finditer(page.read_text())]
    assert not remote


def test_images_have_alt_texts(site: Path) -> None:
    images = [(page.name, tag) for page in site.glob("*.html") for tag in re.findall(r"<img\b[^>]*>", page.read_text())]
    assert images
    assert not [(page, tag) for page, tag in images if not re.search(r'\balt="[^"]{10,}"', tag)]


def test_the_api_reference_covers_exactly_the_public_names(site: Path) -> None:
    documented = set(re.findall(r'id="instep\.(\w+)"', (site / "api.html").read_text()))
    assert documented == set(instep.__all__)
