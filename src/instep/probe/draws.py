"""Random numbers that the runs of a trial have in common, so that their outputs can be compared.

A run on two samples draws other numbers than a run on five. `TrialDraws` replaces the results of torch's random ops, on
every device and from every generator. At first all samples draw alike: 0.5 for noise, the lowest integer, masks that
keep every entry, permutations that rotate. A mean over what a random mask selects then looks like a mean over samples.
So the same parts run again, and every sample has random numbers of its own, the same in its part and in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instep.runtime.rng import default_generator

MAX_DRAWS = 4096
"""How many draws of a run are replaced. The others are random, so that a loop that waits for another number ends."""
_UNBOUNDED = 1 << 16
"""The bound of integers that are drawn without one (`random_()`)."""


class TrialDraws(TorchDispatchMode):
    """Mode in which random ops return numbers that are comparable between parts and whole."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        generators = (torch.default_generator, default_generator(device))
        self._generators = [generator for generator in dict.fromkeys(generators) if generator is not None]
        self._seed: int | None = None
        """The seed of numbers that differ between samples; None while all samples draw alike."""
        self.diverged = False
        """Whether runs with a seed have drawn other shapes than the runs in which all samples drew alike."""
        self._shapes: list[list[torch.Size]] = []
        """The shapes that each run drew, when all samples drew alike."""
        self._sizes: tuple[int, ...] = ()
        self._run, self._count = -1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Trials run nothing that is compiled, and torch would import dynamo in order to skip it."""
        return False

    def start_runs(self, sizes: tuple[int, ...] = (), seed: int | None = None) -> bool:
        """Before the runs of the parts and the whole. With a seed, samples draw different numbers.

        Returns False if a seed cannot be used, because the runs did not make the same draws.
        """
        self._sizes, self._seed, self._run, self.diverged = sizes, seed, -1, False
        if seed is None:
            self._shapes = []
            return True
        return len(self._shapes) == len(sizes) + 1 and len({len(shapes) for shapes in self._shapes}) == 1

    def start_run(self) -> None:
        """Before each run."""
        self._run, self._count = self._run + 1, 0
        if self._seed is None:
            self._shapes.append([])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.removeprefix("aten::")
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or name == "argsort":  # in inference mode, composite ops arrive here as a whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in ("sort", "topk") and self._seed is None and _has_equal_floats(func, args, kwargs):
            return _sort_reversed(func, args, kwargs)
        if _dropout_position(func) is not None:
            return _call_without_dropout(func, args, kwargs)
        draw = _DRAWS.get(name.rstrip("_")) if is_random else None
        if draw is None or self._count >= MAX_DRAWS:
            return func(*args, **kwargs)
        return self._replace(draw, func, args, kwargs)

    def _replace(self, draw: _Draw, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the op, which checks its arguments and allocates the result, then overwrite what it drew."""
        arguments = _named_arguments(func, args, kwargs)
        values: dict[str, Any] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        own: torch.Generator | None = values.get("generator")
        generators = [*self._generators] if own is None else [*self._generators, own]
        states = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        drawn, *masks = result if isinstance(result, tuple) else (result,)
        entries = values["self"] if draw is _multinomial and not values["replacement"] else drawn
        drawn.copy_(draw(self._next_noise(entries, drawn), values))
        for mask in masks:
            mask.fill_(1)
        return result

    def _next_noise(self, entries: Tensor, drawn: Tensor) -> _Noise:
        """The random numbers of the next draw, in the shape of `entries`."""
        numbers, index = self._numbers(entries.shape, drawn.shape), self._count
        self._count += 1
        dtype = torch.float32 if drawn.device.type == "mps" else torch.float64
        if numbers is None:
            half = torch.full((), 0.5, dtype=dtype, device=drawn.device)
            return _Noise(half, half * 0, half, index)
        numbers = numbers.to(drawn.device, dtype)
        return _Noise(numbers, numbers, (2 * numbers - 1).erfinv() * 2**0.5, index)

    def _numbers(self, shape: torch.Size, drawn_shape: torch.Size) -> Tensor | None:
        """Numbers in (0, 1) that differ between samples; None if all samples draw alike."""
        index = self._count
        if self._seed is None:
            self._shapes[-1].append(drawn_shape)
            return None
        if self.diverged or index >= len(self._shapes[0]) or self._shapes[self._run][index] != drawn_shape:
            self.diverged = True
            return None
        shapes, size, dim = [drawn[index] for drawn in self._shapes], list(shape), None
        if len(set(shapes)) > 1:
            dim = _batch_dim(shapes, self._sizes)
            if dim is None:
                return None
            size[dim] = sum(self._sizes)
        generator = torch.Generator().manual_seed(self._seed * MAX_DRAWS + index)
        numbers = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu").clamp_(1e-6, 1 - 1e-6)
        if dim is None:  # the same for all samples
            return numbers
        is_part = self._run < len(self._sizes)
        return numbers.narrow(dim, sum(self._sizes[: self._run]) if is_part else 0, shape[dim])


