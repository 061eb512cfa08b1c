"""`make messages`."""

from __future__ import annotations

from .page import main

main()
