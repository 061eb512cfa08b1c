"""Training on ranks gives the numbers of the plain module, whatever is gathered and reduced."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import instep
from instep.errors import EngineError, WrapError

from ..in_ranks import DEVICE
from .conftest import Wrap, assert_same_training, batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a deprecated decorator in torch itself
    from torch.distributed.optim import ZeroRedundancyOptimizer

RANK, COUNT = dist.get_rank(), dist.get_world_size()


def net(features: int = 3, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(features, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double().to(DEVICE)


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(module(x), y)


def rows(size: int) -> slice:
    """The samples of this rank, as the plan splits them."""
    sizes = instep.split(torch.zeros(size), COUNT).sizes
    start = sum(sizes[:RANK])
    return slice(start, start + sizes[RANK])


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_uneven_batches_and_idle_ranks(wrap: Wrap, norm: bool) -> None:
    plain = net(norm=norm)
    assert_same_training(wrap(plain), plain, batches(7, 2, 8, 2, 5), loss_of)


def test_one_sample(wrap: Wrap) -> None:
    plain = net()
    assert_same_training(wrap(plain), plain, batches(1, 4, 1), loss_of)


def test_auto_chooses_torchrun(wrap: Wrap) -> None:
    assert f"engine=torchrun (torchrun has started one process per device; this is rank {RANK} of {COUNT})" in repr(
        wrap(net())
    )


def test_batch_norm_of_each_shard_is_the_same_on_all_ranks(wrap: Wrap) -> None:
    model = wrap(net(norm=True), sync_batchnorm=False, min_shard=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(4 * COUNT, 5, 3 * COUNT):
            loss_of(model, x, y).backward()
    states: list[Any] = [None] * COUNT
    dist.all_gather_object(states, {name: value.tolist() for name, value in model.state_dict().items()})
    assert all(state == states[0] for state in states)


class Branch(nn.Module):
    """Uses one of two layers, depending on the samples, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.unused = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        even = (y % 2 == 0).nonzero().flatten()
        odd = (y % 2 == 1).nonzero().flatten()
        out = x.new_zeros(len(x), 2)
        if len(even):
            out = out.index_add(0, even, self.even(x[even]))
        if len(odd):
            out = out.index_add(0, odd, self.odd(x[odd]))
        return out


def test_parameters_that_some_or_all_ranks_do_not_use(wrap: Wrap) -> None:
    plain = Branch().double().to(DEVICE)
    data = [(x, torch.arange(len(x), device=DEVICE) * 2 // len(x)) for x, _ in batches(6, 4)]
    data.append((data[0][0], torch.zeros(6, dtype=torch.int64, device=DEVICE)))
    model = wrap(plain)
    assert_same_training(model, plain, data, lambda module, x, y: module(x, y).square().mean())
    assert model.module.unused.weight.grad is None


@dataclass
class Output:
    logits: Tensor
    words: list[str]
    info: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, words: list[str]) -> Output:
        out = self.layer(x)
        selected = [row[: 1 + len(word)] for row, word in zip(out, words, strict=True)]
        return Output(out, [word.upper() for word in words], {"ragged": selected, "constant": 3})

    def score(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(1)


def test_structures_come_back_whole(wrap: Wrap) -> None:
    torch.manual_seed(1)
    plain = Structured().double().to(DEVICE)
    model, words = wrap(plain), ["a", "bb", "ccc", "", "e", "ff", "g"]
    (x, _), *_ = batches(7)
    ours, expected = model(x, words), plain(x, words)
    assert type(ours) is Output
    assert ours.words == expected.words
    assert ours.info["constant"] == 3
    torch.testing.assert_close(ours.logits, expected.logits)
    assert [len(row) for row in ours.info["ragged"]] == [len(row) for row in expected.info["ragged"]]
    for output in (ours, expected):
        (output.logits.sum() + torch.cat(output.info["ragged"]).square().sum()).backward()
    torch.testing.assert_close(model.module.layer.weight.grad, plain.layer.weight.grad)
    torch.testing.assert_close(model.call("score", x), plain.score(x))


def test_input_gradients(wrap: Wrap) -> None:
    plain = net()
    model = wrap(plain)
    (x, y), *_ = batches(5)
    found = []
    for module in (model, plain):
        leaf = x.clone().requires_grad_()
        loss_of(module, leaf * 2, y).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[0], found[1])


def test_no_sync(wrap: Wrap) -> None:
    plain = net()
    model = wrap(plain)
    for module in (model, plain):
        data = batches(5, 6, 3)
        if module is model:
            with model.no_sync():
                for x, y in data:
                    loss_of(module, x, y).backward()
        else:
            for x, y in data:
                loss_of(module, x, y).backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_with_loss(wrap: Wrap) -> None:
    plain = net(norm=True)
    model = wrap(instep.with_loss(copy.deepcopy(plain), nn.CrossEntropyLoss()))
    for x, y in batches(7, 4):
        loss, expected = model(x, y), loss_of(plain, x, y)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_zero_redundancy_optimizer(wrap: Wrap) -> None:
    plain = net()
    model = wrap(plain)
    ours = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for x, y in batches(7, 4, 5):
        for module, optimizer in ((model, ours), (plain, expected)):
            optimizer.zero_grad()
            loss_of(module, x, y).backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    if COUNT > 1:
        assert len(ours.optim.state) < len(expected.state)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compressed_gradients(wrap: Wrap, dtype: str) -> None:
    plain = net()
    model = wrap(plain, reduce=dtype)
    (x, y), *_ = batches(6)
    for module in (model, plain):
        loss_of(module, x, y).backward()
    gradients = [p.grad for p in model.parameters()]
    for ours, other in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other.grad, rtol=0.02, atol=0.01)
    if COUNT > 1:
        half = torch.bfloat16 if dtype == "bf16" else torch.float16
        assert all(torch.equal(g, g.to(half).to(g.dtype)) for g in gradients)


