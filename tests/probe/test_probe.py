"""The probe: what a few samples in parts and together say about outputs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep

from .helpers import Net, assert_parity, assert_same, both_engines, probe_of, said, some


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Any:
        out = self.layers(x)
        return {"out": out, "loss": out.pow(2).mean()}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)


class Sequences(nn.Module):
    """[T, B, C], as recurrent networks and transformers give it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(0, 1).contiguous()


SEEN = {
    "MLP": (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), (3,), {"(output)": "dim 0"}),
    "LSTM": (Recurrent, (6, 3), {"0": "dim 0", "1.0": "dim 1", "1.1": "dim 1"}),
    "time first": (Sequences, (6, 3), {"(output)": "dim 1"}),
    "mean": (lambda: Net(lambda _, h: h.pow(2).mean()), (3,), {"(output)": "mean weighted by samples"}),
    "sum": (lambda: Net(lambda _, h: h.pow(2).sum()), (3,), {"(output)": "sum of the parts"}),
    "sum over classes": (lambda: Net(lambda _, h: h.sum(0)), (3,), {"(output)": "sum of the parts"}),
    "mean feature": (lambda: Net(lambda _, h: (h, h.mean(0))), (3,), {"0": "dim 0", "1": "mean weighted by samples"}),
    "weights": (lambda: Net(lambda s, h: (h, s.layer.weight.norm(dim=1))), (3,), {"1": "constant"}),
    "squeezed": (lambda: Net(lambda _, h: h[:, :1].squeeze()), (3,), {"(output)": "batch in dim 0"}),
    "a list of samples": (lambda: Net(lambda _, h: list(h)), (3,), {"(output)": "one entry per sample"}),
    "a pair in a list": (lambda: Net(lambda _, h: [h, -h]), (3,), {"0": "dim 0", "1": "dim 0"}),
}


@both_engines
@pytest.mark.parametrize(("batch", "private"), [(2, False), (3, False), (7, False), (7, True)])
@pytest.mark.parametrize("name", SEEN)
def test_outputs_are_known_for_what_they_are(wrap: Any, engine: str, private: bool, batch: int, name: str) -> None:
    make, shape, words = SEEN[name]
    options = {"engine": engine, "private_copies": private}
    x = torch.randn(batch, *shape)
    model = assert_parity(wrap, make(), x, loss=some, options=options)
    seen = said(model, x)
    for path, what in words.items():
        assert what in seen[path]


