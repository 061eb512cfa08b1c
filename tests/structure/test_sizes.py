"""How many samples each replica gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.structure.sizes import balanced_sizes, sizes_by_cost

SHARES = st.lists(st.floats(0.1, 10), min_size=1, max_size=5)


@given(batch=st.integers(1, 60), shares=SHARES, least=st.integers(1, 4))
def test_shares_are_followed(batch: int, shares: list[float], least: int) -> None:
    sizes = balanced_sizes(batch, len(shares), least, shares)
    assert sum(sizes) == batch
    assert len(sizes) == max(1, min(len(shares), batch // least))
    assert len(sizes) == 1 or min(sizes) >= least
    if len(sizes) == len(shares) and min(sizes) > least:
        for size, share in zip(sizes, shares, strict=True):
            assert abs(size - batch * share / sum(shares)) <= 1


@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=40), parts=st.integers(1, 5))
def test_costs_are_shared_out(costs: list[float], parts: int) -> None:
    parts = min(parts, len(costs))
    sizes = sizes_by_cost(costs, parts)
    assert sum(sizes) == len(costs)
    assert len(sizes) == parts
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("costs", "parts", "sizes"),
    [([1, 1, 1, 1], 2, (2, 2)), ([9, 1, 1, 1], 2, (1, 3)), ([1, 1, 1, 9], 2, (3, 1)), ([0, 0, 0, 0], 2, (2, 2))],
)
def test_a_heavy_sample_is_alone(costs: list[float], parts: int, sizes: tuple[int, ...]) -> None:
    assert sizes_by_cost(costs, parts) == sizes
