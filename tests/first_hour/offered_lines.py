"""Reads the options that a message of instep offers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch

import instep

OPTION = re.compile(r"(?<![\w.])(dim|in_dims|out_dims|merge|state|engine|hooks|min_shard)=")


def offered_options(message: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The text and the value of each complete option in a message, in order; those with a gap (`...`) are left out."""
    for found in OPTION.finditer(message):
        text = _expression(message[found.start() :].partition("\n")[0])
        if text is not None and "..." not in text:
            yield text, eval(f"dict({text})", {"instep": instep, "torch": torch})


def _expression(line: str) -> str | None:
    """The longest beginning of a line that is one keyword argument."""
    for end in range(len(line), 0, -1):
        try:
            call = ast.parse(f"f({line[:end]})", mode="eval").body
        except SyntaxError:
            continue
        if isinstance(call, ast.Call) and not call.args and len(call.keywords) == 1:
            return line[:end].partition("   #")[0].rstrip()
    return None
