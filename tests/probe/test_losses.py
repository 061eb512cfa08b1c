"""Losses: what a mean is over is found out by the numbers, and gradients are those of one device on uneven batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep

from .helpers import Net, assert_same

ENGINES = ["serial", "threads", "processes"]
both_engines = pytest.mark.parametrize("engine", ENGINES)
WORDS = 20


class Tagger(nn.Module):
    """A class for every token; the loss ignores labels equal to `ignore`."""

    def __init__(self, ignore: int = -100, shift: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.ignore, self.shift, self.reduction = ignore, shift, reduction

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        logits = self.head(self.embed(ids))
        if mask is not None:
            loss = (logits.pow(2).mean(-1) * mask).sum() / mask.sum()
        elif labels is None:
            return logits
        else:
            scores, wanted = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
            loss = F.cross_entropy(
                scores.flatten(0, 1), wanted.flatten(), ignore_index=self.ignore, reduction=self.reduction
            )
        return {"loss": loss, "logits": logits}


def ragged(batch: int, pad: int, length: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which each sample has fewer than the one before."""
    ids = torch.randint(1, WORDS, (batch, length))
    labels = ids.clone()
    for index in range(batch):
        labels[index, max(2, length - index) :] = pad
    return ids, labels


@pytest.fixture
def made() -> Iterator[list[instep.DataParallel]]:
    models: list[instep.DataParallel] = []
    yield models
    for model in models:
        model.close()


def assert_step(model: Any, net: nn.Module, plain: nn.Module, **batch: Any) -> None:
    for module in (net, plain):
        module.zero_grad()
    ours, theirs = model(**batch), plain(**batch)
    torch.testing.assert_close(ours["loss"], theirs["loss"])
    ours["loss"].backward()
    theirs["loss"].backward()
    for one, two in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


KINDS: dict[str, tuple[dict[str, Any], int, str]] = {
    "ignored": ({}, -100, "labels >= 0"),
    "ignored, shifted": ({"shift": True}, -100, "labels[..., 1:] >= 0"),
    "minus one": ({"ignore": -1}, -1, "labels >= 0"),
    "zero is padding": ({"ignore": 0}, 0, "labels > 0"),
    "summed": ({"reduction": "sum"}, -100, "sum of the parts"),
}


@both_engines
@pytest.mark.parametrize(("batch", "private"), [(2, False), (3, False), (7, True), (12, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_over_tokens(made: Any, engine: str, private: bool, batch: int, kind: str) -> None:
    options, pad, words = KINDS[kind]
    net = Tagger(**options)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 3, engine=engine, private_copies=private)
    made.append(model)
    ids, labels = ragged(batch, pad)
    assert_step(model, net, plain, ids=ids, labels=labels)
    assert words in dict(model.explain(ids=ids, labels=labels).outputs)["loss"]


@both_engines
def test_a_mean_over_a_mask(made: Any, engine: str) -> None:
    net = Tagger()
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    ids, labels = ragged(7, -100)
    assert_step(model, net, plain, ids=ids, mask=(labels >= 0).float())
    assert_step(model, net, plain, ids=ids, mask=labels >= 0)


@both_engines
@pytest.mark.parametrize("shift", [False, True])
def test_full_labels_say_nothing_and_ragged_ones_are_asked_again(made: Any, engine: str, shift: bool) -> None:
    """Labels without padding fit a mean over samples too: that is used as long as it says the same."""
    net = Tagger(shift=shift)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    full = torch.randint(0, WORDS, (7, 9))
    assert_step(model, net, plain, ids=full, labels=full)
    ids, labels = ragged(7, -100)
    trials = model._instep_runner.binding("forward").probe.last_record.trials.count
    assert_step(model, net, plain, ids=ids, labels=labels)
    assert model._instep_runner.binding("forward").probe.last_record.trials.count == trials + 1
    labels[5, 1] = 0  # a label of class 0 is one that counts
    ids[5, 1] = 0
    assert_step(model, net, plain, ids=ids, labels=labels)
    for batch in (2, 5, 9, 16):
        ids, labels = ragged(batch, -100)
        assert_step(model, net, plain, ids=ids, labels=labels)


@both_engines
def test_a_shard_without_a_label_does_not_count(made: Any, engine: str) -> None:
    net = Tagger()
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    ids, labels = ragged(8, -100)
    assert_step(model, net, plain, ids=ids, labels=labels)
    labels[4:] = -100
    assert_step(model, net, plain, ids=ids, labels=labels)


@both_engines
def test_a_classifier(made: Any, engine: str) -> None:
    class Classifies(nn.Linear):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            scores = super().forward(x)
            found = scores.argmax(1)
            return {"loss": F.cross_entropy(scores, target), "right": (found == target).sum(), "found": found}

    net = Classifies(4, 3)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 3, engine=engine)
    made.append(model)
    for batch in (7, 10, 23):
        x, target = torch.randn(batch, 4), torch.randint(0, 3, (batch,))
        target[::2] = plain.weight.matmul(x.T).add(plain.bias[:, None]).argmax(0)[::2]
        assert_step(model, net, plain, x=x, target=target)
        assert torch.equal(model(x=x, target=target)["right"], plain(x=x, target=target)["right"])


@both_engines
def test_a_mean_over_tokens_that_is_left_on_the_module(made: Any, engine: str) -> None:
    class Leaves(Tagger):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(ids, labels)
            self.loss = out["loss"]
            return out["logits"]

    net = Leaves()
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    full = torch.randint(1, WORDS, (7, 9))
    for ids, labels in ((full, full), ragged(7, -100), ragged(6, -100)):
        for module in (net, plain):
            module.zero_grad()
        model(ids, labels)
        plain(ids, labels)
        torch.testing.assert_close(net.loss, plain.loss)
        net.loss.backward()
        plain.loss.backward()
        torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)


