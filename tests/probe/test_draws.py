"""Modules that draw random numbers get verdicts: in a trial, every sample draws the same numbers in each run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Dirichlet, Gamma, Normal, Poisson

import instep
from instep.probe.draws import MAX_DRAWS, TrialDraws

from .helpers import Net, said

pytestmark = pytest.mark.usefixtures("one_core")
BATCH = "concatenated along dim 0 (the probe: batch in dim 0)"
MEAN, SUM = "mean weighted by samples (the probe)", "sum of the parts (the probe)"


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        return {"z": z, "loss": F.mse_loss(self.decoder(z), x), "kl": kl}


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.embedding = nn.Linear(6, 6), nn.Embedding(100, 6)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.randint(0, 100, (len(x),))
        noise, share = torch.randn_like(x), (1 - step / 100.0)[:, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(self.net(noisy + self.embedding(step)), noise)


class MaskedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        patches = x.view(len(x), 4, -1) if x.shape[1] % 4 == 0 else x.view(len(x), 2, 3)
        count = patches.shape[1]
        order = torch.rand(len(x), count).argsort(dim=1)
        mask = torch.ones(len(x), count)
        mask[:, : count // 2] = 0
        mask = mask.gather(1, order.argsort(dim=1))
        error = (self.net(patches * mask[..., None]) - patches).pow(2).mean(-1)
        return {"loss": (error * mask).sum() / mask.sum(), "mask": mask}


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            draw = torch.rand([])
            if not self.training or draw > 0.2:
                x = x + layer(x)
        return x.pow(2).mean()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.net(x).relu(), 0.3, self.training)).pow(2).mean()


MODELS = {
    "VAE": (Vae, {"z": BATCH, "loss": MEAN, "kl": SUM}),
    "diffusion": (Diffusion, {"(output)": MEAN}),
    "masked autoencoder": (MaskedAutoencoder, {"loss": MEAN, "mask": BATCH}),
    "layer drop": (LayerDrop, {"(output)": MEAN}),
    "dropout": (Dropped, {"(output)": MEAN}),
}


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("name", MODELS)
def test_models_that_draw_are_merged_by_their_values(wrap: Any, name: str, engine: str) -> None:
    """Loss and gradients are those of the shards on one device, with the same random streams."""
    make, expected = MODELS[name]
    net, x, sizes = make(), torch.randn(7, 6), (4, 3)
    plain = copy.deepcopy(net)
    model = wrap(net, engine=engine)
    state = torch.get_rng_state()
    output = model(x)
    assert said(model, x) == expected
    loss = output["loss"] if isinstance(output, dict) else output
    loss.backward()

    torch.set_rng_state(state)
    with instep.DataParallel(plain, ["cpu"] * 2, engine="serial", merge=lambda parts, sizes: parts) as reference:
        merged = reference(x)
        parts = merged["loss"] if isinstance(merged, dict) else merged
        reference_loss = (parts[0] * sizes[0] + parts[1] * sizes[1]) / 7
        reference_loss.backward()
    torch.testing.assert_close(loss, reference_loss)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


DRAWS: dict[str, tuple[Callable[..., Any], str]] = {
    "normal": (lambda h: Normal(h, 1.0).rsample(), BATCH),
    "categorical": (lambda h: Categorical(logits=h).sample(), BATCH),
    "gamma": (lambda h: Gamma(h.exp(), 1.0).rsample().mean(), MEAN),
    "dirichlet": (lambda h: Dirichlet(h.exp()).rsample(), BATCH),
    "poisson": (lambda h: Poisson(h.exp()).sample().mean(), MEAN),
    "Gumbel softmax": (lambda h: F.gumbel_softmax(h, hard=True), BATCH),
    "multinomial": (lambda h: torch.multinomial(h.softmax(1), 2), BATCH),
    "in place": (lambda h: (h + torch.empty_like(h).uniform_(-1, 1)).sum(), SUM),
    "a loop over samples": (lambda h: torch.stack([row + torch.randn(4) for row in h]), BATCH),
    "stochastic depth": (lambda h: h + h * torch.empty(len(h), 1).bernoulli_(0.8), BATCH),
    "noise alone": (lambda h: torch.randn(len(h), 3), BATCH),
    "mean of noise": (lambda h: torch.randn(len(h)).pow(2).mean(), MEAN),
    "a scalar of NumPy": (lambda h: (h * np.random.rand()).pow(2).mean(), MEAN),
    "unused draws of Python": (lambda h: [random.random() for _ in h] and h.mean(), MEAN),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_every_kind_leave_the_verdict(wrap: Any, name: str) -> None:
    draw, expected = DRAWS[name]
    model, x = wrap(Net(lambda _, h: draw(h)), engine="serial"), torch.randn(9, 3)
    model(x)
    assert said(model, x) == {"(output)": expected}


def random_mask(h: Tensor) -> Tensor:
    return (torch.rand(h.shape) < 0.5).float()


DEPENDENT: dict[str, Callable[..., Any]] = {
    "two permutations": lambda h: h[torch.randperm(len(h))] * h[torch.randperm(len(h))],
    "mixup": lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "mixup by NumPy's weight": lambda h: (w := np.random.beta(1, 1)) * h + (1 - w) * h[torch.randperm(len(h))],
    "mixup by Beta": lambda h: (w := Beta(1.0, 1.0).sample()) * h + (1 - w) * h[torch.rand(len(h)).argsort()],
    "negatives": lambda h: (h - h[torch.randint(0, len(h), (len(h),))]).pow(2).mean(),
    "one of the samples": lambda h: h[torch.rand(len(h)).argmax()],
    "samples by weight": lambda h: h[torch.multinomial(torch.ones(len(h)), len(h))],
    "mean over a random mask": lambda h: (h.pow(2) * (m := random_mask(h))).sum() / m.sum(),
    "mean over what dropout leaves": lambda h: (d := F.dropout(h.exp())).sum() / (d > 0).sum(),
    "scaled by the batch's mask": lambda h: h * (m := random_mask(h)) / m.mean(),
}


@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.parametrize("name", DEPENDENT)
def test_draws_that_connect_samples_are_an_error(wrap: Any, name: str, batch: int) -> None:
    """Equal draws hide neither an order of samples nor a divisor that is drawn."""
    model = wrap(Net(lambda _, h: DEPENDENT[name](h)), engine="serial")
    with pytest.raises(instep.MergeError, match=r"forward draws random numbers\. In the trial"):
        model(torch.randn(batch, 3))


def test_permutations_do_not_cancel(wrap: Any) -> None:
    def twice(_: Net, h: Tensor) -> Tensor:
        order = torch.randperm(len(h))
        return h[order][order]

    for then in (twice, lambda _, h: h.flip(0)[torch.randperm(len(h))]):
        with pytest.raises(instep.MergeError, match="depend on other samples"):
            wrap(Net(then), engine="serial")(torch.randn(9, 3))


def test_draws_that_cannot_be_repeated_leave_the_shapes(wrap: Any) -> None:
    """NumPy's numbers for each sample."""

    def noisy(h: Tensor) -> Tensor:
        return h + torch.from_numpy(np.random.rand(len(h), 1)).float()

    model, x = wrap(Net(lambda _, h: noisy(h)), engine="serial"), torch.randn(6, 3)
    assert model(x).shape == (6, 4)
    assert "only shapes count: forward draws random numbers" in model.explain(x).trial
    loss = wrap(Net(lambda _, h: {"loss": noisy(h).mean()}), engine="serial")
    with pytest.raises(instep.MergeError, match=r"merge=\{'loss': \.\.\.\}(.|\n)*If this is a mean over samples"):
        loss(x)
    in_training = wrap(Net(lambda net, h: (noisy(h) if net.training else h).mean()), engine="serial")
    in_training(x)
    assert said(in_training, x) == {"(output)": MEAN}
    trial = in_training.explain(x).trial
    assert "in evaluation mode" in trial
    assert "same random numbers" not in trial
    dependent = wrap(Net(lambda net, h: (noisy(h) if net.training else h).softmax(0)), engine="serial")
    with pytest.raises(instep.MergeError, match="The trial ran in evaluation mode") as caught:
        dependent(x)
    assert "drew the same ones" not in str(caught.value)