def _batch_dim(shapes: Sequence[torch.Size], sizes: tuple[int, ...]) -> int | None:
    """The only dim in which the shapes of the parts and the whole differ, if it has their sizes."""
    if len({len(shape) for shape in shapes}) > 1:
        return None
    dims = [dim for dim, column in enumerate(zip(*shapes, strict=True)) if len(set(column)) > 1]
    return dims[0] if len(dims) == 1 and [shape[dims[0]] for shape in shapes] == [*sizes, sum(sizes)] else None


class _Noise(NamedTuple):
    """The random numbers of one draw. If all samples draw alike, they have one entry."""

    uniform: Tensor
    """In (0, 1); 0.5 if all samples draw alike."""
    low: Tensor
    """The same; 0 if all samples draw alike."""
    normal: Tensor
    """From the standard normal distribution; 0.5 if all samples draw alike."""
    number: int
    """How many draws its run made before."""


_Draw = Callable[[_Noise, dict[str, Any]], Any]
"""What replaces the result of a random op, from noise and from the arguments of the op by name."""


def _normal(noise: _Noise, a: dict[str, Any]) -> Any:
    return noise.normal * a.get("std", 1.0) + a.get("mean", 0.0)


def _uniform(noise: _Noise, a: dict[str, Any]) -> Any:
    low = a.get("from", 0.0)
    return low + (a.get("to", 1.0) - low) * noise.uniform


def _integers(noise: _Noise, a: dict[str, Any]) -> Any:
    low, high = a.get("low", a.get("from", 0)), a.get("high", a.get("to"))
    bound = low + _UNBOUNDED if high is None else high
    return (low + (noise.low * (bound - low)).floor()).clamp(max=bound - 1)


def _bernoulli(noise: _Noise, a: dict[str, Any]) -> Any:
    """A mask keeps every entry that can be kept, if all samples draw alike."""
    return noise.low < a.get("p", a["self"])


def _dropout(_: _Noise, a: dict[str, Any]) -> Any:
    values, p = a.get("input", a.get("self")), a["p"]
    return values / (1 - p) if a.get("train", True) and p < 1 else values


def _permutation(noise: _Noise, a: dict[str, Any]) -> Any:
    """A rotation, by another step at each draw: permutations that are applied one after another do not cancel."""
    steps = 1 + noise.number % max(1, a["n"] - 1)
    return torch.arange(a["n"]).roll(-steps)


def _multinomial(noise: _Noise, a: dict[str, Any]) -> Any:
    """The likeliest classes, the last ones first among equals, if all samples draw alike."""
    weights, count = a["self"].double(), a["num_samples"]
    if noise.uniform.ndim and a["replacement"]:
        totals = weights.cumsum(-1)
        return torch.searchsorted(totals, (noise.uniform * totals[..., -1:]).contiguous()).clamp(
            max=weights.shape[-1] - 1
        )
    scores = weights.log() - (-noise.uniform.log()).log()
    order = weights.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return order[..., :1].expand(*order.shape[:-1], count) if a["replacement"] else order[..., :count]


