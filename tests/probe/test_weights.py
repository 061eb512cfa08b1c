"""Means over weights: found by samples whose integers differ, whatever their names, now or in a later batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.probe.window import discriminating_window, distinguished_traits, find_traits

from .helpers import both_engines, probe_of, said

WEIGHTS = torch.tensor([1.0, 1.0, 20.0], dtype=torch.float64)


class Learner(nn.Module):
    """A layer, and a loss on what it gives."""

    def __init__(self, loss: Any, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width).double()
        self.loss = loss

    def forward(self, x: Tensor, y: Any) -> Any:
        return {"loss": self.loss(self.layer(x), y["cls"] if isinstance(y, dict) else y)}


class Marks(nn.Module):
    """A loss that is a module itself and counts something else than samples."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        keep = torch.arange(output.shape[1]) < y[:, None]
        return (output.pow(2).mean(-1) * keep).sum() / y.sum()


def inputs(size: int, *shape: int) -> Tensor:
    return torch.randn(size, *shape, 4, dtype=torch.float64)


def rare(size: int, last: int = 3) -> Tensor:
    """Classes of which the heavy one is seen only at the end."""
    y = torch.randint(0, 2, (size,))
    if last:
        y[-last:] = 2
    return y


def assert_step(model: Any, plain: nn.Module, *args: Any) -> None:
    """The loss and the gradients are those of the plain module."""
    plain.zero_grad()
    model.zero_grad()
    ours, theirs = model(*args)["loss"], plain(*args)["loss"]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    ours.backward()
    theirs.backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-9, atol=1e-12)


def wrapped(wrap: Any, net: nn.Module, engine: str) -> tuple[Any, nn.Module]:
    plain = copy.deepcopy(net)
    return wrap(net, engine=engine), plain


KNOWN: dict[str, tuple[Any, Any]] = {
    "class weights": (nn.CrossEntropyLoss(WEIGHTS), lambda: rare(30)),
    "class weights, in a dictionary": (nn.CrossEntropyLoss(WEIGHTS), lambda: {"cls": rare(30)}),
    "smoothed": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), lambda: rare(30)),
    "an ignored class": (nn.CrossEntropyLoss(ignore_index=2), lambda: rare(30)),
    "ignored as usual": (nn.CrossEntropyLoss(), lambda: rare(30).where(rare(30) != 2, -100)),
    "of log-probabilities": (nn.NLLLoss(WEIGHTS), lambda: rare(30)),
}


@both_engines
@pytest.mark.parametrize("name", KNOWN)
def test_a_criterion_of_the_module_determines_the_weights(wrap: Any, engine: str, name: str) -> None:
    loss, make = KNOWN[name]
    model, plain = wrapped(wrap, Learner(loss), engine)
    for size in (30, 7, 12):
        y = make() if size == 30 else rare(size, 2)
        assert_step(model, plain, inputs(size), {"cls": y} if name.endswith("dictionary") and size != 30 else y)


@both_engines
def test_places_that_are_ignored_in_the_last_images(wrap: Any, engine: str) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = nn.Conv2d(2, 3, 1).double(), nn.CrossEntropyLoss(ignore_index=255)

        def forward(self, x: Tensor, target: Tensor) -> Any:
            return {"loss": self.criterion(self.net(x), target)}

    model, plain = wrapped(wrap, Segments(), engine)
    target = torch.randint(0, 3, (20, 5, 5))
    target[-2:, :3] = 255
    assert_step(model, plain, torch.randn(20, 2, 5, 5, dtype=torch.float64), target)


@both_engines
def test_weights_that_the_mean_does_not_divide_by(wrap: Any, engine: str) -> None:
    """`pos_weight`, and the weights of element-wise losses: their means are over elements, so over samples."""
    for loss in (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), nn.BCEWithLogitsLoss(weight=WEIGHTS)):
        model, plain = wrapped(wrap, Learner(loss), engine)
        y = torch.zeros(20, 3, dtype=torch.float64)
        y[-3:] = 1
        assert_step(model, plain, inputs(20), y)
        assert said(model, inputs(20), y)["loss"] == "mean weighted by samples (the probe)"
    margins, plain = wrapped(wrap, Learner(nn.MultiMarginLoss(weight=WEIGHTS)), engine)
    assert_step(margins, plain, inputs(20), rare(20))


