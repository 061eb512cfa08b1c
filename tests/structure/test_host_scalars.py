from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.structure import host_scalars
from instep.structure.host_scalars import HostScalars, read_scalars
from instep.structure.merge import Merger
from instep.structure.merge_rules import WeightedBy, weighted_by
from instep.structure.placements import Partial, Replicate
from instep.structure.verdicts import Undetermined, Verdict
from instep.structure.weights import CriterionWeight, EntryCount, possible_weights


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of words in each transfer to the host."""
    seen: list[int] = []
    start = host_scalars._start_transfer

    def start_transfer(words: Tensor) -> Any:
        seen.append(len(words))
        return start(words)

    monkeypatch.setattr(host_scalars, "_start_transfer", start_transfer)
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


def test_weights_of_all_verdicts_are_read_in_one_transfer(transfers: list[int]) -> None:
    """A merge with label-weighted, criterion-weighted and constant outputs synchronizes once."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]))
    verdicts = {("constant",): Verdict(Replicate(), proven=False)}
    for i in range(3):
        verdicts[f"valid{i}",] = Verdict(Partial(WeightedBy(EntryCount(("labels",), ">= 0", False))))
        verdicts[f"class{i}",] = Verdict(Partial(WeightedBy(CriterionWeight(("labels",), "loss", criterion, False))))
    merger = Merger()
    merger.set_verdicts(verdicts)
    shards = [{"labels": torch.tensor([0, 2, -100])}, {"labels": torch.tensor([1, 1, 1, 2])}]
    parts = [{path[0]: torch.tensor(value) for path in verdicts} for value in (1.0, 3.0)]
    parts[1]["constant"] = parts[0]["constant"].clone()
    merged = merger.merge(parts, [3, 4], shards)
    assert len(transfers) == 1
    assert merged["constant"] == 1
    for i in range(3):
        torch.testing.assert_close(merged[f"valid{i}"], torch.tensor((2 * 1.0 + 4 * 3.0) / 6))
        torch.testing.assert_close(merged[f"class{i}"], torch.tensor((5 * 1.0 + 10 * 3.0) / 15))


def test_weights_of_replicas_without_an_output_are_read_in_the_same_transfer(transfers: list[int]) -> None:
    weight = EntryCount(("labels",), ">= 0", False)
    merger = Merger()
    merger.set_verdicts({("a",): Verdict(Partial(WeightedBy(weight))), ("b",): Verdict(Partial(WeightedBy(weight)))})
    shards = [{"labels": torch.tensor([0, 2])}, {"labels": torch.tensor([-100])}, {"labels": torch.tensor([1])}]
    parts: list[Any] = [
        {"a": torch.tensor(float(i)), "b": torch.tensor(float(i)) if i != 1 else None} for i in range(3)
    ]
    merged = merger.merge(parts, [2, 1, 1], shards)
    torch.testing.assert_close(merged["a"], torch.tensor(2 / 3))
    torch.testing.assert_close(merged["b"], torch.tensor(2 / 3))
    assert len(transfers) == 1


def test_possible_weights_of_a_trial_are_read_in_one_transfer(transfers: list[int]) -> None:
    labels = torch.tensor([[0, 2, -100], [1, 1, 1], [1, 0, 2]])
    inputs = [{"labels": part, "mask": part >= 0} for part in (labels[:1], labels[1:], labels)]
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]))
    candidates = possible_weights(inputs, (1, 2, 3), [("loss", criterion)])
    assert (EntryCount(("labels",), ">= 0", False), 2.0, 6.0) in candidates
    assert (CriterionWeight(("labels",), "loss", criterion, False), 5.0, 13.0) in candidates
    assert len(transfers) == 1


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Not the mean itself, whose sum and divisor would be used: the probe infers how this value merges."""
    return 2 * nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_weights_that_the_probe_has_read_are_not_read_again(transfers: list[int]) -> None:
    """A mean over tokens may be weighted by samples or by tokens, as long as no batch has tokens that do not count."""
    net = nn.Linear(4, 5).double()
    plain, x = copy.deepcopy(net), torch.randn(6, 3, 4, dtype=torch.float64)
    target = torch.randint(0, 5, (6, 3))
    with instep.DataParallel(instep.with_loss(net, cross_entropy), ["cpu", "cpu"], engine="threads") as model:
        for _ in range(3):
            transfers.clear()
            torch.testing.assert_close(model(x, target), cross_entropy(plain(x), target))
        assert len(transfers) == 1
        target[4:] = -100
        for _ in range(3):
            transfers.clear()
            torch.testing.assert_close(model(x, target), cross_entropy(plain(x), target))
        assert len(transfers) == 1


def test_weights_are_awaited_after_the_replicas_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the host does not wait for the device between the steps of a training loop."""
    events: list[str] = []
    start = host_scalars._start_transfer

    def start_transfer(words: Tensor) -> Any:
        events.append("start")
        wait = start(words)
        return lambda: (events.append("wait"), wait())[1]

    net = nn.Linear(4, 5).double()
    net.register_forward_hook(lambda *_: events.append("forward"))
    x, target = torch.randn(6, 3, 4, dtype=torch.float64), torch.randint(0, 5, (6, 3))
    model = instep.DataParallel(
        instep.with_loss(net, cross_entropy), ["cpu", "cpu"], engine="threads", hooks="per_replica"
    )
    with model:
        for _ in range(20):  # later calls rarely begin with a trial
            model(x, target)
        monkeypatch.setattr(host_scalars, "_start_transfer", start_transfer)
        events.clear()
        model(x, target)
        assert events == ["start", "forward", "forward", "wait"]
        target[4:] = -100  # the rules that remain disagree: the call is repeated, and compares the weights first
        expected = cross_entropy(net(x), target)
        events.clear()
        torch.testing.assert_close(model(x, target), expected)
        assert events[:6] == ["start", "forward", "forward", "wait", "start", "wait"]
