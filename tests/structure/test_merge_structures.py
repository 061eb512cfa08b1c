"""Structures of outputs keep their type, and what cannot be merged is refused by path."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as torch_pytree

from instep.structure.merge import merge
from instep.structure.tree import flatten_one_level

from .merge_helpers import SIZES, refused

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    left: Any
    right: Any


# Structures


@pytest.mark.parametrize(
    "make",
    [
        lambda left, right: (left, right),
        lambda left, right: {"left": left, "right": right},
        lambda left, right: OrderedDict(left=left, right=right),
        lambda left, right: defaultdict(list, left=left, right=right),
        lambda left, right: UserDict(left=left, right=right),
        Pair,
        Record,
    ],
)
def test_structures_keep_their_type(make: Callable[[Any, Any], Any]) -> None:
    parts = [make(torch.zeros(n, 2), make(["a"] * n, "same")) for n in SIZES]
    found = merge(parts, SIZES)
    assert type(found) is type(parts[0])
    node = flatten_one_level(found)
    assert node is not None
    left, right = node.children
    assert left.shape == (5, 2)
    assert type(right) is type(parts[0])


def test_entries_in_another_order_are_the_same_entries() -> None:
    found = merge([{"a": torch.zeros(3), "b": 1}, {"b": 1, "a": torch.ones(2)}], SIZES)
    assert list(found) == ["a", "b"]
    assert found["a"].tolist() == [0, 0, 0, 1, 1]


def test_other_entries_are_refused_by_path() -> None:
    message = refused([{"out": {"a": 1}}, {"out": {"a": 1, "b": 2}}])
    assert "the output 'out'" in message
    assert "replica 1 also has ['b']" in message


def test_results_of_torch() -> None:
    x = torch.randn(5, 4)
    found = merge([torch.max(x[:3], 1), torch.max(x[3:], 1)], SIZES)
    assert isinstance(found, torch.return_types.max)
    assert torch.equal(found.values, x.max(1).values)
    tops = merge([{"t": torch.topk(x[:3], 2)}, {"t": torch.topk(x[3:], 2)}], SIZES, merge={"t.indices": "drop"})["t"]
    assert tops.indices is None
    assert tops.values.shape == (5, 2)


def test_registered_pytrees() -> None:
    class Points:
        def __init__(self, xyz: Any, label: Any) -> None:
            self.xyz, self.label = xyz, label

    torch_pytree.register_pytree_node(Points, lambda p: ([p.xyz, p.label], None), lambda items, _: Points(*items))
    try:
        found = merge([Points(torch.zeros(3), "a"), Points(torch.zeros(2), "a")], SIZES)
        assert isinstance(found, Points)
        assert (len(found.xyz), found.label) == (5, "a")
    finally:
        torch_pytree._deregister_pytree_node(Points)


def test_hugging_face_outputs() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    parts = [
        outputs.CausalLMOutput(
            loss=torch.tensor(float(n)), logits=torch.zeros(n, 7, 5), hidden_states=(torch.zeros(n, 7, 4),) * 2
        )
        for n in SIZES
    ]
    found = merge(parts, SIZES, merge={"loss": "mean"})
    assert type(found) is outputs.CausalLMOutput
    assert found.loss == pytest.approx(2.6)
    assert found["logits"].shape == (5, 7, 5)
    assert [state.shape for state in found.hidden_states] == [(5, 7, 4)] * 2
    assert found.attentions is None


def test_types_with_a_rule_of_their_own() -> None:
    sequences = [torch.randn(n, 2) for n in (5, 4, 3, 2, 1)]
    found = merge([{"p": pack_sequence(sequences[:3])}, {"p": pack_sequence(sequences[3:])}], SIZES)["p"]
    assert isinstance(found, PackedSequence)
    assert torch.equal(found.data, pack_sequence(sequences).data)
    sparse = merge([torch.eye(3).to_sparse(), torch.eye(2, 3).to_sparse()], SIZES)
    assert sparse.is_sparse
    assert sparse.shape == (5, 3)
    parts = [torch.eye(3).to_sparse(), torch.eye(2, 3).to_sparse()]
    assert "Tensor of [3, 2] samples, from shards of [1, 1]" in refused(parts, [1, 1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_other_layouts_are_not_mixed() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    assert "different layouts" in refused([torch.eye(3).to_sparse(), nested])


def test_an_object_is_refused_with_the_line_to_write() -> None:
    message = refused([object(), object()])
    assert "instep.register(object" in message
    thing = object()
    assert merge([thing, thing], SIZES) is thing


def test_types_that_differ_are_refused() -> None:
    assert "['Tensor', 'list']" in refused([{"y": torch.zeros(3)}, {"y": [1, 2]}])
    assert "['dict', 'OrderedDict']" in refused([{"y": 1}, OrderedDict(y=1)])
