"""Hypothesis strategies for nested batches, together with the expected parts.

A `Blueprint` builds the value for a slice of the samples. Called with all samples it gives the whole batch. The law of
splitting: a part equals the blueprint of its samples. Nothing here depends on how instep splits.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

Blueprint = Callable[[slice], Any]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
ARRAY_DTYPES = [np.float32, np.int64, np.bool_, np.complex128, "U3"]

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Plain:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any = None


@dataclasses.dataclass
class Derived(Plain):
    """Inherits its fields and has one that `__init__` does not take."""

    kept: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.kept = self.left


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    left: Any
    right: Any


@attrs.define
class Defined:
    left: Any
    right: Any


@attrs.frozen
class DefinedFrozen:
    left: Any
    right: Any = attrs.field(kw_only=True)


class Opaque:
    """An object without tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def scale(x: float) -> float:
    return 2 * x


# Leaves


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 100, shape).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        tensor.requires_grad_(draw(st.booleans()))
    return tensor


def trailing() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 4), max_size=2).map(tuple)


@st.composite
def batched_leaves(draw: st.DrawFn, batch: int) -> Blueprint:
    shape = (batch, *draw(trailing()))
    if draw(st.booleans()):
        tensor = draw(tensors(shape))
        return lambda rows: tensor if rows == slice(0, batch) else tensor[rows]
    array = np.random.randint(0, 100, shape).astype(draw(st.sampled_from(ARRAY_DTYPES)))
    return lambda rows: array[rows]


@st.composite
def samples(draw: st.DrawFn, batch: int) -> Any:
    """One entry of a per-sample list, which cannot be read as a batch itself."""
    length = draw(st.integers(2, 9).filter(lambda size: size != batch))
    return draw(
        st.one_of(
            st.text(max_size=3),
            st.integers(),
            st.floats(allow_nan=False),
            st.booleans(),
            st.just(None),
            st.builds(Opaque, st.text(max_size=2)),
            st.just((1, "a")),
            tensors((length, *draw(trailing()))),
            tensors(()),
            st.fixed_dictionaries({"boxes": tensors((length, 4)), "label": st.text(max_size=2)}),
        )
    )


@st.composite
def sample_lists(draw: st.DrawFn, batch: int) -> Blueprint:
    if draw(st.booleans()):
        entries: Any = draw(st.lists(samples(batch), min_size=batch, max_size=batch))
    else:
        words = st.one_of(st.text(max_size=3), st.builds(Opaque, st.text(max_size=2)))
        entries = tuple(draw(st.lists(words, min_size=batch, max_size=batch)))
    return lambda rows: entries[rows]


@st.composite
def replicated_leaves(draw: st.DrawFn, batch: int) -> Blueprint:
    numbers = st.integers() | st.floats(allow_nan=False)
    few = st.lists(numbers | st.text(max_size=2), max_size=4).filter(lambda items: len(items) != batch)
    value = draw(
        st.one_of(
            numbers,
            st.text(max_size=5),
            st.binary(max_size=2),
            st.booleans(),
            st.just(None),
            st.just(scale),
            st.just(torch.float16),
            st.builds(Opaque, st.text(max_size=2)),
            tensors(()),
            tensors((1, *draw(trailing()))),
            st.just(np.float32(1.5)),
            st.lists(numbers, max_size=4).map(tuple),
            few,
        )
    )
    return lambda rows: value


def leaves(batch: int) -> st.SearchStrategy[Blueprint]:
    return st.one_of(batched_leaves(batch), sample_lists(batch), replicated_leaves(batch))


# Containers

KEYS = st.one_of(st.sampled_from("abcdefgh"), st.integers(0, 9))
RECORDS = [
    Pair,
    Plain,
    Frozen,
    Derived,
    Slotted,
    Defined,
    lambda left, right: DefinedFrozen(left, right=right),
]


def _in_mapping(make: Callable[[dict[Any, Any]], Any], items: Mapping[Any, Blueprint]) -> Blueprint:
    return lambda rows: make({key: item(rows) for key, item in items.items()})


def _in_sequence(make: Callable[[list[Any]], Any], items: list[Blueprint]) -> Blueprint:
    return lambda rows: make([item(rows) for item in items])


def _in_record(make: Callable[[Any, Any], Any], pair: tuple[Blueprint, Blueprint]) -> Blueprint:
    return lambda rows: make(pair[0](rows), pair[1](rows))


def _mappings(inner: st.SearchStrategy[Blueprint]) -> st.SearchStrategy[Blueprint]:
    makers: list[Callable[[dict[Any, Any]], Any]] = [
        dict,
        OrderedDict,
        UserDict,
        lambda items: defaultdict(list, items),
    ]
    return st.builds(_in_mapping, st.sampled_from(makers), st.dictionaries(KEYS, inner, max_size=4))


def _records(inner: st.SearchStrategy[Blueprint]) -> st.SearchStrategy[Blueprint]:
    return st.builds(_in_record, st.sampled_from(RECORDS), st.tuples(inner, inner))


def _sequences(inner: st.SearchStrategy[Blueprint], batch: int, lists: bool) -> st.SearchStrategy[Blueprint]:
    if not lists:  # a tuple with a tensor is never read as one entry per sample
        return st.builds(lambda first, more: _in_sequence(tuple, [first, *more]), anchors(batch), st.lists(inner))
    # A sequence as long as the batch could be read as one entry per sample.
    items = st.lists(inner, max_size=4).filter(lambda found: len(found) != batch)
    return st.builds(_in_sequence, st.sampled_from([list, tuple]), items)


def containers(inner: st.SearchStrategy[Blueprint], batch: int, lists: bool = True) -> st.SearchStrategy[Blueprint]:
    return st.one_of(_mappings(inner), _records(inner), _sequences(inner, batch, lists))


def blueprints(batch: int, lists: bool = True) -> st.SearchStrategy[Blueprint]:
    """Any structure. Its first leaf is a batched tensor, which determines the batch size."""
    inner = st.recursive(leaves(batch), lambda below: containers(below, batch, lists), max_leaves=8)
    return st.builds(lambda anchor, more: _in_mapping(dict, {"x": anchor, "more": more}), anchors(batch), inner)


@st.composite
def anchors(draw: st.DrawFn, batch: int) -> Blueprint:
    tensor = draw(tensors((batch, *draw(trailing()))))
    return lambda rows: tensor if rows == slice(0, batch) else tensor[rows]


# Comparing


def assert_same(one: Any, other: Any, where: str = "value") -> None:
    """Assert equal types, order, dtypes, requires_grad and values at every depth."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad), where
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        np.testing.assert_array_equal(one, other)
    else:
        if isinstance(one, defaultdict):
            assert one.default_factory is other.default_factory, where
        mine, theirs = list(children(one)), list(children(other))
        assert [key for key, _ in mine] == [key for key, _ in theirs], where
        for (key, left), (_, right) in zip(mine, theirs, strict=True):
            assert_same(left, right, f"{where}.{key}")
        assert mine or one == other, where


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a container, in order; nothing for a leaf."""
    if isinstance(value, (dict, UserDict)):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif attrs.has(type(value)):
        yield from ((field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))


def pairs_of_tensors(one: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of corresponding tensors of two equal structures."""
    if isinstance(one, Tensor):
        yield one, other
    for (_, left), (_, right) in zip(children(one), children(other), strict=True):
        yield from pairs_of_tensors(left, right)


def slices(sizes: tuple[int, ...]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
