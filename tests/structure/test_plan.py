"""The splitting table, row by row, and the splits that a size alone gets wrong."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as torch_pytree

from instep.structure.placements import CustomSplit, Nested, PerSample, Placement, PreSplit, Replicate, Shard, describe
from instep.structure.plan import Planner, named_arguments
from instep.structure.sizes import balanced_sizes
from instep.structure.spec import Shards, whole

from .plan_helpers import B, plan, refusal, role_of, x

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    left: Any
    right: Any


@attrs.frozen
class Defined:
    left: Any
    right: Any


class Opaque:
    def __init__(self, held: Any = None) -> None:
        self.held = held


# Every row of the table


@pytest.mark.parametrize(
    ("value", "role"),
    [
        (torch.zeros(B), Shard(0)),
        (torch.zeros(B, 1, 3), Shard(0)),
        (np.zeros((B, 3)), Shard(0)),
        (np.array(list("abcdef")), Shard(0)),
        (nn.Parameter(torch.zeros(B)), Shard(0)),
        (torch.tensor(1.0), Replicate("0-d")),
        (np.array(1.0), Replicate("0-d")),
        (torch.zeros(1), Replicate("size 1 broadcasts")),
        (torch.zeros(1, B), Replicate("size 1 broadcasts")),
        (whole(torch.zeros(B)), Replicate("marked whole")),
        (whole(torch.zeros(4)), Replicate("marked whole")),
        (Shards([torch.zeros(4), torch.zeros(2)]), PreSplit((4, 2))),
        ([torch.zeros(3, n) for n in range(B)], PerSample()),
        ([{"boxes": torch.zeros(n, 4)} for n in range(B)], PerSample()),
        (list("abcdef"), PerSample()),
        ([1, 2, 3, 4, 5, 6], PerSample()),
        ([None] * B, PerSample()),
        ([Opaque() for _ in range(B)], PerSample()),
        ([Opaque(torch.zeros(3)) for _ in range(B)], PerSample()),
        ([[1] * n for n in range(B)], PerSample()),
        (tuple("abcdef"), PerSample()),
        (tuple(Opaque() for _ in range(B)), PerSample()),
        (3, Replicate("int")),
        (2.5, Replicate("float")),
        (True, Replicate("bool")),
        ("abcdef", Replicate("str")),
        (b"abcdef", Replicate("bytes")),
        (None, Replicate("NoneType")),
        (torch.relu, Replicate("builtin_function_or_method")),
        ((1, 2, 3, 4, 5, 6), Replicate("a tuple of 6, no tensors")),
        ((224, 224), Replicate("a tuple of 2, no tensors")),
        (("a", "b"), Replicate("a tuple of 2, no tensors")),
        ([224, 224], Replicate("a list of 2, no tensors")),
        (["a", "b"], Replicate("a list of 2, no tensors")),
        ([], Replicate("an empty list")),
        ((), Replicate("an empty tuple")),
        (torch.Size([B, 2]), Replicate("an object without tensors")),
        (torch.float32, Replicate("an object without tensors")),
        (Opaque("held"), Replicate("an object without tensors")),
        (np.float32(2), Replicate("an object without tensors")),
        (range(B), Replicate("an object without tensors")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_leaves(value: Any, role: Placement) -> None:
    assert role_of(value) == role


@pytest.mark.parametrize(
    "make",
    [
        lambda left, right: (left, right),
        lambda left, right: [left, right],
        lambda left, right: {"left": left, "right": right},
        lambda left, right: OrderedDict(left=left, right=right),
        lambda left, right: defaultdict(list, left=left, right=right),
        lambda left, right: UserDict(left=left, right=right),
        Pair,
        Record,
        Defined,
    ],
)
def test_structures_are_recursed_into(make: Callable[[Any, Any], Any]) -> None:
    role = role_of(make(torch.zeros(B), make("text", list("abcdef"))))
    assert isinstance(role, Nested)
    outer, inner = role.placements
    assert outer == Shard(0)
    assert isinstance(inner, Nested)
    assert inner.keys == role.keys
    assert inner.placements == (Replicate("str"), PerSample())


def test_registered_pytrees_are_recursed_into() -> None:
    class Points:
        def __init__(self, xyz: Tensor, label: str) -> None:
            self.xyz, self.label = xyz, label

    torch_pytree.register_pytree_node(Points, lambda p: ([p.xyz, p.label], None), lambda items, _: Points(*items))
    try:
        assert role_of(Points(torch.zeros(B, 3), "a")) == Nested((0, 1), (Shard(0), Replicate("str")))
    finally:
        torch_pytree._deregister_pytree_node(Points)


def test_a_named_result_of_torch_is_a_structure() -> None:
    assert role_of(torch.max(torch.zeros(B, 3), 1)) == Nested(("values", "indices"), (Shard(0), Shard(0)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: pack_sequence([torch.zeros(B - n, 2) for n in range(B)]),
        lambda: torch.nested.nested_tensor([torch.zeros(n + 1) for n in range(B)]),
        lambda: torch.nested.nested_tensor([torch.zeros(n + 1) for n in range(B)], layout=torch.jagged),
        lambda: torch.zeros(B, 3).to_sparse(),
    ],
    ids=["packed", "nested", "jagged", "sparse"],
)
def test_types_with_a_rule_of_their_own(make: Callable[[], Any]) -> None:
    assert isinstance(role_of(make()), CustomSplit)


def test_a_list_of_two_columns_is_a_structure() -> None:
    pairs = [("a", "b", "c"), ("d", "e", "f")]
    found = plan(x=torch.zeros(3), pairs=pairs)
    assert found.placements[1] == Nested((0, 1), (PerSample(), PerSample()))


@pytest.mark.parametrize("value", [iter([1]), (n for n in range(B)), map(str, range(B)), zip("ab", "cd", strict=True)])
def test_an_iterator_is_refused(value: Any) -> None:
    message = refusal(x=x, value={"deep": value})
    assert "'value.deep' is an iterator" in message
    assert "list(...)" in message


def test_a_module_is_refused() -> None:
    message = refusal(x=x, value=[nn.Linear(1, 1)])
    assert "'value.0' is a module (Linear)" in message


def test_an_object_that_holds_tensors_is_refused_with_the_line_to_write() -> None:
    message = refusal(x=x, value={"deep": Opaque([{"t": torch.zeros(3)}])})
    assert "cannot split argument 'value.deep': it is a Opaque, which contains tensors" in message
    assert "instep.register(Opaque, size=" in message
    assert "instep.whole(...)" in message


def test_an_object_that_comes_to_hold_a_tensor_is_refused() -> None:
    planner, held = Planner(2), Opaque("nothing")
    plan(planner, x=x, value=held)
    held.held = torch.zeros(B)
    assert "contains tensors" in refusal(planner, x=x, value=held)


def test_a_tensor_deep_inside_is_found() -> None:
    value: Any = Opaque(torch.zeros(3))
    for _ in range(20):
        value = (value,)
    assert "contains tensors" in refusal(x=x, value=value)


@pytest.mark.parametrize("arguments", [{}, {"a": 1, "b": "text"}, {"t": torch.tensor(1.0), "s": torch.zeros(1)}])
def test_nothing_batched_runs_in_one_part(arguments: dict[str, Any]) -> None:
    found = plan(Planner(4), **arguments)
    assert found.batch_size is None
    assert found.sizes == (0,)
    assert all(isinstance(role, Replicate) for role in found.placements)


@pytest.mark.parametrize("size", [0, 1])
def test_no_sample_and_one_sample_run_in_one_part(size: int) -> None:
    found = plan(Planner(4), x=torch.zeros(size, 3), y=["a"] * size, w=torch.zeros(1))
    assert (found.batch_size, found.sizes) == (size, (size,))


@pytest.mark.parametrize(
    ("batch", "replicas", "least", "sizes"),
    [
        (10, 4, 1, (3, 3, 2, 2)),
        (3, 4, 1, (1, 1, 1)),
        (10, 4, 3, (4, 3, 3)),
        (2, 4, 3, (2,)),
        (36, 7, 1, (6, 5, 5, 5, 5, 5, 5)),
    ],
)
def test_sizes(batch: int, replicas: int, least: int, sizes: tuple[int, ...]) -> None:
    assert balanced_sizes(batch, replicas, least) == sizes
    assert plan(Planner(replicas, min_shard=least), x=torch.zeros(batch)).sizes == sizes


def test_lists_and_tuples_find_the_batch_where_no_tensor_does() -> None:
    assert plan(texts=["a", "b", "c"], scale=2.0).batch_size == 3
    assert plan(texts=("a", "b", "c"), scale=2.0).batch_size == 3
    assert plan(items=[{"n": 1}, {"n": 2}]).batch_size == 2
    assert plan(size=(224, 224)).batch_size is None


def test_every_role_has_words() -> None:
    found = plan(a=x, b=list("abcdef"), c=1, d=Shards([x, x]), e=(x,), f=x.to_sparse())
    words = [describe(role) for role in found.placements]
    assert words == [
        "split along dim 0",
        "one entry per sample",
        "whole (int)",
        "already split",
        "structure",
        "split by its type's handler",
    ]


# The cache


def test_plans_are_kept_apart_where_they_differ() -> None:
    planner = Planner(2)
    first = plan(planner, x=torch.zeros(4, 3), y=1)
    assert plan(planner, x=torch.zeros(4, 9), y=2) is first
    assert plan(planner, x=torch.zeros(4, 3), z=1) is not first
    assert plan(planner, x=torch.zeros(5, 3), y=1).batch_size == 5
    assert plan(planner, x=torch.zeros(4), y=1) is not first
    assert plan(planner, x=(torch.zeros(4, 3),), y=1) is not first


def test_a_list_and_a_tuple_of_words_are_not_confused() -> None:
    planner = Planner(2)
    assert plan(planner, x=x, v=(1, 2, 3, 4, 5, 6)).placements[1] == Replicate("a tuple of 6, no tensors")
    assert plan(Planner(2), x=x, v=[1, 2, 3, 4, 5, 6]).placements[1] == PerSample()


def test_subclasses_of_arrays_are_measured_each_time() -> None:
    planner = Planner(2)
    for size in (4, 6):
        assert plan(planner, m=np.ma.masked_array(np.zeros(size))).batch_size == size


def test_the_declared_dim_is_part_of_what_is_remembered() -> None:
    planner = Planner(2, in_dims={"h": 1})
    assert plan(planner, h=torch.zeros(2, 4)).batch_size == 4
    assert plan(planner, h=torch.zeros(2, 6)).batch_size == 6


def test_the_cache_does_not_grow_for_ever() -> None:
    planner = Planner(2)
    for size in range(2, 302):
        plan(planner, x=torch.zeros(size, 0))
    assert len(planner._plans) <= 256


# Marks


def test_shards_decide_the_sizes() -> None:
    assert plan(Planner(3), x=x, s=Shards([torch.zeros(5), torch.zeros(1), torch.zeros(0)])).sizes == (5, 1, 0)
    assert plan(Planner(2), s=Shards([{"y": torch.zeros(5)}, {"y": torch.zeros(2)}])).sizes == (5, 2)
    assert plan(Planner(2), s=Shards([["a", "b"], ["c"]])).sizes == (2, 1)
    # Whatever cannot be counted is one sample a part.
    assert plan(Planner(2), seed=Shards([17, 18])).sizes == (1, 1)
    assert plan(Planner(2), x=x, seed=Shards([17, 18])).sizes == (3, 3)


def test_shards_that_do_not_match_the_replicas_are_refused() -> None:
    assert "'s' is Shards of 3 entries, but the call uses 2" in refusal(x=x, s=Shards([1, 2, 3]))
    assert "'s' is Shards of 3 entries, but the call uses 2" in refusal(s=Shards([1, 2, 3]))
    assert "'t' is Shards of 1 entries" in refusal(s=Shards([1, 2]), t=Shards([1]))
    message = refusal(s=Shards([x, x[:2]]), t=Shards([x[:2], x]))
    assert "'t' is Shards of [2, 6] samples, but argument 's' is Shards of [6, 2]" in message


# Names


def test_arguments_have_the_names_of_the_signature() -> None:
    names, values = named_arguments(["x", "y"], "rest", (1, 2, 3, 4), {"z": 5})
    assert names == ("x", "y", "rest.0", "rest.1", "z")
    assert values == (1, 2, 3, 4, 5)
    assert named_arguments([], None, (1,), {}) == (("args.0",), (1,))