def test_a_mean_with_weights_that_are_not_arguments(made: Any) -> None:
    """Weights of classes that only forward has: no line is right, and none is offered."""

    class Weighs(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return {"loss": F.cross_entropy(super().forward(x), labels, weight=torch.tensor([1.0, 5.0, 20.0]))}

    model = instep.DataParallel(Weighs(4, 3), ["cpu"] * 2)
    made.append(model)
    with pytest.raises(instep.MergeError, match=r"'loss'.*no sum, mean") as caught:
        model(torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 2]))
    assert "No rule by name gives the value of the whole batch" in str(caught.value)
    assert "weighted_by(lambda" not in str(caught.value)


@both_engines
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_of_both_layouts(made: Any, engine: str, layout: torch.layout) -> None:
    """As arguments; as outputs with gradients torch hands only jagged ones through a function of its own."""

    class Pads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nested.to_padded_tensor(super().forward(x), 0.0, (len(x.unbind()), 5, 4))

    rows = [torch.randn(length, 3) for length in (2, 5, 1, 4, 3, 1, 2)]
    net = Pads(3, 4)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 3, engine=engine)
    made.append(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the strided layout a prototype
        ours, theirs = [module(torch.nested.nested_tensor(rows, layout=layout)) for module in (model, plain)]
    torch.testing.assert_close(ours, theirs)
    for out in (ours, theirs):
        out.sin().sum().backward()
    for one, two in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1}


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=1, n_head=2, **SMALL, **options)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@both_engines
@pytest.mark.parametrize("batch", [3, 7])
def test_gpt2_with_padded_labels(made: Any, engine: str, batch: int) -> None:
    net = gpt2(**STILL)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    ids, labels = ragged(batch, -100)
    assert_step(model, net, plain, input_ids=ids, labels=labels, use_cache=False)
    sizes = [batch - batch // 2, batch // 2]
    parts = zip(ids.split(sizes), labels.split(sizes), strict=True)
    naive = sum(plain(input_ids=a, labels=b).loss * len(a) for a, b in parts) / batch
    whole = plain(input_ids=ids, labels=labels).loss
    assert abs(naive - whole) > 1e-4  # what a mean over samples would give


@both_engines
@pytest.mark.parametrize("count", [int, torch.tensor])
def test_gpt2_with_a_given_number_of_labels(made: Any, engine: str, count: Any) -> None:
    net = gpt2(**STILL)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    ids, labels = ragged(7, -100)
    num_items = count(int((labels[:, 1:] >= 0).sum()))
    assert_step(model, net, plain, input_ids=ids, labels=labels, num_items_in_batch=num_items, use_cache=False)
    explained = model.explain(input_ids=ids, labels=labels, num_items_in_batch=num_items, use_cache=False)
    assert "sum" in dict(explained.outputs)["loss"]


def test_gpt2_that_drops_out_is_tried_in_evaluation(made: Any) -> None:
    net = gpt2()
    model = instep.DataParallel(net, ["cpu"] * 2)
    made.append(model)
    ids, labels = ragged(7, -100)
    assert model(input_ids=ids, labels=labels).loss.ndim == 0
    assert "labels[..., 1:] >= 0" in dict(model.explain(input_ids=ids, labels=labels).outputs)["loss"]
    assert model.training


@both_engines
@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForMaskedLM"])
def test_bert(made: Any, engine: str, kind: str) -> None:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = getattr(transformers, kind)(config)
    plain = copy.deepcopy(net)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    made.append(model)
    ids, labels = ragged(7, -100)
    mask = (labels >= 0).long()
    wanted = labels if kind == "BertForMaskedLM" else torch.randint(0, 2, (7,))
    model.train()
    assert_step(model, net, plain, input_ids=ids, attention_mask=mask, labels=wanted)


RARE = {
    "a class that weighs more": lambda h, y: F.cross_entropy(h, y, weight=torch.tensor([1.0, 1.0, 20.0, 1.0])),
    "a class that is left out": lambda h, y: F.cross_entropy(h, y, ignore_index=2),
    "lengths": lambda h, y: (h.pow(2).mean(1) * (y + 1)).sum() / (y + 1).sum(),
}


@both_engines
@pytest.mark.parametrize("name", RARE)
def test_samples_are_chosen_among_which_rare_values_are(wrap: Any, engine: str, name: str) -> None:
    """By whatever name: among the first five of them all weigh alike, and a mean over samples would be proven."""
    y = torch.arange(30) % 2 * (0 if name == "lengths" else 1)
    y[-3:] = 2
    model = wrap(Net(lambda _, h, y: RARE[name](h, y)), engine=engine)
    with pytest.raises(instep.MergeError, match="no sum, mean or constant explains it"):
        model(torch.randn(30, 3), y=y)


@both_engines
def test_a_mask_that_says_what_is_padding(wrap: Any, engine: str) -> None:
    """Nothing is padded in the first batch."""

    def mean(_: Any, h: Tensor, padding_mask: Tensor) -> Tensor:
        valid = ~padding_mask
        return (h.pow(2).mean(-1) * valid).sum() / valid.sum()

    net, lengths = Net(mean), torch.tensor([6, 1, 3, 2, 5, 4, 6, 6, 1])
    model = wrap(net, 3, engine=engine)
    for mask in (torch.zeros(9, 6, dtype=torch.bool), torch.arange(6) >= lengths[:, None]):
        x = torch.randn(9, 6, 3)
        assert_same(model(x, padding_mask=mask), net(x, padding_mask=mask))
