"""The probe: what a few samples in parts and together say about outputs, and that nobody notices it."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.attempt import sizes_for, wider
from instep.probe import Probe
from instep.replicas.probing import excuse, is_probing
from instep.structure.tree import tensors_in

ENGINES = ["serial", "threads"]
both_engines = pytest.mark.parametrize("engine", ENGINES)


class Net(nn.Module):
    """A layer, and then what the test asks for."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.then = then

    def forward(self, x: Tensor, **others: Any) -> Any:
        return self.then(self, self.layer(x), **others)


@pytest.fixture
def wrap() -> Iterator[Callable[..., instep.DataParallel]]:
    made: list[instep.DataParallel] = []

    def make(net: nn.Module, replicas: int = 2, **options: Any) -> instep.DataParallel:
        made.append(instep.DataParallel(net, ["cpu"] * replicas, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()


def probe_of(model: instep.DataParallel, method: str = "forward") -> Probe:
    probe = model._method(method).probe
    assert probe is not None
    return probe


def said(model: instep.DataParallel, *args: Any, **kwargs: Any) -> dict[str, str]:
    return dict(model.explain(*args, **kwargs).outputs)


def assert_same(ours: Any, plain: Any) -> None:
    left, right = list(tensors_in(ours)), list(tensors_in(plain))
    assert len(left) == len(right)
    for one, two in zip(left, right, strict=True):
        torch.testing.assert_close(one, two)


def assert_parity(wrap: Any, net: nn.Module, *args: Any, loss: Callable[[Any], Tensor], **kwargs: Any) -> Any:
    """Outputs and gradients through the wrapper are the plain module's; the options are those of the wrapper."""
    options = kwargs.pop("options", {})
    plain = copy.deepcopy(net)
    model = wrap(net, **options)
    ours, theirs = model(*args, **kwargs), plain(*args, **kwargs)
    assert_same(ours, theirs)
    loss(ours).backward()
    loss(theirs).backward()
    for one, two in zip(net.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)
    return model


def some(output: Any) -> Tensor:
    return sum((t.double() * (1 + i)).sum() for i, t in enumerate(tensors_in(output)) if t.requires_grad)  # type: ignore


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
    "a list of samples": (lambda: Net(lambda _, h: list(h)), (3,), {"(output)": "one entry a sample"}),
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


def test_batch_norm_without_statistics_is_excused(wrap: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    model, x = wrap(net), torch.randn(6, 3)
    model(x)
    assert "only shapes count: batch normalisation" in model.explain(x).trial


@both_engines
@pytest.mark.parametrize("kind", ["layer", "function", "attention"])
def test_dropout_is_not_mistaken(wrap: Any, engine: str, kind: str) -> None:
    """A layer is put to rest; what draws only in training is tried in evaluation."""
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


@both_engines
def test_noise_is_no_error(wrap: Any, engine: str) -> None:
    """A sampler draws in every mode: its numbers say nothing, shapes do."""
    net, x = Net(lambda _, h: h + torch.randn_like(h)), torch.randn(6, 3)
    model = wrap(net, engine=engine)
    assert model(x).shape == (6, 4)
    assert "forward draws random numbers" in model.explain(x).trial
    assert said(model, x) == {"(output)": "joined along dim 0 (the probe: batch in dim 0, by shapes alone)"}
    scalar = wrap(Net(lambda _, h: (h + torch.randn_like(h)).mean()), engine=engine)
    with pytest.raises(instep.MergeError, match="0-d tensor that differs"):
        scalar(x)


WRONG = {
    "softmax over the batch": (lambda _, h: {"p": h.softmax(0)}, "'p'.*depend on other samples"),
    "similarities": (lambda _, h: {"logits": h @ h.T}, "'logits'.*dims 0 and 1 both follow the batch"),
    "centred": (lambda _, h: h - h.mean(0), "the output.*depend on other samples"),
    "ranks": (lambda _, h: h[:, 0].argsort(), "depend on other samples"),
    "unique": (lambda _, h: torch.unique((3 * h).long()), "its shapes are .* apart, .* together"),
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
    assert not model._instep_crew.replicas


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


def test_what_the_user_says_is_not_judged(wrap: Any) -> None:
    x = torch.randn(6, 3)
    for options in ({"merge": "cat"}, {"merge": {"p": "cat"}}, {"out_dims": {"p": 0}}, {"out_dims": 0}):
        model = wrap(Net(lambda _, h: {"p": h.softmax(0)}), **options)
        assert model(x)["p"].shape == (6, 4)
        assert not probe_of(model).last.found
    model = wrap(Net(lambda _, h: {"p": h.mean(), "q": h.sum()}), merge={"p": "max"})
    model(x)
    assert list(probe_of(model).last.found) == [("q",)]


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


@both_engines
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_type_of_number(wrap: Any, engine: str, dtype: torch.dtype) -> None:
    net, x = Net(lambda _, h: ((h * 3).round().to(dtype), (h[:, :2] > 0).to(dtype).T)), torch.randn(7, 3)
    model = wrap(net, engine=engine)
    assert_same(model(x), net(x))
    assert probe_of(model).last.words == "tried on 2 and 3 samples, and on them together"


def test_zeros_prove_nothing_until_there_are_others(wrap: Any) -> None:
    net = Net(lambda s, h: {"loss": (h * s.gate).pow(2).mean()})
    net.gate = nn.Parameter(torch.zeros(()))
    model, x = wrap(net), torch.randn(6, 3)
    assert model(x)["loss"].item() == 0
    assert not probe_of(model).last.found
    net.gate.data.fill_(1.0)
    torch.testing.assert_close(model(x)["loss"], net(x)["loss"])
    assert said(model, x)["loss"] == "mean weighted by samples (the probe)"


@both_engines
def test_what_a_few_samples_do_not_show_is_looked_for_among_more(wrap: Any, engine: str) -> None:
    """Five samples are all right, the next ones are not: a share, and a count."""
    net = Net(lambda _, h: {"share": (h[:, 0] > 0).float().mean(), "wrong": int((h[:, 0] <= 0).sum())})
    nn.init.zeros_(net.layer.bias)
    signs = torch.ones(20)
    signs[[6, 8, 9, 17]] = -1
    x = net.layer.weight[0].detach() * signs[:, None]
    model = wrap(net, engine=engine)
    torch.testing.assert_close(model(x)["share"], torch.tensor(16 / 20))
    assert model(x)["wrong"] == 4


def test_a_head_of_zeros_hides_nothing_for_ever(wrap: Any) -> None:
    net = Net(lambda _, h: h - h.mean(0))
    nn.init.zeros_(net.layer.weight)
    model, x = wrap(net), torch.randn(6, 3)
    assert model(x).abs().max() < 1e-6
    nn.init.ones_(net.layer.weight)
    with pytest.raises(instep.MergeError, match="depend on other samples"):
        model(x)


def test_the_number_of_trials_is_bounded(wrap: Any) -> None:
    model, x = wrap(Net(lambda s, h: {"h": h, "scale": s.layer.weight.norm()})), torch.randn(6, 3)
    for _ in range(40):
        model(x)
    assert 1 < probe_of(model).last.trials <= 6
    known = wrap(Net(lambda _, h: h))
    for batch in (6, 7, 9, 3, 2):
        known(torch.randn(batch, 3))
    assert probe_of(known).last.trials == 1
    assert len(probe_of(known)._structures) == 1


def test_a_new_structure_is_tried_anew(wrap: Any) -> None:
    def then(_: Net, h: Tensor, reduction: str = "mean") -> Tensor:
        return h.mean() if reduction == "mean" else h.sum()

    net, x = Net(then), torch.randn(7, 3)
    model = wrap(net)
    for reduction in ("mean", "sum", "mean", "sum"):
        torch.testing.assert_close(model(x, reduction=reduction), net(x, reduction=reduction))
    assert len(probe_of(model)._structures) == 2
    for index in range(30):
        model(x, reduction=f"kind {index}")
    with pytest.raises(instep.MergeError, match="0-d tensor that differs"):
        model(x, reduction="one kind more than are tried")  # and what they mean differs
    assert len(probe_of(model)._structures) == 32
    texts = wrap(Net(lambda _, h, text: h.mean()))
    for index in range(60):  # words that only pass through do not lead to a trial each
        torch.testing.assert_close(texts(x, text=f"text {index}"), texts.layer(x).mean())
    assert len(probe_of(texts)._structures) == 32


def test_other_methods_have_verdicts_of_their_own(wrap: Any) -> None:
    class Two(nn.Linear):
        def penalty(self, x: Tensor) -> Tensor:
            return self(x).pow(2).sum()

    net, x = Two(3, 4), torch.randn(5, 3)
    model = wrap(net)
    torch.testing.assert_close(model.call("penalty", x), net.penalty(x))
    torch.testing.assert_close(model(x), net(x))
    assert probe_of(model, "penalty").last.found != probe_of(model).last.found


@both_engines
def test_a_module_that_needs_more_samples_is_left_to_the_tables(wrap: Any, engine: str) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        assert len(h) >= 4, "at least four"
        return h

    net, x = Net(then), torch.randn(8, 3)
    model = wrap(net, engine=engine)
    torch.testing.assert_close(model(x), net(x))
    assert model.explain(x).trial == "not tried: AssertionError: at least four"


def test_an_interruption_passes(wrap: Any) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        if is_probing():
            raise KeyboardInterrupt
        return h

    model = wrap(Net(then))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(6, 3))
    assert not is_probing()


def test_a_collective_is_an_excuse(wrap: Any) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        excuse("instep.all_gather")
        return h - h.mean(0)

    model, x = wrap(Net(then)), torch.randn(6, 3)
    assert model(x).shape == (6, 4)
    assert "only shapes count: instep.all_gather" in model.explain(x).trial


COUNTED: list[int] = []
CALLS = 0


class Restless(nn.Module):
    """Changes whatever it can reach."""

    table: dict[str, int] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.plain = torch.zeros(2)
        self.history: list[Any] = []
        self.notes: dict[str, Any] = {"deep": {"list": []}}
        self.array = np.zeros(2)
        self.helper = type("Helper", (), {})()
        self.helper.seen = 0
        self.generator = torch.Generator()

    def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
        global CALLS
        CALLS += 1
        COUNTED.append(len(x))
        self.table["n"] = len(x)
        self.mean.add_(1)
        self.again = self.again + 1
        self.frozen.data.add_(1)
        self.plain += 1
        self.history.append(x)
        self.notes["deep"]["list"].append(1)
        self.notes["new"] = 1
        self.array += 1
        self.helper.seen += 1
        self.fresh = len(x)
        random.random()
        np.random.rand()
        torch.rand(1)
        torch.rand(1, generator=self.generator)
        x.mul_(2)
        extra["seen"].append(1)
        extra["x"].zero_()
        return self.layer(x)


def test_nobody_notices_a_trial() -> None:
    net = Restless()
    model = instep.DataParallel(net, ["cpu"] * 2, engine="serial")
    x, extra = torch.randn(6, 3), {"seen": [], "x": torch.ones(6, 2)}
    known = model._method("forward")
    assert known.probe is not None
    values = (x, extra)
    plan = known.planner.plan(("x", "extra"), values)
    fired: list[Any] = []
    net.layer.register_forward_hook(lambda *_: fired.append(1))
    before = copy.deepcopy({k: v for k, v in net.__dict__.items() if not k.startswith("_")} | dict(net.state_dict()))
    generators = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        net.generator.get_state(),
    )
    held = {name: id(value) for name, value in net.__dict__.items()}
    versions = {name: t._version for name, t in net.state_dict(keep_vars=True).items()}
    known.probe.before(net, torch.device("cpu"), plan, values, 2, 0, lambda shard: shard)
    assert known.probe.last.trials == 1
    assert "only shapes" in known.probe.last.words
    assert not fired
    assert {name: id(value) for name, value in net.__dict__.items()} == held
    assert {name: t._version for name, t in net.state_dict(keep_vars=True).items()} == versions
    assert torch.equal(x, values[0])
    assert extra["seen"] == []
    assert extra["x"].sum() == 12
    assert (CALLS, COUNTED, Restless.table) == (0, [], {})
    now = {k: v for k, v in net.__dict__.items() if not k.startswith("_")} | dict(net.state_dict())
    assert net.helper.seen == 0
    for name in before.keys() - {"helper", "generator"}:
        same = torch.equal if isinstance(before[name], Tensor) else np.array_equal
        assert (
            same(before[name], now[name]) if name in ("plain", "array", "mean") else str(before[name]) == str(now[name])
        )
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert generators[2] == np.random.get_state()[1].tolist()
    assert torch.equal(generators[3], net.generator.get_state())
    model.close()


def test_a_module_that_writes_to_its_weights_is_restored() -> None:
    net = Net(lambda s, h: h * s.layer.weight.data.mul_(0.5).sum())
    before = net.layer.weight.detach().clone()
    with instep.DataParallel(net, ["cpu"] * 2) as model, pytest.raises(instep.StateError, match="trainable parameter"):
        model(torch.randn(6, 3))
    assert torch.equal(net.layer.weight, before)


def test_hooks_fire_once_for_each_replica_and_never_for_a_trial(wrap: Any) -> None:
    net, fired = Net(lambda _, h: h), []
    net.layer.register_forward_hook(lambda *_: fired.append(is_probing()))
    net.layer.register_forward_pre_hook(lambda *_: fired.append(is_probing()))
    wrap(net, hooks="per_replica")(torch.randn(6, 3))
    assert fired
    assert not any(fired)


def test_weight_norm_still_has_its_weight(wrap: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.utils.weight_norm(nn.Linear(3, 4))
    x = torch.randn(6, 3)
    model = wrap(net)
    torch.testing.assert_close(model(x), net(x))
    assert probe_of(model).last.trials == 1


def test_compiled_code_is_not_compiled_for_a_trial(wrap: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(is_probing())
        return graph

    net, x = nn.Linear(3, 4), torch.randn(6, 3)
    net.compile(backend=backend)
    model = wrap(net, engine="serial")
    torch.testing.assert_close(model(x), nn.functional.linear(x, net.weight, net.bias))
    assert probe_of(model).last.found
    assert not any(graphs)
    torch._dynamo.reset()


def test_the_callers_autocast_is_kept(wrap: Any) -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.seen = seen

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            if is_probing() and out.dtype is not torch.bfloat16:
                raise AssertionError
            return out.float().mean()

    net, x = Looks(), torch.randn(6, 3)
    model = wrap(net)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), net(x), rtol=2e-2, atol=2e-2)
    assert probe_of(model).last.trials == 1
    assert probe_of(model).last.found


@both_engines
@pytest.mark.parametrize("private", [False, True])
def test_a_loss_that_is_left_on_the_module(wrap: Any, engine: str, private: bool) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            self.kl, self.attn, self.energy = h.pow(2).mean(), h.transpose(0, 1), h.abs().sum()
            return h

    net = Keeps()
    plain, x = copy.deepcopy(net), torch.randn(7, 3)
    model = wrap(net, engine=engine, private_copies=private)
    for _ in range(3):
        net.zero_grad()
        plain.zero_grad()
        for each in (model, plain):
            (each(x).sum() + net.kl + 2 * net.energy if each is model else 0)
        out, expected = model(x), plain(x)
        (out.sum() + net.kl + 2 * net.energy + net.attn[0].sum()).backward()
        (expected.sum() + plain.kl + 2 * plain.energy + plain.attn[0].sum()).backward()
        for name in ("kl", "attn", "energy"):
            torch.testing.assert_close(getattr(net, name), getattr(plain, name))
        torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


def test_a_running_total_is_not_taken_for_a_sum(wrap: Any) -> None:
    class Totals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.total = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + float(x.abs().sum())
            return self.layer(x)

    net = Totals()
    with pytest.raises(instep.StateError, match="'total'"):
        wrap(net)(torch.randn(6, 3))
    assert net.total == 0.0


@both_engines
def test_numbers_that_are_left_on_the_module(wrap: Any, engine: str) -> None:
    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.samples, self.level = len(x), float(x.mean())
            return super().forward(x)

    net = Notes(3, 4)
    model = wrap(net, engine=engine)
    for batch in (5, 7, 7, 4):
        x = torch.randn(batch, 3)
        model(x)
        assert net.samples == batch
        assert net.level == pytest.approx(float(x.mean()), abs=1e-6)


def test_a_total_that_begins_in_forward_is_noticed_at_the_second_call(wrap: Any) -> None:
    class Totals(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.total = getattr(self, "total", 0) + len(x)
            return super().forward(x)

    net = Totals(3, 4)
    model, x = wrap(net), torch.randn(6, 3)
    model(x)
    assert net.total == 6
    with pytest.raises(instep.StateError, match="'total'"):
        model(x)
    assert net.total == 6


def test_sizes_of_parts() -> None:
    assert [sizes_for(batch, 3) for batch in (6, 7, 9)] == [(3, 3), (3, 4), (3, 4)]
    assert [wider(batch) for batch in (2, 4, 5, 9, 100)] == [(1, 1), (1, 3), (2, 3), (4, 5), (16, 17)]
    assert [wider(batch, 9) for batch in (18, 19, 100)] == [(9, 9), (9, 10), (16, 17)]