def test_weights_are_read_when_they_are_needed(wrap: Any) -> None:
    model, plain = wrapped(wrap, Learner(nn.CrossEntropyLoss(WEIGHTS.clone())), "threads")
    assert_step(model, plain, inputs(30), rare(30))
    for net in (model, plain):
        net.loss.weight.mul_(torch.tensor([1.0, 5.0, 0.1]))
    assert_step(model, plain, inputs(30), rare(30))


def masked(output: Tensor, y: Tensor) -> Tensor:
    return (output.pow(2).mean(-1) * y).sum() / y.sum()


def last_three(value: Any, otherwise: Any) -> Tensor:
    y = torch.full((20,), otherwise)
    y[-3:] = value
    return y


HIDDEN: dict[str, tuple[Any, Tensor, tuple[int, ...]]] = {
    "class weights": (lambda output, y: F.cross_entropy(output, y, WEIGHTS), rare(20), ()),
    "an ignored class": (lambda output, y: F.cross_entropy(output, y, ignore_index=2), rare(20), ()),
    "a negative class": (lambda output, y: F.cross_entropy(output, y), last_three(-100, 1), ()),
    "lengths": (Marks(), last_three(3, 9), (9,)),
    "great lengths": (Marks(), last_three(300, 900), (900,)),
    "a mask of booleans": (masked, last_three(False, True), ()),
    "a mask of fractions": (masked, last_three(0.0, 1.0).double(), ()),
}


@both_engines
@pytest.mark.parametrize("name", HIDDEN)
def test_unknown_weights_are_an_error(wrap: Any, engine: str, name: str) -> None:
    """The first samples weigh alike, the last do not."""
    loss, y, shape = HIDDEN[name]
    model = wrap(Learner(loss), engine=engine)
    for _ in range(2):
        with pytest.raises(instep.MergeError, match=r"the output 'loss'.*no sum, mean or constant explains it"):
            model(inputs(20, *shape), y)


@both_engines
@pytest.mark.parametrize("name", HIDDEN)
def test_weights_that_show_only_later_are_an_error_then(wrap: Any, engine: str, name: str) -> None:
    loss, y, shape = HIDDEN[name]
    model, plain = wrapped(wrap, Learner(loss), engine)
    same = y[0].expand(20).clone()
    for _ in range(5):
        assert_step(model, plain, inputs(20, *shape), same)
    for _ in range(2):
        with pytest.raises(instep.MergeError, match=r"the output 'loss'.*no sum, mean or constant explains it"):
            model(inputs(20, *shape), y)
    assert_step(model, plain, inputs(20, *shape), same)


@both_engines
def test_a_loss_inside_the_module_that_shows_later(wrap: Any, engine: str) -> None:
    model, plain = wrapped(wrap, Learner(nn.CrossEntropyLoss(WEIGHTS)), engine)
    for step in range(12):
        assert_step(model, plain, inputs(30), rare(30, 0 if step < 7 else 3))
    assert "'loss' divides by" in said(model, inputs(30), rare(30))["loss"]


def test_a_loss_that_is_left_on_the_module(wrap: Any) -> None:
    class Leaves(Learner):
        def forward(self, x: Tensor, y: Any) -> Any:
            self.last = super().forward(x, y)["loss"]
            return self.layer(x)

    net = Leaves(nn.CrossEntropyLoss(WEIGHTS))
    model, plain = wrapped(wrap, net, "threads")
    for last in (0, 0, 3, 2, 0):
        x, y = inputs(30), rare(30, last)
        model(x, y)
        plain(x, y)
        torch.testing.assert_close(net.last, plain.last, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 100, 1000])
def test_a_plain_mean_stays_one_and_is_asked_about_a_few_times(wrap: Any, classes: int) -> None:
    net = Learner(lambda output, y: F.cross_entropy(output, y), classes)
    model, plain = wrapped(wrap, net, "threads")
    for _ in range(40):
        assert_step(model, plain, inputs(12), torch.randint(0, classes, (12,)))
    known = probe_of(model).last_record
    assert known.trials.count <= 8  # the first, three soon, and then as often as the calls double
    assert known.integer_checks.next_call > 40


