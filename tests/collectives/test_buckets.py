"""Sums of gradients, and tensors sent in flat buckets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.collectives.buckets import (
    MIN_REUSE_BYTES,
    are_reusable,
    gather_gradients,
    reusable_gradients,
    sum_gradients,
)
from instep.devices import copy_to_replicas, make_buckets


class Shared(nn.Module):
    """Both parameters get views of one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.randn(3 * MIN_REUSE_BYTES // 8)) for _ in range(2))  # large ones

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.p.view(3, -1) + self.q.view(3, -1))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_gradients_that_share_memory_are_summed_once(replicas: int) -> None:
    net = Shared()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 3)
    with instep.DataParallel(net, ["cpu"] * replicas) as model:
        model(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    torch.testing.assert_close(net.p.grad, plain.p.grad)
    torch.testing.assert_close(net.q.grad, plain.q.grad)


def test_the_callers_gradient_is_not_written_to() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.zeros(MIN_REUSE_BYTES))

        def forward(self, x: Tensor) -> Tensor:
            return self.p.view(1, -1).expand(len(x), -1)

    gradient = torch.randn(2, MIN_REUSE_BYTES)
    before = gradient.clone()
    with instep.DataParallel(Returns(), ["cpu"] * 2) as model:
        model(torch.zeros(2, 1)).backward(gradient)
        torch.testing.assert_close(model.p.grad, before.sum(0))
    assert torch.equal(gradient, before)


def test_sums_reuse_the_memory_of_unshared_gradients() -> None:
    alone, both, small = torch.ones(MIN_REUSE_BYTES), torch.ones(MIN_REUSE_BYTES, 2), torch.ones(4)
    views = [both[:, 0], both.view(-1), small]
    more = [torch.full_like(gradient, 2.0) for gradient in (alone, *views)]
    columns = [[alone, *views], more]
    sums = sum_gradients(columns, reusable_gradients(columns[0]))
    assert sums[0] is alone
    assert torch.equal(alone, torch.full((MIN_REUSE_BYTES,), 3.0))
    assert torch.equal(both, torch.ones(MIN_REUSE_BYTES, 2))
    assert torch.equal(small, torch.ones(4))  # not worth the question
    assert all(torch.equal(total, torch.full_like(total, 3.0)) for total in sums if total is not None)


def test_large_gradients_with_the_conjugate_bit_add_up() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(MIN_REUSE_BYTES // 8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w.conj()

    net = Turned()
    plain = copy.deepcopy(net)
    x = torch.randn(3, MIN_REUSE_BYTES // 8, dtype=torch.complex64)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        model(x).abs().square().sum().backward()
    plain(x).abs().square().sum().backward()
    torch.testing.assert_close(net.w.grad, plain.w.grad)


def test_missing_gradients_count_as_zero() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    sums = sum_gradients([[None, one, None], [two, two, None], [None, one, None]])
    assert sums[0] is two
    assert torch.equal(sums[1], torch.full((2,), 4.0))
    assert sums[2] is None
    assert torch.equal(one, torch.ones(2))


def test_sparse_and_dense_gradients_add_up() -> None:
    dense = torch.ones(3, 2)
    sparse = torch.eye(3)[:, :2].to_sparse()
    for column in ([dense, sparse], [sparse, dense]):
        (total,) = sum_gradients([[column[0]], [column[1]]])
        assert torch.equal(total, dense + torch.eye(3)[:, :2])
    (total,) = sum_gradients([[sparse], [sparse]])
    assert total.is_sparse


def test_buckets_keep_order_dtype_and_limit() -> None:
    tensors = [torch.zeros(10), torch.zeros(5, dtype=torch.float64), torch.zeros(10), torch.zeros(3)]
    assert [bucket.indices for bucket in make_buckets(tensors)] == [(0, 2, 3), (1,)]
    assert [bucket.indices for bucket in make_buckets(tensors, limit=40)] == [(0,), (1,), (2,), (3,)]


def test_send_writes_values_without_changing_versions() -> None:
    sources = [torch.randn(3, 4), torch.randn(2, dtype=torch.float64), torch.randn(2, 3, 4, 5).contiguous()]
    targets = [[torch.zeros_like(s), torch.zeros_like(s)] for s in sources]
    versions = [t._version for pair in targets for t in pair]
    copy_to_replicas(sources, [[pair[0] for pair in targets], [pair[1] for pair in targets]])
    for source, pair in zip(sources, targets, strict=True):
        assert torch.equal(pair[0], source)
        assert torch.equal(pair[1], source)
    assert [t._version for pair in targets for t in pair] == versions


def test_gather_does_not_copy_local_gradients() -> None:
    near = [torch.randn(2), None, torch.eye(2).to_sparse()]
    assert all(a is b for a, b in zip(gather_gradients(near, torch.device("cpu")), near, strict=True))


def test_all_gradients_are_reusable_only_if_nothing_else_uses_their_memory() -> None:
    one, other, whole = torch.ones(4), torch.ones(2, 3), torch.ones(2, 4)
    assert are_reusable([one, other])
    assert not are_reusable([one, None])
    assert not are_reusable([one, whole[0]])
    assert not are_reusable([one, torch.ones(2, 4).t()])
    assert not are_reusable([one, torch.eye(2).to_sparse()])
