"""Sphinx configuration. The build needs no network: no intersphinx, no remote fonts or scripts."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

import instep

project = "instep"
author = "The instep authors"
copyright = author
version = release = instep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]

default_role = "literal"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 72
napoleon_numpy_docstring = False
# Only public names of instep are documented here. References to torch, to Python and to internals are plain text.
nitpick_ignore_regex = [(r"py:.*", r"(?!instep\.[A-Za-z_]+$).*")]

html_theme = "furo"
html_title = f"instep {release}"
html_static_path = ["_static"]
html_css_files = ["instep.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

_CODE = re.compile(r"(`+)(.+?)\1")


def _escape_line(line: str) -> str:
    """One docstring line with Markdown inline code as reST literals, and with every other `*` escaped."""
    made, end = "", 0
    for found in _CODE.finditer(line):
        made += line[end : found.start()].replace("*", r"\*") + f"``{found[2]}``"
        end = found.end()
    return made + line[end:].replace("*", r"\*")


def escape_docstring(*event: Any) -> None:
    """Docstrings use single backticks for code, as in Markdown; doctests are left as they are."""
    lines: list[str] = event[-1]
    in_doctest = False
    for number, line in enumerate(lines):
        in_doctest = line.lstrip().startswith(">>>") or (in_doctest and bool(line.strip()))
        if not in_doctest:
            lines[number] = _escape_line(line)


def setup(app: Sphinx) -> dict[str, bool]:
    # Before napoleon (priority 500), which adds reST markup of its own.
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)
    return {"parallel_read_safe": True}
