"""What the tests of merging share."""

from __future__ import annotations

from typing import Any

import pytest

from instep.errors import MergeError
from instep.structure.merge import merge

SIZES = [3, 2]


def refused(parts: list[Any], sizes: list[int] = SIZES, **options: Any) -> str:
    with pytest.raises(MergeError) as caught:
        merge(parts, sizes, **options)
    return str(caught.value)
