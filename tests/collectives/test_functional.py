"""`all_reduce`, `all_gather` and `replica` return in a replica what one device would compute on the whole batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import instep
from instep.runtime.probe_flag import probe_context

from ..replica_helpers import (
    ENGINE_MODES,
    FunctionModule,
    assert_close,
    assert_same_gradients,
    batch,
    check,
    replicated,
    weighted_loss,
)

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)
each_engine = pytest.mark.parametrize("way", ["serial", "threads", "processes"])


@each_way
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("replicas", [2, 4])
def test_all_gather_returns_the_whole_batch(way: str, private: bool, replicas: int) -> None:
    def contrast(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return (z @ instep.all_gather(self.other(x)).T).log_softmax(1)

    check(contrast, way, replicas=replicas, private_copies=private)


@each_way
def test_a_mean_is_weighted_by_samples(way: str) -> None:
    def centre(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z - instep.all_reduce(z.mean(0), "mean")

    check(centre, way)


@each_way
def test_a_sum_over_the_batch(way: str) -> None:
    check(lambda self, x: self.layer(x) / instep.all_reduce(self.layer(x).exp().sum(0)), way)


@each_way
@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_with_gradients(way: str, op: str) -> None:
    def extreme(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z - instep.all_reduce(z.amax(0) if op == "max" else z.amin(0), op)

    check(extreme, way)


@each_way
def test_the_gradient_of_a_tie_is_shared_by_the_replicas(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        weight = self.layer.weight.amax()
        return self.layer(x) * instep.all_reduce(weight, "max")

    check(body, way)


@each_way
def test_structures_are_reduced_leaf_by_leaf(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        got = instep.all_reduce({"z": z.sum(0), "n": len(x), "pair": (z.sum(), "name")})
        assert got["pair"][1] == "name"
        assert got["n"] == 7
        return z * got["z"] / got["n"] + got["pair"][0]

    check(body, way)


@dataclasses.dataclass
class Samples:
    z: Tensor
    names: list[str]
    sequences: list[Tensor]
    array: np.ndarray
    kind: str


@each_way
def test_structures_are_gathered_with_their_samples(way: str) -> None:
    x = batch()
    names = [f"s{i}" for i in range(7)]

    def body(self: Any, x: Tensor, names: list[str]) -> Tensor:
        z = self.layer(x)
        mine = Samples(z, names, [row[: 1 + i % 2] for i, row in enumerate(z)], np.arange(len(x)), "kind")
        got = instep.all_gather(mine)
        assert got.names == [f"s{i}" for i in range(7)]
        assert got.kind == "kind"
        assert len(got.array) == 7
        return z + torch.stack([s.sum() for s in got.sequences]).sum() / 3 + got.z.mean(0)

    def loss(out: Tensor) -> Tensor:
        return weighted_loss(out)

    with replicated(FunctionModule(body), way) as (plain, model):
        loss(model(x, names)).backward()
        z = plain.layer(x)
        shards = z[:3], z[3:5], z[5:]
        total = sum(row[: 1 + i % 2].sum() for shard in shards for i, row in enumerate(shard))
        expected = z + total / 3 + z.mean(0)
        loss(expected).backward()
        assert_close(model(x, names), expected)
        assert_same_gradients(model, plain)


@each_way
def test_gathered_samples_may_be_written_to(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        rows = instep.all_gather(list(z))
        peers = instep.all_gather(z)
        for row in rows:
            row.mul_(2.0)
        peers.mul_(3.0)
        z.mul_(5.0)
        return z + peers.mean(0)

    def plain_body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z * 5.0 + (z * 3.0).mean(0)

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        plain.body = plain_body
        with torch.no_grad():
            assert_close(model(x), plain(x))


@each_way
def test_other_dims_and_scalars_and_integers(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        wide = instep.all_gather(z.T, dim=1)
        assert wide.shape == (4, 7)
        assert torch.equal(instep.all_gather(z.T, dim=-1), wide)
        index = instep.all_gather(torch.arange(len(x)))
        assert not index.requires_grad
        flags = instep.all_reduce(torch.tensor([True, len(x) > 2]), "min")
        assert flags.tolist() == [True, len(index) == len(x)]
        totals = instep.all_gather(z.sum())
        total = totals.sum() if totals.ndim else totals
        return z @ wide + total

    check(body, way)


@each_way
def test_replica_returns_index_size_and_offset(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        here = instep.replica()
        assert here.device in (None, torch.device("cpu"))
        assert here.size in (None, len(x))
        return torch.stack([torch.tensor([here.index, here.count, here.offset + i]) for i in range(len(x))])

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model), torch.no_grad():
        assert model(x).T.tolist() == [[0, 0, 0, 1, 1, 2, 2], [3] * 7, list(range(7))]
        assert plain(x).T.tolist() == [[0] * 7, [1] * 7, list(range(7))]


def test_collectives_outside_a_call_return_their_argument() -> None:
    x = {"a": [batch()], "b": "text"}
    with probe_context() as excuses:
        assert instep.all_gather(x) is x
        assert instep.all_reduce(x, "max") is x
        assert (instep.replica().index, instep.replica().count) == (0, 1)
    assert excuses == ["a cross-replica operation"] * 4
    with pytest.raises(instep.CollectiveError, match="sum, mean, max, min"):
        instep.all_reduce(x, "product")


@each_way
def test_one_replica_and_one_sample_are_the_module_itself(way: str) -> None:
    same: list[bool] = []

    def body(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x)
        same.append(instep.all_gather(z) is z and instep.all_reduce(z) is z and instep.replica().count == 1)
        return z

    with replicated(FunctionModule(body), way) as (_, model):
        model(batch(1))
    with replicated(FunctionModule(body), way, replicas=1) as (_, model):
        model(batch())
    assert same == [True, True]


@each_way
def test_numbers_alone(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        assert instep.all_reduce(len(x)) == 7
        assert instep.all_reduce(float(instep.replica().index), "max") == instep.replica().count - 1
        return self.layer(x) * instep.all_reduce(1.5, "mean")

    check(body, way)
