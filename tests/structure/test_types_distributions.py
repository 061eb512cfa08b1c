"""Distributions: cut, joined, and differentiated through both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from instep.errors import MergeError
from instep.structure import types_distributions, types_torch
from instep.structure.types import handler_for_type
from instep.structure.types_distributions import DISTRIBUTION

SIZES = [(3, 2, 2), (7,), (1,) * 7, (1, 6), (4, 3)]
sizes_of_seven = pytest.mark.parametrize("sizes", SIZES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    types_torch.register_torch_types()


# Distributions


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def tril(*batch: int) -> Tensor:
    return torch.eye(7, dtype=torch.float64) + 0.1 * torch.randn(*batch, 7, 7, dtype=torch.float64).tril()


Make = Callable[[], tuple[D.Distribution, list[Tensor]]]


def made(build: Callable[..., D.Distribution], *inputs: Tensor) -> tuple[D.Distribution, list[Tensor]]:
    return build(*inputs), list(inputs)


MAKERS: dict[str, Make] = {
    "normal": lambda: made(lambda m, s: D.Normal(m, s.exp()), draw(7, 2), draw(7, 1)),
    "bernoulli logits": lambda: made(lambda x: D.Bernoulli(logits=x), draw(7, 3)),
    "bernoulli probs": lambda: made(lambda x: D.Bernoulli(probs=x.sigmoid()), draw(7)),
    "categorical logits": lambda: made(lambda x: D.Categorical(logits=x), draw(7, 7)),
    "categorical probs": lambda: made(lambda x: D.Categorical(probs=x.softmax(-1)), draw(7, 4)),
    "one hot": lambda: made(lambda x: D.OneHotCategorical(logits=x), draw(7, 4)),
    "dirichlet": lambda: made(lambda x: D.Dirichlet(x.exp()), draw(7, 3)),
    "beta": lambda: made(lambda a, b: D.Beta(a.exp(), b.exp()), draw(7), draw(7)),
    "gamma": lambda: made(lambda a, b: D.Gamma(a.exp(), b.exp()), draw(7, 2), draw(7, 2)),
    "student": lambda: made(lambda a, m: D.StudentT(a.exp(), m), draw(7), draw(7)),
    "normal over one covariance": lambda: made(
        lambda m, s: D.MultivariateNormal(m, scale_tril=tril() * s.exp()), draw(7, 7), draw(1, 1)
    ),
    "normal over covariances": lambda: made(
        lambda m, s: D.MultivariateNormal(m, covariance_matrix=(t := tril(7) * s.exp()) @ t.mT),
        draw(7, 7),
        draw(7, 1, 1),
    ),
    "low rank": lambda: made(
        lambda m, f, d: D.LowRankMultivariateNormal(m, f, d.exp()), draw(7, 7), draw(7, 2), draw(7)
    ),
    "independent": lambda: made(lambda m, s: D.Independent(D.Normal(m, s.exp()), 1), draw(7, 5), draw(7, 5)),
    "transformed": lambda: made(
        lambda m, loc, scale: D.TransformedDistribution(
            D.Independent(D.Normal(m, 1.0), 1),
            [D.AffineTransform(loc, scale.exp(), event_dim=1), D.TanhTransform(cache_size=1)],
        ),
        draw(7, 5),
        draw(7, 5),
        draw(5),
    ),
    "composed": lambda: made(
        lambda m, loc: D.TransformedDistribution(
            D.Normal(m, 1.0), D.ComposeTransform([D.AffineTransform(loc, 2.0).inv, D.SigmoidTransform()])
        ),
        draw(7, 7),
        draw(7),
    ),
    "log normal": lambda: made(lambda m: D.LogNormal(m, 1.0), draw(7)),
    "mixture": lambda: made(
        lambda w, m: D.MixtureSameFamily(D.Categorical(logits=w), D.Normal(m, 1.0)), draw(7, 3), draw(7, 3)
    ),
}


def tensors_of(value: D.Distribution) -> list[Tensor]:
    found: list[Tensor] = []
    DISTRIBUTION.map(lambda tensor: (found.append(tensor), tensor)[1], value)
    return found


def scored(value: D.Distribution, at: Tensor, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    score = value.log_prob(at)
    weights = torch.arange(1.0, score.numel() + 1, dtype=torch.float64).reshape(score.shape)
    return score, list(torch.autograd.grad((score * weights).sum(), inputs, retain_graph=True))


@sizes_of_seven
@pytest.mark.parametrize("name", MAKERS)
def test_distributions_keep_type_parameters_and_gradients(name: str, sizes: tuple[int, ...]) -> None:
    value, inputs = MAKERS[name]()
    assert handler_for_type(type(value)) is DISTRIBUTION
    assert DISTRIBUTION.size(value) == 7
    at = value.sample()
    whole, wanted = scored(value, at, inputs)
    parts = DISTRIBUTION.split(value, sizes)
    for part, some, score in zip(parts, at.split(list(sizes)), whole.split(list(sizes)), strict=True):
        assert type(part) is type(value)
        assert part.event_shape == value.event_shape
        assert part.sample().shape == some.shape
        torch.testing.assert_close(part.log_prob(some), score)
    merged = DISTRIBUTION.merge(parts)
    assert type(merged) is type(value)
    assert (merged.batch_shape, merged.event_shape) == (value.batch_shape, value.event_shape)
    assert vars(merged).keys() == vars(value).keys()
    torch.testing.assert_close(tensors_of(merged), tensors_of(value), rtol=0, atol=0)
    score, found = scored(merged, at, inputs)
    torch.testing.assert_close(score, whole)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_mapping_a_distribution_makes_another_and_leaves_it_alone(name: str) -> None:
    value, _ = MAKERS[name]()
    before = tensors_of(value)
    new = DISTRIBUTION.map(lambda tensor: tensor.detach().clone(), value)
    assert type(new) is type(value)
    assert all(one is two for one, two in zip(tensors_of(value), before, strict=True))
    assert not any(tensor.requires_grad for tensor in tensors_of(new))
    torch.testing.assert_close(tensors_of(new), before, rtol=0, atol=0)
    at = value.sample()
    torch.testing.assert_close(new.log_prob(at), value.log_prob(at))


@pytest.mark.parametrize("name", ["normal over one covariance", "low rank", "transformed"])
def test_what_the_samples_of_a_part_share_may_differ_between_parts(name: str) -> None:
    value, _ = MAKERS[name]()
    at = value.sample()
    first, second = DISTRIBUTION.split(value, (3, 4))
    second = DISTRIBUTION.map(lambda tensor: tensor * 1.5, second)
    merged = DISTRIBUTION.merge([first, second])
    assert merged.batch_shape == value.batch_shape
    torch.testing.assert_close(merged.log_prob(at), torch.cat([first.log_prob(at[:3]), second.log_prob(at[3:])]))


def test_weights_that_a_mixture_shares_between_samples_stay_shared_or_become_their_own() -> None:
    def mixture(weights: Tensor, means: Tensor) -> D.Distribution:
        return D.MixtureSameFamily(D.Categorical(logits=weights), D.Independent(D.Normal(means, 1.0), 1))

    weights, means, at = draw(3), draw(7, 3, 2), draw(7, 2)
    value = mixture(weights, means)
    first, second = DISTRIBUTION.split(value, (3, 4))
    merged = DISTRIBUTION.merge([first, second])
    assert merged.mixture_distribution is value.mixture_distribution
    torch.testing.assert_close(merged.log_prob(at), value.log_prob(at))
    second = DISTRIBUTION.map(torch.sin, second)
    merged = DISTRIBUTION.merge([first, second])
    assert merged.batch_shape == value.batch_shape
    torch.testing.assert_close(merged.log_prob(at), torch.cat([first.log_prob(at[:3]), second.log_prob(at[3:])]))


def test_a_lazy_attribute_of_some_parts_is_forgotten() -> None:
    value = D.Bernoulli(logits=draw(7))
    parts = DISTRIBUTION.split(value, (3, 4))
    _ = parts[0].probs
    merged = DISTRIBUTION.merge(parts)
    assert "probs" not in vars(merged)
    torch.testing.assert_close(merged.probs, value.probs)


def test_one_tensor_with_two_names_stays_one() -> None:
    value = D.Categorical(logits=draw(7, 3))
    for new in (*DISTRIBUTION.split(value, (3, 4)), DISTRIBUTION.map(torch.clone, value)):
        assert new._param is new.logits
    merged = DISTRIBUTION.merge(DISTRIBUTION.split(value, (3, 4)))
    assert merged._param is merged.logits


def test_a_distribution_without_batch_is_not_one() -> None:
    assert DISTRIBUTION.size(D.Normal(0.0, 1.0)) is None
    assert types_distributions.DISTRIBUTION is handler_for_type(D.Normal)


def test_settings_that_differ_are_refused() -> None:
    parts: list[Any] = [D.Multinomial(count, logits=draw(2, 3)) for count in (4, 5)]
    with pytest.raises(MergeError, match="total_count"):
        DISTRIBUTION.merge(parts)