def test_traits_and_the_samples_that_tell_of_them() -> None:
    y = torch.zeros(12, dtype=torch.long)
    assert not find_traits({"y": y, "x": torch.rand(12, 3), "few": torch.arange(3)}, 12)
    y[9] = 7
    traits = find_traits({"y": y}, 12)
    assert set(traits) == {(("y",), 0), (("y",), 7)}
    start = discriminating_window(traits, set(), (2, 3))
    assert start is not None
    assert start <= 9 < start + 5
    assert distinguished_traits(traits, start, (2, 3)) == set(traits)
    assert not distinguished_traits(traits, 0, (2, 3))
    assert discriminating_window(traits, set(traits), (2, 3)) is None
    words = torch.randint(1, 5000, (12, 9))
    words[4, 3:] = 0
    assert {what for _, what in find_traits({"batch": {"ids": words}}, 12)} >= {"zero", "lowest", "total"}
    assert discriminating_window(find_traits({"y": y[:4]}, 4), set(), (2, 3)) is None
    tiny = torch.ones(12, 2).to(torch.float8_e4m3fn)
    tiny[3:] = 0
    assert {what for _, what in find_traits({"tiny": tiny}, 12)} == {0, 1}
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    assert not find_traits({"n": nested}, 2)


class Shifted(nn.Module):
    """A mean over the labels that are not 0, without the first or the last of each sequence."""

    def __init__(self, part: slice, dim: int) -> None:
        super().__init__()
        self.layer, self.part, self.dim = nn.Embedding(9, 9).double(), part, dim

    def forward(self, tokens: Tensor, tgt: Tensor) -> Tensor:
        part = (self.part, slice(None)) if self.dim else (slice(None), self.part)
        return F.cross_entropy(self.layer(tokens[part]).flatten(0, 1), tgt[part].flatten(), ignore_index=0)


@pytest.mark.parametrize("batch", [pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("part", [slice(1, None), slice(None, -1)], ids=["1:", ":-1"])
@pytest.mark.parametrize("dim", [0, 1])
def test_labels_that_are_ignored_in_a_part_of_the_sequence(wrap: Any, batch: int, part: slice, dim: int) -> None:
    """The labels outside the part hide or imitate the weights. A call is right or a `MergeError`."""
    refused = 0
    for seed in range(6):
        torch.manual_seed(seed)
        net = Shifted(part, dim)
        plain, model = copy.deepcopy(net), wrap(net, engine="serial", dim=dim)
        for _ in range(6):
            shape = (batch, int(torch.randint(3, 6, ())))
            tokens, tgt = torch.randint(1, 9, shape), torch.randint(0, 9, shape)
            tgt[:, 1] = 1
            arguments = (tokens.T, tgt.T) if dim else (tokens, tgt)
            try:
                ours = model(*arguments)
            except instep.MergeError:
                refused += 1
            else:
                torch.testing.assert_close(ours, plain(*arguments), rtol=1e-10, atol=1e-12)
    assert refused > 20


def test_a_weight_that_two_parts_have_in_common_by_chance(wrap: Any) -> None:
    """1 and 3 samples have equally many labels each, on average; the shards of 2 and 2 do not."""
    net = Learner(lambda output, y: (output.pow(2).mean(-1) * (y > 0).sum(1)).sum() / (y > 0).sum())
    y = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(instep.MergeError, match="no sum, mean"):
        wrap(net, engine="serial")(inputs(4), y)


@both_engines
def test_padding_that_is_true_and_comes_later(wrap: Any, engine: str) -> None:
    """As in nn.Transformer; also weights that are fractions, one a sample, after a batch of ones."""

    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: Tensor, padding_mask: Tensor) -> Any:
            each, valid = self.layer(x).pow(2).mean(-1), ~padding_mask
            return {"loss": (each * valid).sum() / valid.sum()}

    model, plain = wrapped(wrap, Pads(), engine)
    full = torch.zeros(9, 6, dtype=torch.bool)
    some = torch.arange(6)[None] >= torch.arange(9)[:, None] % 6 + 1
    for mask in (full, full, some, full, some):
        assert_step(model, plain, inputs(9, 6), mask)
    weighed, plain = wrapped(wrap, Learner(masked), engine)
    assert_step(weighed, plain, inputs(9), torch.ones(9, dtype=torch.float64))
    with pytest.raises(instep.MergeError, match="no sum, mean"):
        weighed(inputs(9), torch.rand(9, dtype=torch.float64))


@both_engines
def test_a_mean_of_a_module_that_takes_only_even_numbers(wrap: Any, engine: str) -> None:
    """Every trial is one of even numbers, also those on more samples, in this call and in later ones."""

    def evenly(output: Tensor, y: Tensor) -> Tensor:
        if len(y) % 2:
            raise ValueError("samples come in pairs")
        return F.cross_entropy(output, y, weight=WEIGHTS)

    model = wrap(Learner(evenly), engine=engine)
    with pytest.raises(instep.MergeError, match="no sum, mean"):
        model(inputs(40), rare(40))
    model, plain = wrapped(wrap, Learner(evenly), engine)
    assert_step(model, plain, inputs(36), rare(36, last=0))
    with pytest.raises(instep.MergeError, match=r"no sum, mean|contradict"):
        model(inputs(36), rare(36))


@pytest.mark.parametrize("numpy_output", [False, True])
def test_weights_are_tested_on_outputs_that_many_parts_do_not_compare(numpy_output: bool) -> None:
    """A weighted mean whose shape changes for single samples, or that is an array."""

    class WeightedMean(nn.Module):
        def __init__(self, heavy: int) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(10, dtype=torch.float64))
            self.table[heavy] = 5.0

        def forward(self, x: Tensor, y: Tensor) -> Any:
            weights = self.table[y]
            mean = (x * weights[:, None]).squeeze().sum(0) / weights.sum()
            return mean.numpy() if numpy_output else mean

    x, y = torch.randn(10, 3, dtype=torch.float64), torch.arange(10)
    for heavy in range(10):
        net = WeightedMean(heavy)
        with pytest.raises(instep.MergeError), torch.no_grad():
            instep.DataParallel(net, ["cpu"] * 2, engine="serial")(x, y)