@both_engines
def test_batch_norm_in_training_is_not_mistaken(wrap: Any, engine: str) -> None:
    x = torch.randn(8, 3)
    model = wrap(BatchNormed(), engine=engine, on_unmerged_state="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(x)
    assert out["out"].shape == (8, 2)
    assert out["loss"].ndim == 0
    assert said(model, x)["loss"] == "mean weighted by samples (the probe)"
    net = BatchNormed().eval()
    assert_parity(wrap, net, x, loss=some, options={"engine": engine})


def test_batch_norm_without_statistics_is_compared_by_value(wrap: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    model, x = wrap(net), torch.randn(6, 3)
    model(x)
    assert model.explain(x).trial == "tried on 2 and 3 samples, separately and together"
    assert said(model, x) == {"(output)": "concatenated along dim 0 (the probe: batch in dim 0)"}


@both_engines
@pytest.mark.parametrize("kind", ["layer", "function", "attention"])
def test_dropout_is_not_mistaken(wrap: Any, engine: str, kind: str) -> None:
    """A layer is put to rest; other masks keep everything."""
    drop = nn.Dropout(0.5)

    def then(net: Net, h: Tensor) -> Any:
        if kind == "attention":
            h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=0.5 * net.training)[:, 0]
        else:
            h = drop(h) if kind == "layer" else F.dropout(h, 0.5, net.training)
        return {"h": h, "loss": h.pow(2).mean()}

    net, x = Net(then), torch.randn(6, 3)
    model = wrap(net, engine=engine)
    out = model(x)
    torch.testing.assert_close(out["loss"], out["h"].pow(2).mean())
    assert said(model, x)["loss"] == "mean weighted by samples (the probe)"


WRONG = {
    "softmax over the batch": (lambda _, h: {"p": h.softmax(0)}, "'p'.*depend on other samples"),
    "similarities": (lambda _, h: {"logits": h @ h.T}, "'logits'.*dims 0 and 1 both follow the batch"),
    "centred": (lambda _, h: h - h.mean(0), "the output.*depend on other samples"),
    "ranks": (lambda _, h: h[:, 0].argsort(), "depend on other samples"),
    "the two largest": (
        lambda _, h: {"mask": h >= h.flatten().topk(2).values.min()},
        "'mask'.*depend on other samples",
    ),
    "where the largest is": (lambda _, h: (h == h.max()).long(), "depend on other samples"),
    "unique": (lambda _, h: torch.unique((3 * h).long()), "its shapes are .* in the parts and .* in the whole"),
    "a list that looks around": (lambda _, h: [h[i] - h.mean(0) for i in range(len(h))], "not the same entries"),
}


@both_engines
@pytest.mark.parametrize("name", WRONG)
def test_samples_that_meet_are_an_error(wrap: Any, engine: str, name: str) -> None:
    """Before any replica has run, naming the leaf and the lines to choose from, with nothing changed."""
    then, words = WRONG[name]
    net = Net(then)
    model, x = wrap(net, engine=engine), torch.randn(7, 3)
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(instep.MergeError, match=words) as caught:
            model(x)
        assert "instep.all_gather" in str(caught.value)
        assert "merge=" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model._instep_replicas.replicas


BY_POSITION = {
    "every second": (lambda _, h: {"anchors": h[0::2], "others": h[1::2]}, "'anchors'.*its shapes are"),
    "pairs": (lambda _, h: h[: len(h) // 2 * 2].view(-1, 2 * h.shape[1]), "its shapes are"),
    "two views": (lambda _, h: torch.cat([h.view(2, -1, 4)[0] - h.view(2, -1, 4)[1], h[: len(h) // 2]]), "depend on"),
}


@both_engines
@pytest.mark.parametrize("batch", [6, 12])
@pytest.mark.parametrize("name", BY_POSITION)
def test_samples_chosen_by_their_position_are_an_error(wrap: Any, engine: str, name: str, batch: int) -> None:
    then, words = BY_POSITION[name]
    with pytest.raises(instep.MergeError, match=words):
        wrap(Net(then), engine=engine)(torch.randn(batch, 3))


@both_engines
def test_a_module_that_takes_pairs_is_tried_on_pairs(wrap: Any, engine: str) -> None:
    net, x = Net(lambda _, h: h.view(-1, 2, 4).mean(1)), torch.randn(12, 3)
    model = wrap(net, engine=engine)
    assert_same(model(x), net(x))
    assert probe_of(model).last_record.summary == "tried on 2 and 4 samples, separately and together"


SCALARS = {
    "a mean over tokens": lambda _, h: (h * (h > 0)).sum() / (h > 0).sum(),
    "the largest": lambda _, h: h.max(),
    "a norm": lambda _, h: h.norm(),
}


@both_engines
@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_that_no_rule_explains_is_an_error(wrap: Any, engine: str, name: str) -> None:
    then = SCALARS[name]
    net, x = Net(lambda s, h: {"loss": then(s, h)}), torch.randn(7, 3)
    with pytest.raises(instep.MergeError, match=r"'loss'.*no sum, mean or constant explains it"):
        wrap(net, engine=engine)(x)
    mine = wrap(net, engine=engine, merge={"loss": lambda parts, _: torch.stack(parts).max()})
    assert mine(x)["loss"].ndim == 0


def test_outputs_with_user_rules_get_no_verdict(wrap: Any) -> None:
    x = torch.randn(6, 3)
    for options in ({"merge": "cat"}, {"merge": {"p": "cat"}}, {"out_dims": {"p": 0}}, {"out_dims": 0}):
        model = wrap(Net(lambda _, h: {"p": h.softmax(0)}), **options)
        assert model(x)["p"].shape == (6, 4)
        assert not probe_of(model).last_record.outputs
    model = wrap(Net(lambda _, h: {"p": h.mean(), "q": h.sum()}), merge={"p": "max"})
    model(x)
    assert list(probe_of(model).last_record.outputs) == [("q",)]


@both_engines
def test_without_the_probe_the_tables_decide(wrap: Any, engine: str) -> None:
    x = torch.randn(6, 3)
    with pytest.raises(instep.MergeError, match="0-d tensor that differs"):
        wrap(Net(lambda _, h: h.mean()), engine=engine, probe=False)(x)
    assert wrap(Net(lambda _, h: h.softmax(0)), engine=engine, probe=False)(x).shape == (6, 4)


@both_engines
def test_numbers_and_strings(wrap: Any, engine: str) -> None:
    def then(_: Net, h: Tensor) -> Any:
        return {
            "n": len(h),
            "tokens": 3 * h.shape[0],
            "width": h.shape[1],
            "loss": h.pow(2).mean().item(),
            "total": h.sum().item(),
            "name": "net",
            "count": torch.tensor(h.shape[0]),
        }

    net, x = Net(then), torch.randn(7, 3)
    model = wrap(net, engine=engine)
    ours, plain = model(x), net(x)
    for key in ("n", "tokens", "width", "name"):
        assert ours[key] == plain[key]
    assert ours["count"].item() == 7
    assert ours["loss"] == pytest.approx(plain["loss"])
    assert ours["total"] == pytest.approx(plain["total"], rel=1e-4)
    with pytest.raises(instep.MergeError, match="a string that differs"):
        wrap(Net(lambda _, h: {"s": f"{len(h)} samples"}), engine=engine)(x)


@both_engines
def test_rows_that_are_selected_follow_one_another(wrap: Any, engine: str) -> None:
    net = Net(lambda _, h: h[h[:, 0] > 0])
    x = torch.randn(9, 3)
    x[0], x[2] = 10 * net.layer.weight[0].detach(), 9 * net.layer.weight[0].detach()
    assert_parity(wrap, net, x, loss=some, options={"engine": engine})


@pytest.mark.parametrize(
    ("dtype", "few", "many"), [(torch.float64, 0, 1), (torch.float32, 2, 4), (torch.bfloat16, 30, 60)]
)
def test_rounding_turns_over_few_integers(wrap: Any, dtype: torch.dtype, few: int, many: int) -> None:
    """The best of 100 scores for each of 100 places, which rounding decides in a few of them."""

    def best(_: Any, h: Tensor, turned: int) -> Tensor:
        classes = (torch.arange(100) % 7).repeat(len(h), 1)
        if len(h) == 5:
            classes[0, :turned] += 1
        return classes + h[:, :1].long() * 0

    model, x = wrap(Net(best).to(dtype)), torch.randn(7, 3, dtype=dtype)
    assert model(x, turned=few).shape == (7, 100)
    with pytest.raises(instep.MergeError, match="depend on other samples"):
        model(x, turned=many)


@both_engines
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_type_of_number(wrap: Any, engine: str, dtype: torch.dtype) -> None:
    net, x = Net(lambda _, h: ((h * 3).round().to(dtype), (h[:, :2] > 0).to(dtype).T)), torch.randn(7, 3)
    model = wrap(net, engine=engine)
    assert_same(model(x), net(x))
    assert probe_of(model).last_record.summary == "tried on 2 and 3 samples, separately and together"


@both_engines
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", ["rows", "mean", "left"])
def test_none_on_some_replicas_leaves_no_samples_out(wrap: Any, engine: str, what: str, first: bool) -> None:
    """A question about the batch has another answer on each shard."""

    def then(net: Any, h: Tensor, flag: Tensor) -> Any:
        there = bool(flag.any())
        net.aux = h.mean() if there and what == "left" else None
        extra = {"rows": h * 2, "mean": h.pow(2).mean(), "left": None}[what] if there else None
        return h, extra

    model, x = wrap(Net(then), 3, engine=engine), torch.randn(7, 3)
    if first:
        model(x, flag=torch.ones(7, dtype=torch.bool))
    flag = torch.zeros(7, dtype=torch.bool)
    flag[-1] = True
    with pytest.raises((instep.MergeError, instep.StateError)):
        model(x, flag=flag)


@both_engines
def test_none_adds_nothing_to_a_sum(wrap: Any, engine: str) -> None:
    net = Net(lambda _, h, flag: (h, h[flag].pow(2).sum() if bool(flag.any()) else None))
    model, x = wrap(net, 3, engine=engine), torch.randn(7, 3)
    for flag in (torch.ones(7, dtype=torch.bool), torch.arange(7) > 5):
        assert_same(model(x, flag=flag), net(x, flag=flag))
