"""Containers are opened by name and closed again as what they were."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from instep.structure.split import split
from instep.structure.tree import (
    attributes_of,
    flatten_one_level,
    format_path,
    is_sequence,
    map_tensors,
    shallow_copy,
    tensors_in,
)

Pair = namedtuple("Pair", ["left", "right"])


class Titled(list[Any]):
    title = ""


class Triple(tuple[Any, ...]):
    pass


class Attributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Mirrored(dict[str, Any]):
    """Its items are attributes too."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class Store(MutableMapping[str, Any]):
    """A mapping that cannot be made from its items."""

    def __init__(self, first: str, second: Any) -> None:
        self.items_held = {first: second}

    def __getitem__(self, key: str) -> Any:
        return self.items_held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_held)

    def __len__(self) -> int:
        return len(self.items_held)


@dataclass(frozen=True)
class Sealed:
    left: Any
    right: Any = field(init=False, default=2)


@attrs.define
class Defined:
    left: Any
    right: Any


def titled(items: list[Any]) -> Titled:
    made = Titled(items)
    made.title = "kept"
    return made


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ([1, 2], (0, 1)),
        ((1, 2), (0, 1)),
        ((), ()),
        (titled([1, 2]), (0, 1)),
        (Triple([1, 2, 3]), (0, 1, 2)),
        (Pair(1, 2), ("left", "right")),
        ({"b": 1, "a": 2, 3: 4}, ("b", "a", 3)),
        (OrderedDict(b=1, a=2), ("b", "a")),
        (defaultdict(list, b=1), ("b",)),
        (Counter(b=1), ("b",)),
        (UserDict(b=1), ("b",)),
        (Mirrored({"b": 1}), ("b",)),
        (types.MappingProxyType({"b": 1}), ("b",)),
        (Sealed(1), ("left", "right")),
        (Defined(1, 2), ("left", "right")),
        (deque([1, 2], maxlen=5), (0, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_opened_is_closed_again(value: Any, keys: tuple[Any, ...]) -> None:
    node = flatten_one_level(value)
    assert node is not None
    assert tuple(node.keys) == keys
    again = node.unflatten(node.children)
    assert type(again) is type(value)
    assert again == value
    assert getattr(again, "title", None) == getattr(value, "title", None)


def test_closing_around_other_children_leaves_the_first_alone() -> None:
    for value in (
        {"a": 1},
        [1],
        UserDict(a=1),
        Mirrored({"a": 1}),
        Store("a", 1),
        Sealed(1),
        Attributes(a=1),
        titled([1]),
    ):
        node = flatten_one_level(value)
        assert node is not None
        other = node.unflatten([7] * len(node.keys))
        first = flatten_one_level(other)
        assert first is not None
        assert first.children[0] == 7
        again = flatten_one_level(value)
        assert again is not None
        assert again.children[0] == 1


def test_items_and_attributes_agree() -> None:
    for value in (Mirrored({"a": torch.arange(4)}), Attributes(a=torch.arange(4))):
        for part in split(value, 2):
            assert part.a.tolist() == part["a"].tolist()
            assert len(part.a) == 2


def test_a_mapping_keeps_what_it_holds_besides() -> None:
    value: Any = UserDict(x=torch.arange(4))
    value.source = "here"
    parts = split(value, 2)
    assert [part.source for part in parts] == ["here", "here"]
    assert value["x"].tolist() == [0, 1, 2, 3]
    store = split(Store("x", torch.arange(4)), 2)
    assert [part["x"].tolist() for part in store] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "leaf",
    [torch.zeros(2), torch.Size([2]), "text", b"text", 1, 2.0, None, nn.Linear(1, 1), {1, 2}, range(3), torch.float32],
)
def test_leaves_are_not_opened(leaf: Any) -> None:
    assert flatten_one_level(leaf) is None


def test_results_of_torch_go_by_name() -> None:
    node = flatten_one_level(torch.max(torch.eye(3), 1))
    assert node is not None
    assert node.keys == ("values", "indices")
    again = node.unflatten([torch.zeros(1), torch.ones(1)])
    assert isinstance(again, torch.return_types.max)
    assert again.indices.tolist() == [1]


def test_only_sequences_without_names_can_be_columns() -> None:
    assert is_sequence([1])
    assert is_sequence((1,))
    assert is_sequence(Titled())
    for other in (Pair(1, 2), torch.max(torch.eye(2), 1), {}, "text", deque()):
        assert not is_sequence(other)


def test_a_dataclass_keeps_no_whole_tensor_beside_its_fields() -> None:
    @dataclass
    class Batch:
        x: Tensor

        def __post_init__(self) -> None:
            self.double = self.x * 2

        @cached_property
        def total(self) -> Tensor:
            return self.x.sum()

    batch = Batch(torch.arange(4))
    assert batch.total == 6
    first, second = split(batch, 2)
    assert first.double.tolist() == [0, 2]
    assert (first.total, second.total) == (1, 5)
    assert (batch.total, batch.double.tolist()) == (6, [0, 2, 4, 6])


def test_a_module_is_not_opened_even_if_it_is_a_dataclass() -> None:
    @dataclass(eq=False)
    class Net(nn.Module):
        width: int

        def __post_init__(self) -> None:
            super().__init__()

    assert flatten_one_level(Net(3)) is None


def test_attributes_are_found_in_slots_too() -> None:
    class Base:
        __slots__ = ("__private", "plain")

        def __init__(self) -> None:
            self.__private, self.plain = 1, 2

        def private(self) -> int:
            return self.__private

    class Child(Base):
        __slots__ = "single"

        def __init__(self) -> None:
            super().__init__()
            self.single = 3

    class Open(Child):
        pass

    value = Open()
    value.extra = 4  # type: ignore[attr-defined]
    assert set(attributes_of(value).values()) == {1, 2, 3, 4}
    copied = shallow_copy(value)
    assert (copied.private(), copied.plain, copied.single, copied.extra) == (1, 2, 3, 4)


def test_tensors_are_mapped_in_order() -> None:
    value = {"a": torch.tensor(1), "b": [torch.tensor(2), "text", (torch.tensor(3),)], "c": Pair(torch.tensor(4), None)}
    assert [int(tensor) for tensor in tensors_in(value)] == [1, 2, 3, 4]
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert [int(tensor) for tensor in tensors_in(doubled)] == [2, 4, 6, 8]
    assert doubled["b"][1] == "text"
    assert type(doubled["c"]) is Pair


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, dict, OrderedDict, lambda x: list(x.values()), lambda x: tuple(x.values()), lambda x: Pair(x, [x])],
    ids=["dict", "copy", "ordered", "list", "tuple", "named tuple"],
)
def test_tensors_come_in_the_order_in_which_they_are_mapped(wrap: Any) -> None:
    """Also those that occur twice, and those of subclasses."""
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.zeros(3))
    inner = {"a": [tensor, "text", {"b": parameter, "c": None}], "d": (1.5, OrderedDict(e=tensor), torch.float32)}
    value, mapped = wrap({"first": inner, "second": parameter}), []
    map_tensors(lambda t: mapped.append(t) or t, value)
    found = list(tensors_in(value))
    assert len(found) == len(mapped) > 2
    assert all(map(is_, found, mapped))


def test_paths() -> None:
    assert format_path(("batch", "ids", 0)) == "batch.ids.0"
    assert format_path(("", "ids", 0)) == "ids.0"
    assert format_path(("",)) == format_path(()) == ""


def test_hugging_face_outputs_go_by_name() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.SequenceClassifierOutput(logits=torch.zeros(4, 3), hidden_states=(torch.zeros(4, 2),))
    node = flatten_one_level(value)
    assert node is not None
    assert tuple(node.keys) == ("logits", "hidden_states")
    value["extra"] = torch.arange(4)
    first, second = split(value, 2)
    assert type(first) is outputs.SequenceClassifierOutput
    assert first.loss is None
    assert (first.logits.shape, second.hidden_states[0].shape) == ((2, 3), (2, 2))
    assert second["extra"].tolist() == [2, 3]
