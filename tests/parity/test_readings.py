"""Arguments whose sizes do not say what the batch is: the probe finds it, and training is that of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from instep.errors import MergeError, StructureError

VOCABULARY, FEATURES, CLASSES = 11, 6, 4


def train(
    net: nn.Module,
    batches: Sequence[tuple[Any, ...]],
    loss: Callable[..., Tensor],
    engine: str = "threads",
    replicas: int = 2,
    **options: Any,
) -> Any:
    """Train plainly and wrapped. Asserts equal losses and gradients in each step; returns the wrapper."""
    net = net.double()
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * replicas, engine=engine, **options) as model:
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, net)]
        for batch in batches:
            values = []
            for module, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                value = loss(module, *batch)
                value.backward()
                values.append(value.detach())
            torch.testing.assert_close(values[1], values[0], rtol=1e-10, atol=1e-12)
            for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11), name
            for optimizer in optimizers:
                optimizer.step()
            assert " alone: " not in model.explain(*batch).heading
    return model


def ran_on(model: Any, *args: Any) -> dict[str, str]:
    """What `explain` says of each argument."""
    return {path: action for path, _, action in model.explain(*args).inputs}


# Lists


class Pair(nn.Module):
    """Takes what `default_collate` makes of `(x, y)` pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(x), y)


def pairs(size: int) -> tuple[list[Tensor]]:
    data = [(torch.randn(FEATURES).double(), int(torch.randint(CLASSES, ()))) for _ in range(size)]
    return (torch.utils.data.default_collate(data),)


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("first", [7, 2], ids=["seven samples", "as many samples as entries"])
def test_a_collated_list(engine: str, first: int) -> None:
    batches = [pairs(first), pairs(5), pairs(2), pairs(8)]
    model = train(Pair(), batches, lambda module, batch: module(batch), engine)
    assert ran_on(model, *pairs(2)) == {"batch.0": "split along dim 0", "batch.1": "split along dim 0"}


class Images(nn.Module):
    """Takes a list of images `[3, H, W]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 3, padding=1)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.conv(image[None])[0].mean((1, 2)) for image in images])


def images(count: int, *, equal: bool) -> tuple[list[Tensor]]:
    return ([torch.randn(3, 5 + (0 if equal else index), 6).double() for index in range(count)],)


@pytest.mark.parametrize("equal", [True, False], ids=["equal sizes", "different sizes"])
@pytest.mark.parametrize("first", [3, 4], ids=["as many images as channels", "four images"])
def test_a_list_of_images(equal: bool, first: int) -> None:
    batches = [images(count, equal=equal) for count in (first, 5, 3)]
    model = train(Images(), batches, lambda module, batch: module(batch).square().sum())
    assert ran_on(model, *batches[0]) == {"images": "one entry per sample"}


# Sequences


class Seq2Seq(nn.Module):
    """Token ids `[T, B]`; the recurrent layers have `batch_first=False`."""

    def __init__(self, *, loss_inside: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.encoder, self.decoder = nn.GRU(FEATURES, FEATURES), nn.GRU(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.loss_inside = loss_inside

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        _, hidden = self.encoder(self.embedding(src))
        logits = self.head(self.decoder(self.embedding(tgt[:-1]), hidden)[0])
        return F.cross_entropy(logits.flatten(0, 1), tgt[1:].flatten()) if self.loss_inside else logits


def tokens(src: int, tgt: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (src, batch)), torch.randint(VOCABULARY, (tgt, batch))


def token_loss(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    output = module(src, tgt)
    return output if output.ndim == 0 else F.cross_entropy(output.flatten(0, 1), tgt[1:].flatten())


@pytest.mark.parametrize("loss_inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize(
    "sizes",
    [(5, 6, 7), (5, 5, 7), (7, 7, 7), (5, 7, 7), (7, 6, 7)],
    ids=["three sizes", "equal lengths", "T == B", "target T == B", "source T == B"],
)
def test_seq2seq_with_the_batch_second(sizes: tuple[int, int, int], loss_inside: bool) -> None:
    batches = [tokens(*sizes), tokens(4, 6, 5), tokens(6, 6, 6)]
    model = train(Seq2Seq(loss_inside=loss_inside), batches, token_loss)
    expected = "split along dim 1 (found by the probe)"
    assert ran_on(model, *tokens(*sizes)) == {"src": expected, "tgt": expected}
    assert model.explain(*tokens(4, 4, 4)).heading.startswith("a batch of 4: 2 on cpu, 2 on cpu")


def test_seq2seq_with_the_batch_second_on_processes() -> None:
    train(Seq2Seq(loss_inside=False), [tokens(5, 6, 7), tokens(5, 6, 3)], token_loss, "processes")


class Recurrent(nn.Module):
    """Gives the new state back, as a loop over a long text does."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, *, batch_first: bool) -> None:
        super().__init__()
        self.layer = kind(FEATURES, FEATURES, num_layers=layers, batch_first=batch_first)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.layer(x, state)
        return self.head(output), state