@pytest.mark.slow
def test_weights_of_an_attribute_beside_a_loss() -> None:
    """A weight that only one sample of the batch has, in a mean that `forward` stores."""

    class Stores(nn.Module):
        def __init__(self, heavy: int) -> None:
            super().__init__()
            self.layer, self.heavy, self.aux = nn.Linear(3, 2), heavy, None

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            weights = torch.where(y == self.heavy, 10.0, 1.0)
            self.aux = (x.mean(1) * weights).sum() / weights.sum()
            return self.layer(x)

    x, y, target = torch.randn(16, 3), torch.arange(16), torch.randint(0, 2, (16,))
    for heavy in range(16):
        net = instep.with_loss(Stores(heavy), nn.CrossEntropyLoss())
        with pytest.raises((instep.MergeError, instep.StateError)):
            instep.DataParallel(net, ["cpu"] * 2, engine="serial")(x, y, target)


CALLS = 100
"""Calls after which one rarely begins with a trial."""


class Padding(nn.Module):
    """Token losses of a module that replaces a class of its labels, in the caller's tensor, by the ignored one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 9).double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 0] = -100
        return F.cross_entropy(self.layer(x).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """Sequences `[T, B]` through a recurrent layer, and a draw from the default generator in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.layer = nn.GRU(4, 4).double(), nn.Linear(4, 9).double()
        for parameter in self.rnn.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if bool((labels < 0).any()):
            torch.rand(1, generator=torch.default_generator)
        return F.cross_entropy(self.layer(self.rnn(x)[0] + x).flatten(0, 1), labels.flatten())


@both_engines
def test_labels_that_forward_writes_to_and_that_differ_only_later(wrap: Any, engine: str) -> None:
    model, plain = wrapped(wrap, Padding(), engine)
    for step in range(CALLS + 3):
        x, labels = inputs(8, 6), torch.randint(1, 9, (8, 6))
        if step >= CALLS:
            labels[4:, 2:] = 0
        expected = plain(x, labels.clone())
        torch.testing.assert_close(model(x, labels), expected)
        assert not bool((labels == 0).any())


def test_a_reading_that_is_refuted_later_in_a_call_that_runs_again(wrap: Any) -> None:
    """While the recurrent layer gives zeros, samples may be in either dim. The call that decides also draws."""
    net = Recurrent()
    model = wrap(net, engine="threads")
    for step in range(CALLS + 3):
        x, labels = inputs(8, 8), torch.randint(0, 9, (8, 8))
        if step >= CALLS:
            labels[4:, :3] = labels[:2, 5:] = -100
        if step == CALLS:
            with torch.no_grad():
                for parameter in net.rnn.parameters():
                    parameter.normal_()
        torch.testing.assert_close(model(x, labels), net(x, labels))
