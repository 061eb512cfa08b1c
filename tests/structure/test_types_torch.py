"""Packed sequences, nested and sparse tensors and distributions: cut, joined, and differentiated through both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import rnn

import instep
from instep.errors import MergeError, StructureError
from instep.structure import types_torch
from instep.structure.types import TypeHandler
from instep.structure.types_torch import PACKED_SEQUENCE, tensor_handler

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning"),
]

SIZES = [(3, 2, 2), (7,), (1,) * 7, (1, 6), (4, 3)]
sizes_of_seven = pytest.mark.parametrize("sizes", SIZES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    types_torch.register_torch_types()


# Packed sequences


def sequences(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.randn(length, 3, dtype=torch.float64, requires_grad=True) for length in lengths]


def assert_packed_equal(one: rnn.PackedSequence, other: rnn.PackedSequence) -> None:
    assert type(one) is type(other)
    for name in one._fields:
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name
    assert one.data.requires_grad == other.data.requires_grad
    assert one.batch_sizes.device.type == "cpu"


@sizes_of_seven
@pytest.mark.parametrize("lengths", [(3, 5, 1, 5, 2, 2, 4), (2, 2, 2, 2, 2, 2, 2), (1, 1, 6, 1, 1, 1, 1)], ids=str)
def test_parts_of_a_packed_sequence_are_what_packing_them_alone_gives(
    lengths: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    samples = sequences(lengths)
    packed = rnn.pack_sequence(samples, enforce_sorted=False)
    assert PACKED_SEQUENCE.size(packed) == 7
    parts = PACKED_SEQUENCE.split(packed, sizes)
    for part, wanted in zip(parts, torch.arange(7).split(list(sizes)), strict=True):
        assert_packed_equal(part, rnn.pack_sequence([samples[i] for i in wanted.tolist()], enforce_sorted=False))
    assert_packed_equal(PACKED_SEQUENCE.merge(parts), packed)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=40), data=st.data())
def test_merge_undoes_split_with_many_equal_lengths(lengths: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(lengths) - 1)), max_size=4)))
    bounds = [0, *(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    packed = rnn.pack_sequence(sequences(lengths), enforce_sorted=False)
    assert_packed_equal(PACKED_SEQUENCE.merge(PACKED_SEQUENCE.split(packed, sizes)), packed)


@sizes_of_seven
def test_sequences_packed_in_order_have_no_indices_in_parts_and_whole(sizes: tuple[int, ...]) -> None:
    packed = rnn.pack_sequence(sequences((6, 5, 5, 3, 2, 1, 1)))
    parts = PACKED_SEQUENCE.split(packed, sizes)
    assert all(part.sorted_indices is None and part.unsorted_indices is None for part in parts)
    assert_packed_equal(PACKED_SEQUENCE.merge(parts), packed)


def test_parts_without_indices_that_are_out_of_order_together_get_them() -> None:
    short, long = sequences((2, 1)), sequences((4, 3))
    merged = PACKED_SEQUENCE.merge([rnn.pack_sequence(short), rnn.pack_sequence(long)])
    assert_packed_equal(merged, rnn.pack_sequence([*short, *long], enforce_sorted=False))


@sizes_of_seven
def test_an_lstm_over_parts_gives_outputs_and_gradients_of_the_whole(sizes: tuple[int, ...]) -> None:
    lstm = nn.LSTM(3, 4, batch_first=True).double()
    samples = sequences((3, 5, 1, 5, 2, 2, 4))
    packed = rnn.pack_sequence(samples, enforce_sorted=False)
    whole, _ = lstm(packed)
    weights = torch.randn_like(whole.data)
    wanted = torch.autograd.grad((whole.data * weights).sum(), [*samples, *lstm.parameters()], retain_graph=True)
    merged = PACKED_SEQUENCE.merge([lstm(part)[0] for part in PACKED_SEQUENCE.split(packed, sizes)])
    torch.testing.assert_close(merged.data, whole.data)
    torch.testing.assert_close(rnn.pad_packed_sequence(merged)[0], rnn.pad_packed_sequence(whole)[0])
    found = torch.autograd.grad((merged.data * weights).sum(), [*samples, *lstm.parameters()])
    torch.testing.assert_close(found, wanted)


def test_mapping_a_packed_sequence_leaves_batch_sizes_alone() -> None:
    packed = rnn.pack_sequence(sequences((1, 3)), enforce_sorted=False)
    seen: list[Tensor] = []
    new = PACKED_SEQUENCE.map(lambda tensor: (seen.append(tensor), tensor.clone())[1], packed)
    assert [id(tensor) for tensor in seen] == [
        id(packed.data),
        id(packed.sorted_indices),
        id(packed.unsorted_indices),
    ]
    assert new.batch_sizes is packed.batch_sizes
    assert_packed_equal(new, packed)
    assert PACKED_SEQUENCE.to_device is not None
    moved = PACKED_SEQUENCE.to_device(packed, "meta")
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


# Nested tensors


def nested(layout: torch.layout, requires_grad: bool = True) -> Tensor:
    rows = [torch.randn(length, 3, dtype=torch.float64) for length in (2, 4, 1, 3, 3, 1, 5)]
    return torch.nested.nested_tensor(rows, layout=layout, requires_grad=requires_grad)


def kind_for(value: Tensor) -> TypeHandler:
    kind = tensor_handler(value)
    assert kind is not None
    return kind


def assert_nested_equal(one: Tensor, other: Tensor) -> None:
    assert one.layout == other.layout
    assert one.requires_grad == other.requires_grad
    assert one.dtype == other.dtype
    torch.testing.assert_close(list(one.unbind()), list(other.unbind()), rtol=0, atol=0)


@sizes_of_seven
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_round_trip(layout: torch.layout, requires_grad: bool, sizes: tuple[int, ...]) -> None:
    value = nested(layout, requires_grad)
    kind = kind_for(value)
    assert kind.size(value) == 7
    parts = kind.split(value, sizes)
    assert [kind.size(part) for part in parts] == list(sizes)
    for part, rows in zip(parts, torch.arange(7).split(list(sizes)), strict=True):
        assert_nested_equal(part, kind.merge([kind.split(value, (1,) * 7)[row] for row in rows.tolist()]))
    assert_nested_equal(kind.merge(parts), value)


@sizes_of_seven
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_differentiable_through_split_and_merge(
    layout: torch.layout, sizes: tuple[int, ...]
) -> None:
    linear = nn.Linear(3, 2).double()
    value = nested(layout)
    kind = kind_for(value)

    def loss(out: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(out, 0.0).square().sum()

    def grads(out: Tensor) -> list[Tensor]:
        leaf, *others = torch.autograd.grad(loss(out), [value, *linear.parameters()])
        return [*leaf.unbind(), *others]

    wanted = grads(linear(value))
    found = grads(kind.merge([linear(part) for part in kind.split(value, sizes)]))
    torch.testing.assert_close(found, wanted)


@sizes_of_seven
def test_jagged_tensors_that_fit_together_still_do(sizes: tuple[int, ...]) -> None:
    value = nested(torch.jagged)
    mask = torch.nested.nested_tensor_from_jagged((value.values() > 0).double(), value.offsets())
    kind = kind_for(value)
    parts = [part * gate for part, gate in zip(kind.split(value, sizes), kind.split(mask, sizes), strict=True)]
    merged = kind.merge(parts)
    assert_nested_equal(merged, value * mask)
    assert_nested_equal(merged + value, value * mask + value)
    unknown = [torch.nested.nested_tensor_from_jagged(part.values(), part.offsets().clone()) for part in parts]
    assert_nested_equal(kind.merge(unknown) + kind.merge([part.sin() for part in unknown]), merged + merged.sin())


def test_a_jagged_tensor_split_for_inference_can_be_trained_on_later() -> None:
    value = nested(torch.jagged)
    kind = kind_for(value)
    with torch.inference_mode():
        kind.merge([part.sin() for part in kind.split(value, (3, 4))])
    merged = kind.merge([part.sin() for part in kind.split(value, (3, 4))])
    (found,) = torch.autograd.grad(merged.values().sum(), value)
    torch.testing.assert_close(found.values(), value.values().cos())


def test_a_transposed_jagged_tensor_keeps_its_ragged_dim() -> None:
    value = nested(torch.jagged).transpose(1, 2)
    kind = kind_for(value)
    parts = kind.split(value, (3, 4))
    assert isinstance(parts[0].shape[1], int)
    assert_nested_equal(kind.merge(parts), value)


# Sparse tensors


def sparse(coalesced: bool, requires_grad: bool = True, dense_dims: int = 0) -> Tensor:
    indices = torch.tensor([[6, 0, 3, 3, 5, 0, 3], [1, 2, 0, 4, 2, 0, 0]])
    values = torch.randn(7, *(2,) * dense_dims, dtype=torch.float64)
    value = torch.sparse_coo_tensor(indices, values, (7, 5, *(2,) * dense_dims))
    return (value.coalesce() if coalesced else value).requires_grad_(requires_grad)


@sizes_of_seven
@pytest.mark.parametrize("dense_dims", [0, 1])
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_tensors_round_trip(coalesced: bool, dense_dims: int, sizes: tuple[int, ...]) -> None:
    value = sparse(coalesced, dense_dims=dense_dims)
    kind = kind_for(value)
    assert kind.size(value) == 7
    parts = kind.split(value, sizes)
    for part, wanted in zip(parts, value.detach().to_dense().split(list(sizes)), strict=True):
        assert torch.equal(part.detach().to_dense(), wanted)
    merged = kind.merge(parts)
    assert (merged.layout, merged.dtype, merged.shape) == (value.layout, value.dtype, value.shape)
    assert merged.requires_grad
    torch.testing.assert_close(merged.to_dense(), value.to_dense(), rtol=0, atol=0)
    assert torch.equal(merged.coalesce().indices(), value.coalesce().indices())


@sizes_of_seven
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_tensors_are_differentiable_through_split_and_merge(coalesced: bool, sizes: tuple[int, ...]) -> None:
    value = sparse(coalesced)
    kind = kind_for(value)
    weight = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def grads(forward: Callable[[Tensor], Tensor], whole: Tensor) -> list[Tensor]:
        return [
            g.to_dense()
            for g in torch.autograd.grad(forward(whole), [value, weight], allow_unused=True)
            if g is not None
        ]

    for loss in (lambda x: torch.sparse.mm(x, weight).square().sum(), lambda x: x.to_dense().square().sum()):
        wanted = grads(loss, value)
        torch.testing.assert_close(grads(loss, kind.merge(kind.split(value, sizes))), wanted)
        torch.testing.assert_close(grads(lambda x: sum(map(loss, kind.split(x, sizes))), value), wanted)  # noqa: B023


def test_a_part_of_a_sparse_tensor_that_is_not_used_has_no_gradient() -> None:
    value = sparse(coalesced=True)
    part = kind_for(value).split(value, (3, 4))[1]
    part.to_dense().sum().backward()
    assert value.grad is not None
    dense = value.grad.to_dense()
    assert dense[:3].abs().sum() == 0
    assert dense[3:].abs().sum() > 0


def test_other_sparse_layouts_say_what_to_write() -> None:
    value = torch.eye(3).to_sparse_csr()
    kind = kind_for(value)
    with pytest.raises(StructureError, match="to_sparse_coo"):
        kind.split(value, (1, 2))
    with pytest.raises(MergeError, match="to_sparse_coo"):
        kind.merge([value])


def test_ordinary_tensors_have_no_kind() -> None:
    assert tensor_handler(torch.zeros(3)) is None
    assert tensor_handler(nn.Parameter(torch.zeros(()))) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_model_that_takes_nested_tensors(engine: str, layout: Any) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(row).sum(0) for row in x.unbind()])

    net = Sums()
    x = torch.nested.nested_tensor([torch.randn(n + 1, 4) for n in range(7)], layout=layout)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x), net(x))
        assert "nested" in str(model.explain(x)) or "NestedTensor" in str(model.explain(x))


class Loose(nn.Module):
    """Gives a nested tensor of the layout that has no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).sum(-1), torch.nested.as_nested_tensor([self.layer(row) for row in x])


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_nested_outputs_bring_gradients_back(engine: str) -> None:
    net, x = Loose().double(), torch.randn(5, 2, 3, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        found = []
        for run in (net, model):
            net.zero_grad()
            rows, nested = run(x)
            loss = rows.sum() + sum(piece.pow(2).sum() * (1 + i) for i, piece in enumerate(nested.unbind()))
            loss.backward()
            found.append([nested.detach().to_padded_tensor(0.0), *[p.grad.clone() for p in net.parameters()]])
    torch.testing.assert_close(*found)
