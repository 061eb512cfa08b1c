"""`python -m instep` is `instep`."""

from __future__ import annotations

import sys

from instep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