def test_reduction_by_a_function(wrap: Wrap) -> None:
    buckets = []

    def reduce(bucket: Tensor, group: Any) -> Any:
        buckets.append(bucket.numel())
        return dist.all_reduce(bucket, group=group, async_op=True)

    plain = net()
    assert_same_training(wrap(plain, reduce=reduce), plain, batches(7, 4), loss_of)
    size = sum(p.numel() for p in plain.parameters())
    assert sum(buckets) == (2 * size if COUNT > 1 else 0)


def test_sharded_outputs(wrap: Wrap) -> None:
    plain = net(norm=True)
    model = wrap(plain, gather="sharded")
    for x, y in batches(7, 5):
        out, own = model(x), rows(len(x))
        expected = plain(x)
        torch.testing.assert_close(out, expected[own])
        cross_entropy(out, y[own]).backward()
        cross_entropy(expected, y).backward()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


@pytest.mark.skipif(COUNT == 1, reason="one rank has every sample")
def test_sharded_outputs_need_a_sample_on_every_rank(wrap: Wrap) -> None:
    model = wrap(net(), gather="sharded")
    with pytest.raises(EngineError, match="gather='sharded': this call runs on 1 of"):
        model(batches(1)[0][0])


def test_local_batches(wrap: Wrap) -> None:
    """As a script with a DistributedSampler passes them, but of unequal sizes."""
    plain = net(norm=True)
    model = wrap(plain, batches="local")
    for x, y in batches(4 * COUNT + 1, 3 * COUNT):
        own = rows(len(x))
        cross_entropy(model(x[own]), y[own]).backward()
        cross_entropy(plain(x), y).backward()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_local_batches_with_loss(wrap: Wrap) -> None:
    plain = net()
    model = wrap(instep.with_loss(copy.deepcopy(plain), nn.CrossEntropyLoss()), batches="local")
    for x, y in batches(4 * COUNT + 1, 3 * COUNT):
        own = rows(len(x))
        loss, expected = model(x[own], y[own]), loss_of(plain, x, y)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.embedding(ids) * (ids > 0)[..., None]).sum(1)


def test_local_batches_of_other_lengths(wrap: Wrap) -> None:
    torch.manual_seed(2)
    plain = Tokens().double().to(DEVICE)
    model = wrap(plain, batches="local")
    lengths = [2 + rank for rank in range(COUNT) for _ in range(2)]
    ids = torch.zeros(2 * COUNT, COUNT + 1, dtype=torch.int64, device=DEVICE)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length, device=DEVICE) + row + 1
    own = ids[2 * RANK : 2 * RANK + 2, : lengths[2 * RANK]]
    model(own).square().mean().backward()
    plain(ids).square().mean().backward()
    torch.testing.assert_close(model.module.embedding.weight.grad, plain.embedding.weight.grad)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"logits": logits, "score": logits.square().mean(1)}


