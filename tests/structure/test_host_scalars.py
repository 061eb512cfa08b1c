from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from instep.structure import host_scalars
from instep.structure.host_scalars import HostScalars, read_scalars
from instep.structure.merge import Merger
from instep.structure.merge_rules import weighted_by
from instep.structure.placements import Replicate
from instep.structure.verdicts import Undetermined, Verdict


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of values in each transfer to the host."""
    seen: list[int] = []

    def transfer(words: Tensor) -> Tensor:
        seen.append(len(words))
        return words.cpu()

    monkeypatch.setattr(host_scalars, "_transfer", transfer)
    return seen


VALUES: list[Any] = [1.5, float("inf"), -0.0, 3, -(1 << 62) - 1, True, False, 2 - 3j]


@pytest.mark.parametrize("value", VALUES)
def test_every_value_comes_back_exactly(value: Any) -> None:
    got = read_scalars([torch.tensor(value), torch.tensor(7)])
    assert got == [torch.tensor(value).item(), 7]
    assert type(got[0]) is type(value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_of_every_precision_are_exact(dtype: torch.dtype) -> None:
    tensor = torch.tensor(0.1, dtype=dtype)
    assert read_scalars([tensor]) == [tensor.item()]


def test_large_unsigned_integers_are_exact() -> None:
    assert read_scalars([torch.tensor((1 << 64) - 5, dtype=torch.uint64)]) == [(1 << 64) - 5]


def test_nan_equals_nan_and_dtypes_have_to_match() -> None:
    nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
    scalars = HostScalars([nan, one])
    assert scalars.are_equal([nan, nan.clone()])
    assert not scalars.are_equal([nan, one])
    assert not scalars.are_equal([one, one.double()])


def test_all_scalars_of_a_call_are_read_in_one_transfer(transfers: list[int]) -> None:
    parts = [{f"v{i}": torch.tensor(float(i)) for i in range(6)} for _ in range(3)]
    assert Merger().merge(parts, [2, 2, 1]) == parts[0]
    assert transfers == [18]


@pytest.mark.parametrize("placement", [Replicate(), Undetermined()])
def test_verdicts_read_all_scalars_in_one_transfer(transfers: list[int], placement: Any) -> None:
    merger = Merger()
    merger.set_verdicts({(f"v{i}",): Verdict(placement, proven=False) for i in range(6)})
    parts = [{f"v{i}": torch.zeros((), requires_grad=i % 2 == 0) for i in range(6)} for _ in range(3)]
    merged = merger.merge(parts, [2, 2, 1])
    assert all(not value.any() for value in merged.values())
    assert transfers == [18]


def test_sums_need_no_transfer(transfers: list[int]) -> None:
    parts = [{"a": torch.tensor(1.0), "b": torch.tensor(2)} for _ in range(2)]
    merged = Merger.from_options({"a": "mean", "b": "sum"}).merge(parts, [2, 1])
    assert (merged["a"], merged["b"]) == (1.0, 4)
    assert transfers == []


def test_weights_are_read_once_for_all_outputs(transfers: list[int]) -> None:
    parts = [{"a": torch.tensor(float(i)), "b": torch.tensor(2.0 * i), "n": torch.tensor([i, 1])} for i in (1, 3)]
    merged = Merger.from_options({"[ab]": weighted_by("n"), "n": "sum"}).merge(parts, [1, 1])
    torch.testing.assert_close(merged["a"], torch.tensor((2 * 1 + 4 * 3) / 6))
    torch.testing.assert_close(merged["b"], 2 * merged["a"])
    assert len(transfers) == 1
