"""Wrapped modules inside other code: in a plain module, with a second wrapper, in a checkpoint, in several threads."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from .cases import normal, weighted
from .compare import assert_same, assert_same_gradients
from .conftest import Pair, PairFactory
from .models import WORDS, mlp

EXACT = 1e-12


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant-checkpoint"])
def test_checkpoint_around_the_call(pair: PairFactory, reentrant: bool) -> None:
    both = pair(mlp)
    batches = [normal(9, 3) for _ in range(4)]
    found = []
    for module in both:
        inputs = [x.clone().requires_grad_() for x in batches]
        for x in inputs:
            out = checkpoint(lambda y, module=module: module(torch.tanh(y)) * 2, x, use_reentrant=reentrant)
            weighted(out).backward()
        found.append([x.grad for x in inputs])
    assert_same(found[1], found[0], EXACT)
    assert_same_gradients(both, EXACT)


def test_part_of_a_plain_net(pair: PairFactory) -> None:
    both = pair(mlp)
    nets = []
    for part in both:
        torch.default_generator.manual_seed(3)
        nets.append(nn.Sequential(nn.Linear(3, 3), part, nn.Linear(2, 2)).double())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for n in (7, 3, 1):
        x = normal(n, 3)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            weighted(net(x)).backward()
            optimizer.step()
    assert_same(dict(nets[1].state_dict()), dict(nets[0].state_dict()), 1e-10)
    assert [name for name, _ in nets[1].named_parameters()] == [name for name, _ in nets[0].named_parameters()]
    copied = copy.deepcopy(nets[1])
    with copied[1]:
        assert_same(copied(x), nets[0](x), 1e-10)


def test_layer_shared_by_two_wrappers(pair: PairFactory) -> None:
    first = pair(mlp)
    built = []
    for module in first:
        torch.default_generator.manual_seed(4)
        built.append(nn.Sequential(module[0], nn.Tanh(), nn.Linear(8, 2).double()))
    second = Pair(built[0], pair.wrap(built[1], replicas=2))
    optimizers = [
        torch.optim.SGD([*one.parameters(), *other[2].parameters()], lr=0.1)
        for one, other in zip(first, second, strict=True)
    ]
    for n in (7, 3, 5):
        x = normal(n, 3)
        for one, other, optimizer in zip(first, second, optimizers, strict=True):
            optimizer.zero_grad()
            loss = weighted(one(x)) + weighted(other(x)) + weighted(one(x) * other(x))
            loss.backward()
            optimizer.step()
        assert_same_gradients(first, EXACT)
        assert_same_gradients(second, EXACT)


def test_calls_from_many_threads_at_once(pair: PairFactory) -> None:
    both = pair(mlp)
    batches = [normal(n, 3) for n in (7, 5, 9, 4, 2, 6, 3, 8)]

    def work(module: Any, x: Tensor) -> Any:
        with torch.no_grad():
            seen = [module(x) for _ in range(20)]
        return seen, torch.autograd.grad(weighted(module(x)), list(module.parameters()))

    expected = [work(both.plain, x) for x in batches]
    found: dict[int, Any] = {}
    start = threading.Barrier(len(batches))

    def run(index: int) -> None:
        start.wait()
        try:
            found[index] = work(both.model, batches[index])
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([found[index] for index in range(len(batches))], expected, EXACT)


class StoresTensors(nn.Module):
    """Stores tensors with and without a graph, and a mean over samples, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.divergence: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        self.divergence = h.square().sum(1)
        self.seen = h.detach()
        self.auxiliary = h.cos().mean()
        return h


def test_tensors_stored_as_attributes(pair: PairFactory) -> None:
    both = pair(StoresTensors, merge={"auxiliary": "mean"})
    for n in (7, 3, 5, 1, 7):
        x = normal(n, 3)
        for module in both:
            out = module(x)
            (weighted(out) + weighted(module.divergence) + module.auxiliary).backward()
        for name in ("divergence", "seen", "auxiliary"):
            assert_same(getattr(both.model, name), getattr(both.plain, name), EXACT, name)
        assert_same_gradients(both, EXACT)


def _live_tensors() -> int:
    gc.collect()
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


def test_earlier_calls_leave_no_tensors(pair: PairFactory) -> None:
    _, model = pair(StoresTensors, merge={"auxiliary": "mean"})

    def train() -> None:
        for n in (7, 5, 9):
            (weighted(model(normal(n, 3))) + model.auxiliary).backward()

    train()
    train()
    before = _live_tensors()
    for _ in range(5):
        train()
    assert _live_tensors() <= before