def recurrent_loss(module: nn.Module, x: Tensor, state: Any) -> Tensor:
    output, state = module(x, state)
    output, state = module(x + 1, state)
    total = sum(part.square().sum() for part in (state if isinstance(state, tuple) else (state,)))
    return output.sin().sum() + total


@pytest.mark.parametrize("layers", [1, 2, 5], ids=["one layer", "two layers", "as many layers as samples"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_state_as_an_argument(kind: type[nn.RNNBase], layers: int, batch_first: bool) -> None:
    def batch(size: int, steps: int) -> tuple[Tensor, Any]:
        shape = (size, steps, FEATURES) if batch_first else (steps, size, FEATURES)
        h, c = torch.randn(2, layers, size, FEATURES).double()
        return torch.randn(shape).double(), ((h, c) if kind is nn.LSTM else h)

    train(Recurrent(kind, layers, batch_first=batch_first), [batch(5, 3), batch(4, 4), batch(3, 3)], recurrent_loss)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None) -> Tensor:
        return self.encoder(src, mask, src_key_padding_mask)


@pytest.mark.parametrize("steps", [4, 7], ids=["T != B", "T == B"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_transformer_with_the_batch_second_and_a_mask_with_the_batch_first(steps: int, causal: bool) -> None:
    def batch(steps: int, size: int) -> tuple[Tensor, Tensor | None, Tensor]:
        lengths = torch.randint(1, steps + 1, (size, 1))
        padding = (torch.arange(steps) >= lengths).double() * -1e9
        mask = torch.ones(steps, steps).triu(1).double() * -1e9 if causal else None
        return torch.randn(steps, size, FEATURES).double(), mask, padding

    def loss(module: nn.Module, src: Tensor, mask: Tensor | None, padding: Tensor) -> Tensor:
        return (module(src, mask, src_key_padding_mask=padding) * (padding == 0).T[..., None]).sin().sum()

    train(Encoder(), [batch(steps, 7), batch(6, 5), batch(5, 5)], loss)


# Vectors that every replica gets


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, class_weights: Tensor) -> Tensor:
        return self.layer(x) * class_weights


@pytest.mark.parametrize("first", [CLASSES, 7], ids=["as many classes as samples", "seven samples"])
def test_a_vector_that_is_not_batched(first: int) -> None:
    weights = torch.rand(CLASSES).double()
    batches = [(torch.randn(size, FEATURES).double(), weights) for size in (first, 5, CLASSES)]
    model = train(Weighted(), batches, lambda module, x, w: module(x, w).sin().sum())
    assert ran_on(model, *batches[0])["class_weights"] == "whole (found by the probe)"


def test_a_vector_with_one_entry_per_sample_is_split() -> None:
    batches = [(torch.randn(size, FEATURES).double(), torch.rand(size, 1).double()) for size in (CLASSES, 5)]
    model = train(Weighted(), batches, lambda module, x, w: module(x, w).sin().sum())
    assert ran_on(model, *batches[0])["class_weights"] == "split along dim 0"


# Other ways to call


class TwoMethods(Seq2Seq):
    def encode(self, src: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.encoder(self.embedding(src))
        return output.sum(0) / lengths[:, None], hidden


def test_each_method_has_a_reading_of_its_own() -> None:
    net = TwoMethods(loss_inside=False).double()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        for size in (7, 5):
            src, lengths = torch.randint(VOCABULARY, (5, size)), torch.rand(size).double() + 1
            torch.testing.assert_close(model.call("encode", src, lengths), net.encode(src, lengths))
            torch.testing.assert_close(model(src, src), net(src, src))


def test_with_loss() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(VOCABULARY, FEATURES), nn.GRU(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.embedding(x))[0].flatten(0, 1)

    class FlatLoss(nn.CrossEntropyLoss):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return super().forward(output, target.flatten())

    def batch(steps: int, size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(VOCABULARY, (steps, size)), torch.randint(CLASSES, (steps, size))

    batches = [batch(6, 7), batch(4, 5), batch(5, 5)]
    train(instep.with_loss(Tagger(), FlatLoss()), batches, lambda module, x, y: module(x, y))


def test_the_reading_that_is_kept_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Seq2Seq(loss_inside=False).double()
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
        model(*tokens(5, 6, 7))
        monkeypatch.setattr("instep.call.runner.try_readings", lambda *_, **__: pytest.fail("tried again"))
        for sizes in ((4, 6, 9), (5, 5, 5), (8, 5, 8)):
            batch = tokens(*sizes)
            torch.testing.assert_close(model(*batch), net(*batch))
            assert model.explain(*batch).heading.startswith(f"a batch of {sizes[2]}:")


def test_a_declared_dim_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.call.runner.try_readings", lambda *_, **__: pytest.fail("tried"))
    net, batch = Seq2Seq(loss_inside=False).double(), tokens(5, 6, 7)
    options: list[dict[str, Any]] = [{"dim": 1}, {"in_dims": 1}, {"in_dims": {"src": 1, "tgt": 1}}]
    for option in options:
        with instep.DataParallel(net, ["cpu"] * 2, engine="serial", **option) as model:
            torch.testing.assert_close(model(*batch), net(*batch))
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine="serial", probe=False) as model,
        pytest.raises(StructureError, match="cannot split argument"),
    ):
        model(*batch)


def test_explain_lists_the_readings_before_the_first_call() -> None:
    net, batch = Seq2Seq(loss_inside=False).double(), tokens(5, 6, 7)
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
        heading = "readings that fit; the first call tries them on a few samples, in this order:"
        assert f"{heading}\n  dim=1   # a batch of 7" in str(model.explain(*batch))
        model(*batch)
        assert "src  Tensor [5, 7]  split along dim 1 (found by the probe)" in str(model.explain(*batch))


class Prompted(nn.Module):
    def forward(self, src: Tensor, tgt: Tensor, prompt: Tensor) -> Tensor:
        return (src.double().sum(0) * tgt.double().sum(0)).sin() + prompt[0]


def test_explain_lists_less_likely_readings_too() -> None:
    batch = (*tokens(5, 6, 7), torch.arange(7)[None])
    with instep.DataParallel(Prompted(), ["cpu"] * 2, engine="serial") as model:
        assert model.explain(*batch).readings == (
            "dim=1   # a batch of 7",
            "in_dims={'src': 1, 'tgt': 1}   # a batch of 7",  # every replica gets the whole prompt
        )
        torch.testing.assert_close(model(*batch), Prompted()(*batch))


# What is refused


class Recurrence(nn.Module):
    """A recurrence over dim 0 without torch's recurrent layers. Each step reads the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[0])]
        for step in x:
            states.append(torch.tanh(self.linear(step) + states[-1]))
        return torch.stack(states[1:])


def test_dim_1_is_offered_if_the_outputs_of_parts_along_dim_0_do_not_merge() -> None:
    net, x = Recurrence().double(), torch.randn(6, 4, 3, dtype=torch.float64)
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model,
        pytest.raises(instep.MergeError, match="one device") as caught,
    ):
        model(x)
    assert str(caught.value).splitlines()[2].startswith("  dim=1   # ")
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", dim=1) as model:
        torch.testing.assert_close(model(x), net(x))


class RunningTotal(nn.Module):
    """Samples in dim 1 would fit the output, but not the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.total += float(x.square().sum())
        return x.sin()


def test_dim_1_is_not_offered_for_state() -> None:
    with (
        instep.DataParallel(RunningTotal(), ["cpu"] * 2, engine="serial") as model,
        pytest.raises(instep.StateError, match=r"state={'total': 'sum'}") as caught,
    ):
        model(torch.randn(6, 4, dtype=torch.float64))
    assert "dim=1" not in str(caught.value)


class Stack(nn.Module):
    """Works on a list of samples and on a list of batched tensors alike."""

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.stack(xs).sin()


def test_several_readings_that_agree_are_an_error_with_their_lines() -> None:
    xs = [torch.randn(4, 3) for _ in range(4)]
    with (
        instep.DataParallel(Stack(), ["cpu"] * 2, engine="serial") as model,
        pytest.raises(StructureError, match="each gives the outputs of one device") as caught,
    ):
        model(xs)
    for line in ("in_dims={'xs': 'samples'}", "in_dims={'xs': 0}"):
        assert line in str(caught.value)
        spec = eval(line.removeprefix("in_dims="))
        with instep.DataParallel(Stack(), ["cpu"] * 2, engine="serial", in_dims=spec) as model:
            torch.testing.assert_close(model(xs), Stack()(xs))


class Mixed(nn.Module):
    """Depends on all entries, however the arguments are read."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.double().flatten().softmax(0).max() * y.double().flatten().softmax(0).max()


def test_a_dim_that_a_trial_refutes_is_not_offered() -> None:
    x, y = tokens(5, 6, 7)
    with (
        instep.DataParallel(Mixed(), ["cpu"] * 2, engine="serial") as model,
        pytest.raises(StructureError, match="cannot split argument") as caught,
    ):
        model(x, y)
    assert "dim=1" not in str(caught.value)


def test_outputs_of_zeros_prove_no_reading() -> None:
    net = Seq2Seq(loss_inside=False).double()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model,
        pytest.raises(StructureError, match="did not decide it"),
    ):
        model(*tokens(5, 6, 7))


def test_features_and_positions_are_not_taken_for_the_batch() -> None:
    """A module without layers for `[T, B, F]` that mixes samples stays an error."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    with instep.DataParallel(Centred(), ["cpu"] * 2, engine="serial") as model:
        for x in (torch.randn(7, 4), torch.randn(7, 4, 3), torch.randn(7, 7, 3), torch.randn(7, 3, 4, 4)):
            with pytest.raises(MergeError, match="depend on other samples"):
                model(x)


def test_edges_are_not_taken_for_samples() -> None:
    class Messages(nn.Module):
        def forward(self, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
            source, target = edge_index
            return edge_weight.new_zeros(50).index_add(0, target, edge_weight * source).relu()

    edges = torch.stack([torch.arange(40), torch.arange(40)])
    with (
        instep.DataParallel(Messages(), ["cpu"] * 2, engine="serial") as model,
        pytest.raises(StructureError, match="cannot split argument"),
    ):
        model(edges, torch.randn(40))


@pytest.mark.parametrize("name", ["labels", "other"])
def test_padding_that_shows_later_is_weighted_or_an_error(name: str) -> None:
    """A mean over tokens looks like a mean over samples as long as no token is ignored."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(VOCABULARY, FEATURES), nn.GRU(FEATURES, CLASSES)

        def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.layer(self.embedding(ids))[0]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    class ByLabels(Tagger):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.loss(ids, labels)

    class ByOther(Tagger):
        def forward(self, ids: Tensor, other: Tensor) -> Tensor:
            return self.loss(ids, other)

    net: nn.Module = (ByLabels if name == "labels" else ByOther)().double()
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
        for padded in (False, False, True):
            ids, labels = torch.randint(VOCABULARY, (6, 8)), torch.randint(CLASSES, (6, 8))
            if padded:
                labels[2:, 5:] = -100
            if padded and name == "other":
                with pytest.raises(MergeError, match="no sum, mean or constant explains it"):
                    model(ids, labels)
            else:
                torch.testing.assert_close(model(ids, labels), net(ids, labels))


class Detector(nn.Module):
    """Finds nothing in any image before it is trained. Assigns its anchors at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)
        self.anchors = [torch.rand(9, 4), torch.rand(9, 4)]

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        scores = self.layer(torch.stack(images)).flatten(1)
        self.anchors = [anchor.clone() for anchor in self.anchors]
        return [{"boxes": self.anchors[0][row > 1e6], "scores": row[row > 1e6]} for row in scores[:, :9]]


def test_the_only_reading_that_runs_is_taken_if_an_output_follows_the_batch() -> None:
    images = [torch.randn(3, 8, 8) for _ in range(5)]  # 5 samples, or 3 of 5 leaves
    with instep.DataParallel(Detector(), ["cpu"] * 2, engine="serial") as model:
        assert [len(found["boxes"]) for found in model(images)] == [0] * 5
        assert "one entry per sample" in str(model.explain(images))


def test_readings_that_a_trial_refutes_are_not_offered() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, pair: list[Tensor]) -> Tensor:
            x, y = pair
            return self.layer(x).std() * y.mean() ** 3

    with instep.DataParallel(Mixed(), ["cpu"] * 2, engine="serial") as model:
        with pytest.raises(StructureError, match="no choice of dims that fits") as raised:
            model([torch.randn(2, 4), torch.randn(2, 4)])
        assert "in_dims={" not in str(raised.value)