@pytest.mark.slow
def test_a_loop_that_waits_for_a_number_ends(wrap: Any) -> None:
    def then(_: Net, h: Tensor) -> Tensor:
        while torch.rand(()) < 0.9:
            pass
        return h.mean()

    model, x = wrap(Net(then), engine="serial"), torch.randn(6, 3)
    model(x)
    assert said(model, x) == {"(output)": MEAN}


def test_the_generators_are_left_alone(wrap: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    draws = TrialDraws(torch.device("cpu"))
    states = torch.get_rng_state(), generator.get_state()
    draws.start_runs()
    draws.start_run()
    with draws:
        assert torch.rand(3).tolist() == [0.5] * 3
        assert torch.randn(2, generator=generator).tolist() == [0.5] * 2
        assert torch.randint(3, 9, (2,)).tolist() == [3, 3]
        assert [torch.randperm(4).tolist() for _ in range(2)] == [[1, 2, 3, 0], [2, 3, 0, 1]]
        assert torch.rand(4).argsort().tolist() == [3, 2, 1, 0]
        assert torch.bernoulli(torch.tensor([0.1, 0.0])).tolist() == [1, 0]
        torch.testing.assert_close(torch.normal(torch.zeros(2), 2.0), torch.ones(2))
        torch.testing.assert_close(torch.empty(2).uniform_(2, 4), torch.full((2,), 3.0))
        torch.testing.assert_close(F.dropout(torch.ones(2), 0.5), torch.full((2,), 2.0))
        assert torch.multinomial(torch.tensor([0.2, 0.5, 0.3]), 2).tolist() == [1, 2]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    draws.start_runs()
    draws.start_run()
    with draws:
        for _ in range(MAX_DRAWS):
            torch.rand(())
        assert torch.rand(4).tolist() != [0.5] * 4  # numbers of the generator again


def test_samples_draw_the_same_in_their_part_and_in_the_whole() -> None:
    draws, sizes = TrialDraws(torch.device("cpu")), (2, 3)

    def run(count: int) -> list[Tensor]:
        draws.start_run()
        with draws:
            return [torch.randn(count, 2), torch.rand(4), torch.randint(0, 99, (3, count)), torch.rand(count, count)]

    draws.start_runs()
    for count in (2, 3, 5):
        run(count)
    assert draws.start_runs(sizes, seed=1)
    first, second, whole = [run(count) for count in (2, 3, 5)]
    assert torch.equal(torch.cat([first[0], second[0]]), whole[0])
    assert torch.equal(first[1], whole[1])
    assert torch.equal(torch.cat([first[2], second[2]], 1), whole[2])
    assert (whole[3] == 0.5).all()  # two dims follow the batch
    assert len(whole[0].unique()) == 10
    assert not draws.diverged