def test_dropped_outputs(wrap: Wrap) -> None:
    plain = WithLogits().double().to(DEVICE)
    model = wrap(plain, merge={"logits": "drop"})
    (x, _), *_ = batches(5)
    for module in (model, plain):
        module(x)["score"].sum().backward()
    assert COUNT == 1 or model(x)["logits"] is None
    torch.testing.assert_close(model.module.layer.weight.grad, plain.layer.weight.grad)


def test_the_primary_rank_warns() -> None:
    assert instep.is_primary() == (RANK == 0)
    from instep.runtime.caller_warnings import warn_caller

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_caller("once")
    assert len(caught) == (RANK == 0)


def test_different_weights_become_those_of_rank_0(wrap: Wrap) -> None:
    torch.manual_seed(RANK)
    model = wrap(nn.Linear(3, 2))
    weights = [torch.empty(2, 3) for _ in range(COUNT)]
    dist.all_gather(weights, model.module.weight.detach().cpu())
    torch.manual_seed(0)
    expected = nn.Linear(3, 2).weight
    assert all(torch.equal(weight, expected) for weight in weights)


def test_random_states_become_those_of_rank_0(wrap: Wrap) -> None:
    torch.manual_seed(RANK)
    wrap(nn.Linear(3, 2))
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(COUNT)]
    dist.all_gather(states, torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_list_of_devices_cannot_be(wrap: Wrap) -> None:
    with pytest.raises(EngineError, match="with engine='torchrun' every rank has one device"):
        wrap(net(), device_ids=["cpu", "cpu"])


def test_options_that_cannot_be(wrap: Wrap) -> None:
    for options, message in [
        ({"batches": "rank"}, "batches='rank': write 'global' or 'local'"),
        ({"gather": "none"}, "gather='none': write 'all' or 'sharded'"),
        ({"reduce": "int8"}, "reduce='int8': write 'bf16', 'fp16'"),
    ]:
        with pytest.raises(WrapError, match=message):
            wrap(net(), **options)
    with pytest.raises(WrapError, match="gather='sharded' has no use with with_loss"):
        wrap(instep.with_loss(net(), nn.CrossEntropyLoss()), gather="sharded")


def test_rows_that_few_elements_do_not_show_are_made_equal(wrap: Wrap) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5000, 8)
    with torch.no_grad():
        table.weight[-1] = RANK
    model = wrap(table)
    assert model(torch.full((2 * COUNT,), 4999, device=DEVICE)).eq(0).all()


def test_local_batches_of_one_sample_beside_a_shared_mask(wrap: Wrap) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x * mask)

    torch.manual_seed(1)
    plain = Masked().double().to(DEVICE)
    model, mask = wrap(plain, batches="local"), torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64, device=DEVICE)
    sizes = [5 if rank == 0 else 1 for rank in range(COUNT)]
    (x, _), *_ = batches(sum(sizes))
    start = sum(sizes[:RANK])
    own = model(x[start : start + sizes[RANK]], mask)
    torch.testing.assert_close(own, plain(x, mask)[start : start + sizes[RANK]])


def test_collectives_with_long_descriptions(wrap: Wrap) -> None:
    class Reduces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sums = instep.all_reduce({f"a_long_name_of_entry_{i}": x.sum() for i in range(40)})
            return x + sums["a_long_name_of_entry_7"]

    (x, _), *_ = batches(2 * COUNT)
    torch.testing.assert_close(wrap(Reduces(), probe=False)(x), x + x.sum())


def test_a_parameter_that_is_frozen_inside_no_sync(wrap: Wrap) -> None:
    model, x = wrap(nn.Linear(3, 2).double()), batches(2 * COUNT)[0][0]
    with model.no_sync():
        model(x).sum().backward()
        model.module.bias.requires_grad_(False)
        model(x).sum().backward()
    expected = 2 * x.sum(0).expand(2, 3)
    torch.testing.assert_close(model.module.weight.grad, expected)