class Totals(nn.Module):
    """Accumulators that forward reassigns or writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.samples = 0
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.samples += x.shape[0]
        self.written += x.shape[0]
        self.replaced = self.replaced + x.detach().sum(0)
        self.largest = torch.maximum(self.largest, x.detach().max())
        return self.layer(x)


def test_state_rules_apply_to_even_and_uneven_shards(pair: PairFactory) -> None:
    rules = {"samples": "sum", "written": "sum", "replaced": "sum", "largest": "max"}
    both = pair(Totals, state=rules)
    for n in (7, 3, 6, 1, 2):
        x = normal(n, 3)
        for module in both:
            weighted(module(x)).backward()
        assert both.model.samples == both.plain.samples
        assert_same(dict(both.model.state_dict()), dict(both.plain.state_dict()), EXACT)
    assert_same_gradients(both, EXACT)


class Odd(nn.Module):
    """Parameters that are empty, transposed, overlapping, of several dtypes, and channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.turned = nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())
        self.part = nn.Parameter(self.turned.data[:2])
        self.single = nn.Parameter(torch.randn(3))
        self.brain = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(2, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)

    def double(self) -> Odd:
        return self

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :2, None, None].expand(-1, -1, 3, 3)
        parts = [x @ self.turned.t(), x @ self.part.t(), x * self.single * self.brain, self.conv(image).flatten(1)]
        return torch.cat(parts, 1)


def test_odd_parameters(pair: PairFactory) -> None:
    both = pair(Odd)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in both]
    for n in (7, 3, 5, 1):
        x = normal(n, 3)
        for module, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            weighted(module(x)).backward()
            optimizer.step()
        for mine, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
            tolerance = {torch.float64: EXACT, torch.float32: 1e-5, torch.bfloat16: 0.05}[theirs.dtype]
            assert_same(mine.grad, theirs.grad, tolerance, "gradient")
            assert_same(mine.detach(), theirs.detach(), tolerance, "weight")


class SparseTied(nn.Module):
    """One weight whose gradient is sparse on some replicas and dense on others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4, sparse=True)
        self.out = nn.Linear(4, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens).mean(1)
        return self.out(h) if (tokens == 3).any() else torch.cat([h, h, h[:, :3]], 1)


@pytest.mark.parametrize("where", [None, 0, 6], ids=["sparse", "dense-first", "dense-last"])
def test_sparse_and_dense_gradients_of_one_weight(pair: PairFactory, where: int | None) -> None:
    both = pair(SparseTied, probe=False)  # outputs depend on other samples, which the probe rejects
    tokens = torch.randint(4, WORDS, (7, 5))
    if where is None:
        for module in both:
            weighted(module(tokens)).backward()
        assert both.model.embed.weight.grad.is_sparse
        assert_same_gradients(both, EXACT)
        return
    tokens[where, 0] = 3
    for shard in tokens.split([3, 2, 2]):  # outputs depend on the shard, so the plain module gets shards too
        both.plain(shard).sin().sum().backward()
    both.model(tokens).sin().sum().backward()
    assert_same(both.model.embed.weight.grad.to_dense(), both.plain.embed.weight.grad.to_dense(), EXACT)


class PadsToTheLongest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(out, batch_first=True)[0]


def test_outputs_are_padded_to_the_longest_replica(pair: PairFactory) -> None:
    both = pair(PadsToTheLongest, merge="pad")
    for lengths in ([3, 5, 1, 2, 4, 1, 1], [1, 1, 2, 6, 1, 1, 3]):
        x = normal(7, 6, 3)
        outs = [module(x, torch.tensor(lengths)) for module in both]
        assert_same(outs[1], outs[0], EXACT)
        for out in outs:
            weighted(out).backward()
    assert_same_gradients(both, EXACT)


def test_optimizer_closure_with_several_calls_per_step(pair: PairFactory) -> None:
    both = pair(mlp)
    x, target = normal(7, 3), normal(7, 2)
    for module in both:
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

        def closure(module: Any = module, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (module(x) - target).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    # A line search branches on numbers that differ in their last bits.
    assert_same(dict(both.model.state_dict()), dict(both.plain.state_dict()), 1e-7)


def test_weights_perturbed_between_two_backwards(pair: PairFactory) -> None:
    both = pair(mlp)
    x = normal(7, 3)
    for module in both:
        for _ in range(3):
            module.zero_grad()
            weighted(module(x)).backward()
            moves = [0.05 * parameter.grad.clone() for parameter in module.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(module.parameters()), moves)
            module.zero_grad()
            weighted(module(x)).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(module.parameters()), moves)
                torch._foreach_sub_(list(module.parameters()), [0.1 * p.grad for p in module.parameters()])
        vector = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(0.9 * vector, module.parameters())
        module.zero_grad()
        weighted(module(x)).backward()
    assert_same_gradients(both, EXACT)
    assert_same(dict(both.model.state_dict()), dict(both.plain.state_dict()), EXACT)
