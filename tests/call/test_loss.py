"""`with_loss`: the loss of the whole batch, computed on the replicas, exact for shards of any kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import instep
from instep.errors import WrapError

B, CLASSES = 7, 5
ENGINES = ["serial", "threads", "processes"]


def indices(*shape: int, ignored: int | None = None) -> Tensor:
    target = torch.randint(CLASSES, (B, *shape))
    if ignored is not None:  # the first shard is ignored whole, and some of the others
        target[: (B + 1) // 2] = ignored
        target.view(-1)[-1] = ignored
    return target


WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
SIGNS = torch.randint(2, (B, CLASSES)).double()
CASES: dict[str, tuple[Any, Callable[[], Tensor]]] = {
    "mean": (nn.CrossEntropyLoss(), indices),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), indices),
    "ignored": (nn.CrossEntropyLoss(ignore_index=-100), lambda: indices(ignored=-100)),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=2), indices),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHTS), indices),
    "weights and ignored": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=-1), lambda: indices(ignored=-1)),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), indices),
    "smoothing, weights, ignored": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2, ignore_index=-100),
        lambda: indices(ignored=-100),
    ),
    "probabilities": (nn.CrossEntropyLoss(), lambda: torch.rand(B, CLASSES, dtype=torch.float64)),
    "probabilities, weights": (
        nn.CrossEntropyLoss(weight=WEIGHTS),
        lambda: torch.rand(B, CLASSES, dtype=torch.float64),
    ),
    "nll": (nn.NLLLoss(weight=WEIGHTS), indices),
    "mse": (nn.MSELoss(), lambda: torch.randn(B, CLASSES, dtype=torch.float64)),
    "l1": (nn.L1Loss(), lambda: torch.randn(B, CLASSES, dtype=torch.float64)),
    "huber": (nn.HuberLoss(delta=0.3), lambda: torch.randn(B, CLASSES, dtype=torch.float64)),
    "smooth l1": (nn.SmoothL1Loss(), lambda: torch.randn(B, CLASSES, dtype=torch.float64)),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), lambda: SIGNS),
    "soft margin": (nn.SoftMarginLoss(), lambda: SIGNS * 2 - 1),
    "multi margin": (nn.MultiMarginLoss(), indices),
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(), lambda: SIGNS),
    "kl": (nn.KLDivLoss(), lambda: torch.rand(B, CLASSES, dtype=torch.float64)),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), lambda: torch.rand(B, CLASSES, dtype=torch.float64)),
    "poisson": (nn.PoissonNLLLoss(), lambda: torch.rand(B, CLASSES, dtype=torch.float64)),
    "function": (functional.cross_entropy, indices),
    "partial": (partial(functional.cross_entropy, ignore_index=-100, weight=WEIGHTS), lambda: indices(ignored=-100)),
    "none": (nn.CrossEntropyLoss(reduction="none"), indices),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_whole_batchs(case: str, replicas: int, engine: str) -> None:
    criterion, make = CASES[case]
    x, y = torch.randn(B, 4, dtype=torch.float64), make()
    net = nn.Linear(4, CLASSES).double()
    expected = criterion(net(x), y)
    expected.sum().backward()
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    with instep.DataParallel(instep.with_loss(net, criterion), ["cpu"] * replicas, engine=engine) as model:
        for _ in range(2):
            net.zero_grad()
            loss = model(x, y)
            loss.sum().backward()
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
            for parameter, gradient in zip(net.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


REAL = torch.randn
MANY: dict[str, tuple[Any, Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(), lambda *s: REAL(*s).gt(0).double(), [(), (3,), (3, 2)]),
    "the same, weighted": (
        nn.MultiLabelSoftMarginLoss(WEIGHTS),
        lambda *s: REAL(*s).gt(0).double(),
        [(), (3,), (3, 2)],
    ),
    "multi-label margin": (nn.MultiLabelMarginLoss(), lambda *s: torch.randint(-1, CLASSES, s), [()]),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHTS), lambda *s: torch.randint(CLASSES, s[:-1]), [()]),
    "soft margin": (nn.SoftMarginLoss(), lambda *s: REAL(*s).sign(), [(), (3,), (3, 2)]),
    "mse": (nn.MSELoss(), REAL, [(), (3,), (3, 2)]),
    "huber": (nn.HuberLoss(), REAL, [(3,), (3, 2)]),
    "bce": (nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS), lambda *s: REAL(*s).gt(0).double(), [(), (3,), (3, 2)]),
    "kl": (nn.KLDivLoss(log_target=True), REAL, [(), (3,), (3, 2)]),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), lambda *s: torch.rand(*s), [(), (3,), (3, 2)]),
    "poisson": (nn.PoissonNLLLoss(full=True), lambda *s: torch.rand(*s), [(), (3,), (3, 2)]),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "middle"), [(name, middle) for name in MANY for middle in MANY[name][2]])
def test_outputs_of_any_number_of_dims(name: str, middle: tuple[int, ...], engine: str) -> None:
    criterion, make, _ = MANY[name]
    net = nn.Linear(4, CLASSES).double()
    x, y = torch.randn(B, *middle, 4, dtype=torch.float64), make(B, *middle, CLASSES)
    y = y.double() if y.is_floating_point() else y
    with instep.DataParallel(instep.with_loss(net, criterion), ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x, y), criterion(net(x), y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target", ["classes", "probabilities"])
@pytest.mark.parametrize("places", [(), (3,), (3, 2)])
def test_classes_at_any_number_of_places(places: tuple[int, ...], target: str) -> None:
    net = nn.Conv3d(2, CLASSES, 1).double()

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.reshape(len(x), 2, -1, 1, 1)).reshape(len(x), CLASSES, *places)

    x = torch.randn(B, 2, *places, dtype=torch.float64)
    chances = torch.rand(B, CLASSES, *places, dtype=torch.float64)
    y = chances if target == "probabilities" else torch.randint(CLASSES, (B, *places))
    ignored = 1 if target == "classes" else -100
    for criterion in (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), nn.CrossEntropyLoss(ignore_index=ignored)):
        with instep.DataParallel(instep.with_loss(Flat(), criterion), ["cpu"] * 3) as model:
            torch.testing.assert_close(model(x, y), criterion(Flat()(x), y))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_divisor_that_is_wrong_is_found(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum over divisor is tried against the criterion itself: what is not understood is refused."""
    monkeypatch.setattr("instep.call.loss.divisor_of", lambda criterion, output, target: len(output))
    x, y = torch.randn(B, 4), torch.randn(B, CLASSES)
    with instep.DataParallel(
        instep.with_loss(nn.Linear(4, CLASSES), nn.MSELoss()), ["cpu"] * 2, engine=engine
    ) as model:
        for _ in range(2):
            with pytest.raises(
                instep.MergeError, match=r"the mean of MSELoss was expected to be its sum divided by 2.*\n.*\n.*weight="
            ):
                model(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_divisor_that_does_not_add_up_is_found(engine: str) -> None:
    """Each part alone is right, and both together are not: a sum with a divisor of its own for every shard."""
    module = instep.with_loss(nn.Linear(4, 1), lambda output, _: output.pow(2).sum(), weight=lambda *_: 1)
    model = instep.DataParallel(module, ["cpu"] * 2, engine=engine)
    with pytest.raises(instep.MergeError, match="weight= is not the divisor of its mean"):
        model(torch.randn(B, 4), torch.zeros(B))
    time_first = instep.with_loss(nn.Linear(4, CLASSES), nn.KLDivLoss(reduction="batchmean"))
    model = instep.DataParallel(time_first, ["cpu"] * 2, engine=engine, dim=1)
    with pytest.raises(instep.MergeError, match="do not add up"):
        model(torch.randn(3, B, 4), torch.rand(3, B, CLASSES))


@pytest.mark.parametrize("engine", ENGINES)
def test_token_means_of_padded_text(engine: str) -> None:
    """[B, C, T] outputs, with most tokens of the first shard ignored."""
    net = nn.Conv1d(3, CLASSES, 1).double()
    x, y = torch.randn(B, 3, 6, dtype=torch.float64), indices(6, ignored=-100)
    criterion = nn.CrossEntropyLoss()
    with instep.DataParallel(instep.with_loss(net, criterion), ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x, y), criterion(net(x), y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize(
    "criterion",
    [nn.MultiLabelSoftMarginLoss(), nn.MSELoss(), nn.KLDivLoss(), nn.KLDivLoss(reduction="batchmean")],
    ids=["multi-label soft margin", "mse", "kl", "kl, batchmean"],
)
def test_means_of_outputs_with_more_dims(criterion: Any, engine: str) -> None:
    net = nn.Linear(4, CLASSES).double()
    x, y = torch.randn(B, 3, 4, dtype=torch.float64), torch.randint(2, (B, 3, CLASSES)).double()
    with instep.DataParallel(instep.with_loss(net, criterion), ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x, y), criterion(net(x), y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_with_its_own_weight(engine: str) -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        kept = target != 0
        return (output.squeeze(-1)[kept] ** 2).mean()

    net = nn.Linear(4, 1).double()
    x, y = torch.randn(B, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    expected = masked(net(x), y)
    expected.backward()
    wanted, net.weight.grad = net.weight.grad, None
    module = instep.with_loss(net, masked, weight=lambda output, target: (target != 0).sum())
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
        loss = model(x, y)
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.weight.grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_whose_loss_depends_on_the_target(engine: str) -> None:
    """Calls of both kinds are repeated until they are prepared."""

    def either(output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return functional.mse_loss(output, target)
        return functional.cross_entropy(output, target, ignore_index=-100)

    net = nn.Linear(4, CLASSES).double()
    x = torch.randn(B, 4, dtype=torch.float64)
    targets = {"a": torch.randn(B, CLASSES, dtype=torch.float64), "b": indices(ignored=-100)}
    with torch.no_grad(), instep.DataParallel(instep.with_loss(net, either), ["cpu"] * 2, engine=engine) as model:
        for kind in "aaaaaabbbbbbaaaabba":
            expected = either(net(x), targets[kind])
            torch.testing.assert_close(model(x, targets[kind]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_losses_of_samples_inside_a_function(engine: str) -> None:
    net = nn.Linear(4, CLASSES).double()
    x, y = torch.randn(B, 4, dtype=torch.float64), indices(ignored=-100)
    with instep.DataParallel(instep.with_loss(net, _with_losses_of_samples), ["cpu"] * 2, engine=engine) as model:
        for _ in range(4):
            torch.testing.assert_close(model(x, y), _with_losses_of_samples(net(x), y), rtol=1e-12, atol=1e-12)


def _with_losses_of_samples(output: Tensor, target: Tensor) -> Tensor:
    losses = torch.func.vmap(lambda row, label: functional.cross_entropy(row[None], label[None]))(output, target)
    assert len(losses) == len(output)
    return functional.cross_entropy(output, target, ignore_index=-100)


@pytest.mark.parametrize("engine", ENGINES)
def test_where_the_target_is(engine: str) -> None:
    net, x, y = nn.Linear(4, CLASSES), torch.randn(B, 4), indices()
    expected = functional.cross_entropy(net(x), y)

    class OfBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: dict[str, Any]) -> Tensor:
            out: Tensor = self.net(batch["x"])
            return out

    criterion = nn.CrossEntropyLoss()
    ways: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (instep.with_loss(net, criterion), (x, y), {}),
        (instep.with_loss(net, criterion, target=0), (y, x), {}),
        (instep.with_loss(net, criterion, target="y"), (x,), {"y": y}),
        (instep.with_loss(net, criterion, target="y"), (), {"input": x, "y": y}),
        (instep.with_loss(OfBatch(), criterion, target=lambda batch: batch["y"]), ({"x": x, "y": y},), {}),
    ]
    for module, args, kwargs in ways:
        torch.testing.assert_close(module(*args, **kwargs), expected)
        with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
            torch.testing.assert_close(model(*args, **kwargs), expected)
            assert (
                "target" in str(model.explain(*args, **kwargs))
                or kwargs
                or "batch" in str(model.explain(*args, **kwargs))
            )


def test_keys_and_attributes_are_the_modules() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    module = instep.with_loss(net, nn.CrossEntropyLoss(weight=torch.ones(3)))
    model = instep.DataParallel(module, ["cpu"] * 2)
    for each in (module, model):
        assert list(each.state_dict()) == ["0.weight", "0.bias"]
        assert [name for name, _ in each.named_parameters()] == ["0.weight", "0.bias"]
        assert each[0] is net[0]
        each.load_state_dict({f"module.{key}": value for key, value in net.state_dict().items()})
    assert not model.eval().training
    assert not net.training
    model.half()
    assert net[0].weight.dtype is module._instep_loss.criterion.weight.dtype is torch.float16


def test_it_is_copied_and_pickled() -> None:
    module = instep.with_loss(nn.Linear(4, CLASSES), nn.CrossEntropyLoss())
    x, y = torch.randn(B, 4), indices()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x, y), module(x, y))
        assert other.weight is not module.weight


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_step_is_the_plain_one(engine: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    net = copy.deepcopy(plain)
    criterion = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=-100)
    batches = [(torch.randn(size, 4, dtype=torch.float64), torch.randint(CLASSES, (size,))) for size in (7, 2, 5, 1, 3)]
    for _, y in batches:
        y[0] = -100 if len(y) > 1 else y[0]
    theirs, ours = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(net.parameters())
    with instep.DataParallel(instep.with_loss(net, criterion), ["cpu"] * 3, engine=engine) as model:
        for x, y in batches:
            theirs.zero_grad()
            criterion(plain(x), y).backward()
            theirs.step()
            ours.zero_grad()
            model(x, y).backward()
            ours.step()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_nothing_counted_at_all_is_nan_as_in_torch() -> None:
    net, x, y = nn.Linear(4, CLASSES), torch.randn(B, 4), torch.full((B,), -100)
    with instep.DataParallel(instep.with_loss(net, nn.CrossEntropyLoss()), ["cpu"] * 2) as model:
        assert model(x, y).isnan()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_of_longer_numbers_decides_the_type_of_the_loss(engine: str) -> None:
    module = instep.with_loss(nn.Linear(4, CLASSES).bfloat16(), nn.MSELoss())
    x, y = torch.randn(B, 4).bfloat16(), torch.randn(B, CLASSES)
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
        loss, expected = model(x, y), module(x, y)
    assert loss.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output * self.scale, target)


def test_what_it_refuses() -> None:
    net = nn.Linear(4, 1)
    with pytest.raises(WrapError, match="trainable parameters"):
        instep.with_loss(net, Learned())
    with pytest.raises(WrapError, match="a module and a criterion"):
        instep.with_loss(nn.MSELoss(), "mse")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no keyword argument 'y'"):
        instep.with_loss(net, nn.MSELoss(), target="y")(torch.ones(2, 4))
    with pytest.raises(TypeError, match="position -1"):
        instep.with_loss(net, nn.MSELoss())(x=torch.ones(2, 4))


class Centred(nn.Linear):
    """Looks at the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0)


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_that_meet_are_refused_here_too(engine: str) -> None:
    x, y = torch.randn(B, 4), torch.randn(B, CLASSES)
    model = instep.DataParallel(instep.with_loss(Centred(4, CLASSES), nn.MSELoss()), ["cpu"] * 2, engine=engine)
    with pytest.raises(instep.MergeError, match=r"do not add up[\s\S]*all_gather"):
        model(x, y)
    model = instep.DataParallel(instep.with_loss(nn.Linear(4, 1), nn.MSELoss()), ["cpu"] * 2, engine=engine)
    with pytest.raises(instep.MergeError, match="do not add up"):
        model(x, y[:, 0])  # [B, 1] against [B]: every sample against every other


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_weight_is_refused(engine: str) -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        return (output.squeeze(-1)[target != 0] ** 2).mean()

    module = instep.with_loss(nn.Linear(4, 1), masked, weight=lambda output, target: len(target))
    model = instep.DataParallel(module, ["cpu"] * 2, engine=engine)
    with pytest.raises(instep.MergeError, match="weight= is not the divisor of its mean"):
        model(torch.randn(B, 4), torch.tensor([0, 1, 1, 0, 1, 0, 1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_may_be_more_than_a_short_number_can_be(dtype: torch.dtype) -> None:
    module = instep.with_loss(nn.Linear(4, 64).to(dtype), nn.MSELoss())
    x, y = torch.randn(800, 4).to(dtype), torch.randn(800, 64).to(dtype) * 3
    with instep.DataParallel(module, ["cpu"] * 2) as model:
        loss, expected = model(x, y), module(x, y)
    assert loss.dtype is expected.dtype is dtype
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("short", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, None])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_type_of_the_loss_is_the_criterions(engine: str, target: torch.dtype | None, short: torch.dtype) -> None:
    net = instep.with_loss(nn.Linear(4, 5).to(short), nn.MSELoss())
    x, y = torch.randn(8, 4, dtype=short), torch.randn(8, 5, dtype=target or short)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        mine, plain = model(x, y), net(x, y)
    assert mine.dtype == plain.dtype
    torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_weights_of_classes_may_be_short_too(criterion: Any) -> None:
    """A model that is made short takes its criterion along."""
    module = instep.with_loss(nn.Linear(4, CLASSES), criterion(weight=torch.rand(CLASSES))).bfloat16()
    x, y = torch.randn(B, 4).bfloat16(), torch.randint(0, CLASSES, (B,))
    with instep.DataParallel(module, ["cpu"] * 2, engine="serial") as model:
        torch.testing.assert_close(model(x, y), module(x, y), rtol=2e-2, atol=1e-2)