def _poisson(noise: _Noise, a: dict[str, Any]) -> Any:
    return (a["self"] + noise.normal * a["self"].sqrt()).round().clamp(min=0)


def _binomial(noise: _Noise, a: dict[str, Any]) -> Any:
    count, p = a["count"], a["prob"]
    return torch.minimum((count * p + noise.normal * (count * p * (1 - p)).sqrt()).round().clamp(min=0), count)


def _gamma(noise: _Noise, a: dict[str, Any]) -> Any:
    """The approximation of Wilson and Hilferty."""
    alpha = a["self"].double()
    return (alpha * (1 - 1 / (9 * alpha) + noise.normal / (3 * alpha.sqrt())) ** 3).clamp(min=1e-6)


def _dirichlet(noise: _Noise, a: dict[str, Any]) -> Any:
    values = _gamma(noise, a)
    return values / values.sum(-1, keepdim=True)


_DRAWS: dict[str, _Draw] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "uniform": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "normal": _normal,
    "normal_functional": _normal,
    "randint": _integers,
    "randint_like": _integers,
    "random": _integers,
    "randperm": _permutation,
    "bernoulli": _bernoulli,
    "native_dropout": _dropout,
    "_fused_dropout": _dropout,
    "multinomial": _multinomial,
    "exponential": lambda noise, a: -noise.uniform.log() / a["lambd"],
    "geometric": lambda noise, a: (noise.uniform.log() / (-noise.uniform.new_tensor(a["p"])).log1p()).ceil().clamp(1),
    "log_normal": lambda noise, a: _normal(noise, a).exp(),
    "cauchy": lambda noise, a: a["median"] + a["sigma"] * ((noise.uniform - 0.5) * torch.pi).tan(),
    "poisson": _poisson,
    "binomial": _binomial,
    "_standard_gamma": _gamma,
    "_sample_dirichlet": _dirichlet,
}


def _named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an op by name, with defaults."""
    schema = func._schema.arguments
    given = dict(zip([argument.name for argument in schema], args, strict=False))
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **given, **kwargs}


@cache
def _dropout_position(func: Any) -> int | None:
    """The index of the dropout probability among the arguments of attention and recurrent layers."""
    names = [argument.name for argument in func._schema.arguments]
    if func._schema.name == "aten::_cudnn_init_dropout_state":  # torch keeps the result for later calls
        return None
    return next((index for index, name in enumerate(names) if name in ("dropout_p", "dropout")), None)


def _call_without_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    position = _dropout_position(func)
    assert position is not None
    if len(args) > position:
        return func(*args[:position], 0.0, *args[position + 1 :], **kwargs)
    return func(*args, **{**kwargs, func._schema.arguments[position].name: 0.0})


def _has_equal_floats(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sort compares equal floats only, such as a random number for every sample."""
    values = args[0]
    dim = _named_arguments(func, args, kwargs)["dim"]
    if func._schema.overload_name not in ("", "stable") or not values.is_floating_point() or not values.ndim:
        return False
    return values.shape[dim] > 1 and bool((values == values.narrow(dim, 0, 1)).all())


def _sort_reversed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Sort equal floats by descending index. In ascending order, samples would seem not to be reordered."""
    arguments, values = _named_arguments(func, args, kwargs), args[0]
    dim, size = arguments["dim"], values.shape[arguments["dim"]]
    shape = [1] * values.ndim
    shape[dim] = size
    indices = torch.arange(size - 1, -1, -1, device=values.device).view(shape).expand(values.shape)
    count = arguments.get("k", size)
    return values.narrow(dim, 0, count).clone(), indices.narrow(dim, 0, count).clone()
