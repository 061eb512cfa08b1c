"""Laws of verdicts: the probe finds the rule that gives the whole from the parts, and no other rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from instep.probe.judge import Findings, TrialOutputs, UserRules, judge
from instep.probe.window import discriminating_window, find_traits
from instep.structure.merge_rules import MergeContext, WeightedBy
from instep.structure.placements import Nested, Partial, PerSample, Ragged, Replicate, Shard
from instep.structure.verdicts import Undetermined, Verdict
from instep.structure.weights import EntryCount, find_weight_window

SIZES = st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 3), (4, 5), (8, 9)])
SEEDS = st.integers(0, 2**31)


def judge_trial(sizes: tuple[int, int], first: Any, second: Any, whole: Any, inputs: Any = ({}, {}, {})) -> Findings:
    return judge(TrialOutputs(sizes, (first, second), whole, inputs), UserRules())


def samples(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pieces(value: Tensor, sizes: tuple[int, int], dim: int = 0) -> list[Tensor]:
    return list(value.split(list(sizes), dim))


@given(SIZES, SEEDS, st.lists(st.integers(1, 5), max_size=3), st.integers(0, 3))
def test_the_batch_dim_is_found_and_merging_gives_the_whole(
    sizes: tuple[int, int], seed: int, shape: list[int], position: int
) -> None:
    dim = min(position, len(shape))
    whole = samples(seed, *shape[:dim], sum(sizes), *shape[dim:])
    first, second = pieces(whole, sizes, dim)
    findings = judge_trial(sizes, first, second, whole)
    verdict = findings.outputs[()]
    assert verdict.placement == Shard(dim)
    assert verdict.rank == whole.ndim
    assert not findings.errors
    context = MergeContext(sizes)
    assert verdict.accepts([first, second], context)
    assert torch.equal(verdict.merge([first, second], context, ()), whole)


@given(SIZES, SEEDS, st.lists(st.integers(1, 4), max_size=2), st.sampled_from(["sum", "mean"]))
def test_sums_and_means_are_distinguished(sizes: tuple[int, int], seed: int, shape: list[int], rule: str) -> None:
    whole = samples(seed, sum(sizes), *shape)
    first, second = pieces(whole, sizes)
    parts = [getattr(part, rule)(0) for part in (first, second)]
    expected = getattr(whole, rule)(0)
    findings = judge_trial(sizes, *parts, expected)
    verdict = findings.outputs[()]
    assert verdict == Verdict(Partial(rule))
    torch.testing.assert_close(verdict.merge(parts, MergeContext(sizes), ()), expected)


@given(SIZES, SEEDS)
def test_a_value_that_no_rule_explains_is_an_error(sizes: tuple[int, int], seed: int) -> None:
    first, second, whole = samples(seed, 3)
    a, b = sizes
    guesses = [first + second, (a * first + b * second) / (a + b), first, second]
    assume(all(abs(guess - whole) > 1e-2 for guess in guesses) and abs(first - second) > 1e-2)
    findings = judge_trial(sizes, first, second, whole)
    assert not findings.outputs
    assert list(findings.errors) == [()]
    assert "no sum, mean or constant explains it" in str(findings.errors[()])


@given(SIZES, SEEDS)
def test_outputs_that_depend_on_other_samples_are_found(sizes: tuple[int, int], seed: int) -> None:
    whole = samples(seed, sum(sizes), 3)
    first, second = pieces(whole, sizes)
    findings = judge_trial(sizes, first - first.mean(0), second - second.mean(0), whole - whole.mean(0))
    assert "depend on other samples" in str(findings.errors[()])
    findings = judge_trial(sizes, first @ first.T, second @ second.T, whole @ whole.T)
    assert "both follow the batch" in str(findings.errors[()])


@given(SIZES, SEEDS, st.sampled_from([">= 0", "> 0", "!= 0", "== 0"]), st.booleans())
def test_the_weight_of_a_mean_is_found_among_rivals(
    sizes: tuple[int, int], seed: int, test: str, shifted: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 2, (sum(sizes), 6), generator=draw)
    name, rivals = ("mask", ["!= 0", "== 0"]) if test in ("!= 0", "== 0") else ("labels", [">= 0", "> 0"])
    count = EntryCount((name,), test, shifted)
    values = samples(seed, *labels.shape) + 3
    counted = [count.entry_weights(part).sum() for part in pieces(labels, sizes)]
    shares = {
        round(float(other.entry_weights(pieces(labels, sizes)[0]).sum() / max(1, other.entry_weights(labels).sum())), 6)
        for other in [EntryCount((name,), rival, shift) for rival in rivals for shift in (False, True)]
    }
    assume(all(int(c) for c in counted) and len(shares) == 4)
    assume(round(sizes[0] / sum(sizes), 6) not in shares)

    def mean(rows: Tensor, marks: Tensor) -> Tensor:
        kept = count.entry_weights(marks)
        return (rows[:, 1:] if shifted else rows)[kept].mean()

    parts = [mean(*pair) for pair in zip(pieces(values, sizes), pieces(labels, sizes), strict=True)]
    assume(abs(parts[0] - parts[1]) > 1e-2)
    inputs = [{name: marks} for marks in (*pieces(labels, sizes), labels)]
    expected = mean(values, labels)
    verdict = judge_trial(sizes, *parts, expected, inputs).outputs[()]
    assert verdict == Verdict(Partial(WeightedBy(count)))
    merged = verdict.merge(parts, MergeContext(sizes, (None, None), tuple(inputs[:2])), ())
    torch.testing.assert_close(merged, expected)


@given(SIZES, SEEDS)
def test_placements_of_lists_follow_from_their_lengths(sizes: tuple[int, int], seed: int) -> None:
    rows = list(samples(seed, sum(sizes), 2))
    verdict = Verdict(PerSample(), proven=sizes != (1, 1))
    assert judge_trial(sizes, rows[: sizes[0]], rows[sizes[0] :], rows).outputs == {(): verdict}
    whole = samples(seed, sum(sizes), 2)
    first, second = pieces(whole, sizes)
    found = judge_trial(sizes, [first] * 2, [second] * 2, [whole] * 2).outputs
    assert found[()] == Verdict(Nested())
    assert found[0,] == found[1,] == Verdict(Shard(0), rank=2)
    twice = [row for row in rows for _ in range(2)]
    assert judge_trial(sizes, twice[: 2 * sizes[0]], twice[2 * sizes[0] :], twice).outputs == {
        (): Verdict(Ragged(None))
    }


@pytest.mark.parametrize(
    "value", [torch.zeros(()), torch.tensor(0), torch.tensor(float("nan")), torch.zeros(3), 0, 0.0]
)
def test_zeros_and_nans_are_undetermined(value: Any) -> None:
    findings = judge_trial((2, 3), value, value, value)
    assert findings.outputs == {(): Verdict(Undetermined(), proven=False)}
    assert (findings.unresolved, findings.errors) == ({()}, {})


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor(3), 7, 2.5, torch.ones(3), True])
def test_equal_values_are_replicated_but_not_proven(value: Any) -> None:
    findings = judge_trial((2, 3), value, value, value)
    assert findings.outputs == {(): Verdict(Replicate(), proven=False)}
    assert findings.unresolved == {()}


def test_a_sum_with_a_zero_part_is_unresolved() -> None:
    assert judge_trial((2, 3), 0, 3, 3).unresolved == {()}
    assert judge_trial((2, 3), 1, 2, 3).outputs == {(): Verdict(Partial("sum"))}
    assert judge_trial((2, 3), torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([1, 3])).outputs[()] == Verdict(
        Partial("sum")
    )
    assert list(judge_trial((2, 3), True, False, True).errors) == [()]


def test_sorted_rows_are_not_proven() -> None:
    findings = judge_trial((2, 3), torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([1, 2, 3, 4, 5]))
    assert findings.outputs == {(): Verdict(Shard(0), proven=False, rank=1)}
    findings = judge_trial((2, 3), torch.tensor([1]), torch.tensor([3, 4]), torch.tensor([1, 3, 4]))
    assert findings.outputs == {(): Verdict(Ragged(0), proven=False)}
    assert (findings.unresolved, findings.errors) == ({()}, {})


def test_random_values_are_judged_by_shape() -> None:
    noise = [torch.randn(n, 2) for n in (2, 3, 5)]
    trial = TrialOutputs((2, 3), (noise[0], noise[1]), noise[2], ({}, {}, {}), compare_values=False)
    findings = judge(trial, UserRules())
    assert findings.outputs == {(): Verdict(Shard(0), proven=False, rank=2)}
    assert not findings.unresolved
    scalars = TrialOutputs((2, 3), (torch.rand(()), torch.rand(())), torch.rand(()), ({}, {}, {}), compare_values=False)
    assert judge(scalars, UserRules()) == Findings()


def test_a_part_of_one_sample_may_lack_the_batch_dim() -> None:
    whole = torch.randn(3, 4)
    verdict = judge_trial((1, 2), whole[0], whole[1:], whole).outputs[()]
    assert verdict == Verdict(Shard(0), rank=2)
    assert torch.equal(verdict.merge([whole[0], whole[1:]], MergeContext((1, 2)), ()), whole)


def test_the_most_discriminating_window_is_chosen() -> None:
    labels = torch.ones(12, 4, dtype=torch.long)
    assert find_weight_window({"labels": labels}, 12, (2, 3)) == 0
    labels[8, 1:] = -100
    start = find_weight_window({"labels": labels}, 12, (2, 3))
    assert start <= 8 < start + 5
    start = discriminating_window(
        find_traits({"y": labels}, 12), set(), (2, 3)
    )  # the name of the argument does not matter
    assert start is not None
    assert start <= 8 < start + 5
    assert discriminating_window(find_traits({"x": torch.rand(12, 3)}, 12), set(), (2, 3)) is None
    assert find_weight_window({"x": torch.rand(12, 3)}, 12, (2, 3)) == 0
    rivals = [EntryCount(("labels",), ">= 0", False), EntryCount(("labels",), "> 0", False)]
    labels[11, 0] = 0
    start = find_weight_window({"labels": labels}, 12, (2, 3), rivals)
    assert start + 5 == 12
