"""Replicas in worker processes on CUDA: several that share one GPU, and a GPU beside the CPU.

With `private` everything crosses by host memory, as it does between two GPUs; otherwise by CUDA IPC.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.engines.processes.driver import Refused
from instep.engines.processes.hands import Hands, inside_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICES: dict[str, list[int | str]] = {
    "two": [0, 0],
    "four": [0] * 4,
    "gpu and cpu": [0, "cpu"],
    "cpu and gpu": ["cpu", 0],
}
LAYOUTS = [
    pytest.param(private, devices, id=f"{'private' if private else 'near'}-{name}")
    for private in (False, True)
    for name, devices in DEVICES.items()
]
each_layout = pytest.mark.parametrize(("private", "devices"), LAYOUTS)
each_way = pytest.mark.parametrize("private", [False, True], ids=["near", "private"])


@pytest.fixture(scope="module", autouse=True)
def gpu_workers() -> Iterator[list[Hands]]:
    """Worker processes that stay from test to test."""
    if not torch.cuda.is_available():
        yield []
        return
    torch.zeros(1, device="cuda")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    all_hands = [Hands([gpu] * 4), Hands([cpu] * 2)]
    for hands in all_hands:
        hands.get(1)
    yield all_hands
    for hands in all_hands:
        hands.close()


def wrap(net: nn.Module, devices: Sequence[int | str], private: bool = False, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, devices, engine="processes", private_copies=private, **options)


def pids(model: instep.DataParallel) -> list[int]:
    engine: Any = model._instep_engine
    return [engine._hands.get(index).pid for index in range(1, len(model._instep_devices))]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 4))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, bias=False),
        nn.SyncBatchNorm(4, momentum=None),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


class Tagger(nn.Module):
    """An LSTM over packed sequences: lengths stay on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.device.type == "cpu"
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


class Pairs(nn.Module):
    """Every sample against the whole batch; also a structure with a tensor that stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.left(x).tanh(), self.right(x).tanh()
        got = instep.all_gather({"two": two, "host": torch.arange(len(x)), "names": ["a"] * len(x)})
        assert got["two"].device == x.device
        assert got["host"].device.type == "cpu"
        assert len(got["names"]) == len(got["two"])
        return one - instep.all_reduce(one.mean(0), "mean") + (one @ got["two"].T).logsumexp(1, keepdim=True)


def weigh(out: Tensor) -> Tensor:
    """A loss that every entry of an output enters by another weight."""
    return (out.sin() * torch.linspace(0.5, 2, out.numel(), device=out.device).view_as(out)).sum()


def assert_trains_alike(
    build: Callable[[], nn.Module],
    batches: Callable[[], Sequence[Tensor]],
    private: bool,
    devices: Sequence[int | str],
    steps: int = 4,
    **options: Any,
) -> None:
    """Outputs, gradients and all state over a few steps, against the plain module on the GPU."""
    net = build().double()
    plain = copy.deepcopy(net).cuda()
    with wrap(net, devices, private, **options) as model:
        ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, plain))
        for _ in range(steps):
            args = batches()
            out, expected = model(*args), plain(*(a if a.dim() == 1 else a.cuda() for a in args))
            assert out.device == next(net.parameters()).device
            torch.testing.assert_close(out.cuda(), expected, rtol=1e-9, atol=1e-9)
            for optimizer, result in ((ours, out), (theirs, expected)):
                optimizer.zero_grad()
                weigh(result).backward()
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.cuda(), other.grad, rtol=1e-8, atol=1e-8)
            ours.step()
            theirs.step()
        state = {name: value.cuda() for name, value in net.state_dict().items()}
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-6, atol=1e-8)


@each_layout
def test_a_perceptron(private: bool, devices: Sequence[int | str]) -> None:
    assert_trains_alike(mlp, lambda: [torch.randn(11, 6).double()], private, devices)


@each_layout
def test_a_conv_net_with_batch_normalisation(private: bool, devices: Sequence[int | str]) -> None:
    assert_trains_alike(conv_net, lambda: [torch.randn(7, 3, 8, 8).double().cuda()], private, devices)


@each_layout
def test_packed_sequences(private: bool, devices: Sequence[int | str]) -> None:
    ids, lengths = torch.randint(20, (7, 9)), torch.tensor([9, 3, 7, 1, 5, 9, 2])
    assert_trains_alike(Tagger, lambda: [ids, lengths], private, devices, place={"lengths": "cpu"})


@each_layout
def test_gathering(private: bool, devices: Sequence[int | str]) -> None:
    assert_trains_alike(Pairs, lambda: [torch.randn(9, 6).double()], private, devices, steps=2)


@each_way
def test_on_a_stream_of_the_caller(private: bool) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_trains_alike(Pairs, lambda: [torch.randn(64, 6).double()], private, [0, 0, 0])
        assert_trains_alike(mlp, lambda: [torch.randn(64, 6).double().cuda()], private, [0, 0])
    torch.cuda.synchronize()


@each_way
def test_arguments_that_need_a_gradient_and_outputs_elsewhere(private: bool) -> None:
    net = mlp().double()
    plain = copy.deepcopy(net)
    with wrap(net, [0, 0, "cpu"], private, output_device="cpu") as model:
        for place in ("cpu", "cuda"):
            x = torch.randn(8, 6, dtype=torch.float64, device=place, requires_grad=True)
            y = x.detach().cpu().requires_grad_()
            out, expected = model(x * 2), plain(y * 2)
            assert out.device.type == "cpu"
            torch.testing.assert_close(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
            assert x.grad.device == x.device
            torch.testing.assert_close(x.grad.cpu(), y.grad)


@each_way
def test_autocast_reaches_workers(private: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    x = torch.randn(6, 8, device="cuda")
    with wrap(net, [0, 0], private) as model, torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            out, expected = model(x), net(x)
            assert out.dtype is torch.bfloat16
            torch.testing.assert_close(out, expected)
            with torch.no_grad():
                net[0].weight.mul_(2)
        out.float().sum().backward()
        assert net[0].weight.grad.dtype is torch.float32


def test_switches_of_the_backend_reach_workers() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            flags = torch.backends.cudnn.benchmark, torch.backends.cuda.math_sdp_enabled()
            return x * 0 + torch.tensor([float(flag) for flag in flags], device=x.device)

    with wrap(Asks(), [0, 0]) as model, torch.backends.cudnn.flags(benchmark=True):
        assert (model(torch.zeros(4, 2, device="cuda")) == 1).all()
        torch.backends.cudnn.benchmark = False
        assert model(torch.zeros(4, 2, device="cuda")).tolist() == [[0, 1]] * 4


@each_way
def test_a_loss_on_the_replicas(private: bool) -> None:
    net = mlp().double().cuda()
    plain = copy.deepcopy(net)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double().cuda()
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    with wrap(instep.with_loss(net, loss), [0, 0, 0], private) as model:
        for _ in range(2):
            x, y = torch.randn(7, 6).double(), torch.randint(4, (7,))
            value, expected = model(x, y), loss(plain(x.cuda()), y.cuda())
            torch.testing.assert_close(value, expected)
            value.backward()
            expected.backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@each_way
def test_gradients_that_are_held_back(private: bool) -> None:
    net = mlp().double()
    plain = copy.deepcopy(net).cuda()
    with wrap(net, [0, 0, 0], private) as model:
        with model.no_sync():
            for _ in range(3):
                x = torch.randn(7, 6).double()
                model(x).square().sum().backward()
                plain(x.cuda()).square().sum().backward()
            assert net[0].weight.grad is None
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


class Regions(nn.Module):
    """Checkpointed regions of dropout on the device, scaled by a factor that is drawn on the host."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = checkpoint(self.region, x, use_reentrant=self.reentrant)
        return x

    def region(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.02) * self.scale * (torch.rand(()) + 0.5).item()


def states() -> list[Tensor]:
    return [torch.get_rng_state(), torch.cuda.get_rng_state(0)]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("devices", [[0, 0], [0, 0, 0], [0, "cpu"]], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_masks_repeat_differ_are_recomputed_and_are_those_of_threads(devices: list[int | str], reentrant: bool) -> None:
    net = Regions(reentrant).double().cuda()
    x = torch.ones(4 * len(devices), 50, dtype=torch.float64, device="cuda", requires_grad=True)
    runs = []
    for engine in ("processes", "threads"):
        with instep.DataParallel(net, devices, engine=engine) as model:
            for _ in range(3):
                torch.manual_seed(3)
                x.grad = None
                out = model(x)
                after = states()
                out.sum().backward()
                torch.testing.assert_close(x.grad, out.detach())
                assert equal(states(), after)
                runs.append((out.detach(), after))
    assert all(torch.equal(out, runs[0][0]) and equal(after, runs[0][1]) for out, after in runs)
    parts = (runs[0][0] != 0).cpu().split(4)
    assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


def test_a_transformer_with_dropout_draws_what_threads_draw() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    x = torch.randn(7, 5, 16, device="cuda")
    outs, grads = [], []
    for engine in ("threads", "processes", "processes"):
        with instep.DataParallel(net, [0] * 3, engine=engine) as model:
            torch.manual_seed(5)
            net.zero_grad()
            out = model(x)
            out.square().mean().backward()
            outs.append(out.detach())
            grads.append([p.grad.clone() for p in net.parameters()])
    assert torch.equal(outs[1], outs[2])
    torch.testing.assert_close(outs[0], outs[1])
    for one, other in zip(grads[0], grads[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.rand(x.shape, generator=self.generator, device=x.device)


def test_a_generator_of_the_module_on_the_device() -> None:
    net = Holds().cuda()
    x = torch.zeros(6, 4, device="cuda")
    with wrap(net, [0, 0, 0]) as model:
        runs = []
        for _ in range(2):
            net.generator.manual_seed(5)
            start = net.generator.get_state()
            runs.append(model(x))
            assert not torch.equal(net.generator.get_state(), start)
        assert torch.equal(*runs)
        assert len({tuple(row) for row in runs[0].tolist()}) == 6


class Net(nn.Module):
    """Everything that a step can depend on: weights, draws, state of every kind, and what the other replicas have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(8))
        self.steps = 0
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.drop(torch.relu(self.norm(self.first(x))))
        self.penalty = h.square().mean()
        self.mean = self.mean * 0.9 + 0.1 * instep.all_gather(h).detach().mean(0)
        return self.last(h + 0.01 * self.mean)


def train(phases: Sequence[str], private: bool) -> Net:
    torch.manual_seed(0)
    net = Net().double()
    with wrap(net, [0, 0, 0], private, merge={"penalty": "mean"}, restarts=10**6) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model(torch.randn(7, 4).double())
        for phase in phases:
            kill = threading.Timer(0.002, os.kill, (pids(model)[-1], signal.SIGKILL))
            if phase == "forward":
                kill.start()
            out = model(torch.randn(7, 4).double())
            if phase == "between":
                kill.function(*kill.args)
            if phase == "backward":
                kill.start()
            optimizer.zero_grad()
            (out.square().mean() + 0.1 * model.penalty).backward()
            optimizer.step()
            if phase == "idle":
                kill.function(*kill.args)
            if kill.ident is not None:
                kill.join()
    return net


@pytest.mark.timeout(240)
@each_way
def test_kills_do_not_change_a_single_bit(private: bool) -> None:
    phases = ["none", "forward", "between", "backward", "idle", "none"]
    undisturbed = train(["none"] * len(phases), private)
    disturbed = train(phases, private)
    assert disturbed.steps == undisturbed.steps
    for (name, theirs), mine in zip(undisturbed.state_dict().items(), disturbed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


class Greedy(nn.Module):
    """Wants more memory than there is, in a worker, at a certain value of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if inside_worker() and x.detach().max() > 100:
            torch.empty(2**44, dtype=torch.uint8, device=x.device)
        if inside_worker() and x.detach().min() < -100:
            y.register_hook(lambda _: [None, torch.empty(2**44, dtype=torch.uint8, device="cuda")][0])
        return y


class Unlucky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if inside_worker() and x.detach().max() > 100:
            raise KeyError("no luck")
        return self.layer(x)


@pytest.mark.parametrize("value", [200.0, -200.0], ids=["forward", "backward"])
@each_way
def test_no_memory_in_a_worker_is_said_and_the_next_call_works(private: bool, value: float) -> None:
    net = Greedy()
    with wrap(net, [0, 0], private, hooks="per_replica") as model:
        x = torch.randn(6, 4, device="cuda")
        before = pids(model)
        for _ in range(2):
            bad = x.clone()
            bad[-1, 0] = value
            with pytest.raises(torch.OutOfMemoryError) as caught:
                model(bad).sum().backward()
            assert "replica 1 on cuda:0" in "\n".join(caught.value.__notes__)
            assert net.layer.weight.grad is None
            torch.testing.assert_close(model(x), net(x))
        assert pids(model) == before


def test_an_exception_keeps_its_type() -> None:
    net = Unlucky()
    with wrap(net, [0, 0]) as model:
        x = torch.randn(6, 4, device="cuda")
        model(x)
        bad = torch.cat([x[:3], x[3:] + 200])
        with pytest.raises(KeyError, match="no luck") as caught:
            model(bad)
        assert "replica 1 on cuda:0" in "\n".join(caught.value.__notes__)
        torch.testing.assert_close(model(x), net(x))


class Remembers(nn.Module):
    """Knows its device, and holds a tensor that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.device = nn.Linear(3, 2), torch.ones(2), torch.device("cpu")

    def forward(self, x: Tensor) -> Tensor:
        self.last_device = x.device
        return self.layer(x) + self.shift + torch.ones(2, device=self.device)


def test_a_remembered_device_and_plain_tensors_are_each_replicas_own() -> None:
    net = Remembers()
    plain, x = copy.deepcopy(net), torch.randn(7, 3)
    with wrap(net, [0, "cpu"]) as model:
        net.device = torch.device("cuda", 0)
        for _ in range(2):
            torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-5, atol=1e-5)
        assert net.last_device == torch.device("cuda", 0)


def test_a_collective_in_a_checkpointed_region_is_refused() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: instep.all_reduce(self.layer(y).mean(0)) + y, x, use_reentrant=True)

    with wrap(Inside(), [0, 0]) as model, pytest.raises(instep.CollectiveError, match="checkpointing"):
        model(torch.randn(4, 4, device="cuda", requires_grad=True))


class Weighs(nn.Module):
    """Also says how much memory torch has taken in the process that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        return self.net(x), [torch.cuda.memory_reserved()] * len(x)


@each_way
def test_memory_of_the_device_does_not_grow(private: bool) -> None:
    net = Weighs().cuda()
    with wrap(net, [0, 0, 0], private) as model:
        seen = []
        for step in range(30):
            net.zero_grad()
            out, taken = model(torch.randn(64, 6))
            out.square().sum().backward()
            if step in (9, 29):
                seen.append(sorted(set(taken)))
        assert seen[0] == seen[1]


def test_how_tensors_cross_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Linear(4, 3).cuda(), torch.randn(5, 4)
    with wrap(net, [0, 0, "cpu"]) as model:
        model(x)
        assert "tensors cross by CUDA IPC or host memory" in str(model.explain(x))
    with wrap(nn.Linear(4, 3), [0, 0], private=True) as model:
        model(x)
        assert "tensors cross by host memory)" in repr(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused("not in this container")

    instep.shutdown()
    monkeypatch.setattr("instep.engines.processes.desk.allocate", refuse)
    with wrap(net, [0, 0]) as model:
        model(x).sum().backward()
        torch.testing.assert_close(model(x), net(x.cuda()))
        assert "device memory cannot be shared here (not in this container)" in repr(model)


def test_weights_are_moved_once_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer writes is there without being sent; other memory is told of."""

    def fail(*_: Any) -> None:
        raise AssertionError("the module was sent by host memory")

    net = mlp().double().cuda()
    before = net[0].weight.data_ptr()
    with wrap(net, [0, 0]) as model:
        x = torch.randn(6, 6, device="cuda", dtype=torch.float64)
        model(x)
        monkeypatch.setattr("instep.engines.processes.image.Image.renew", fail)
        monkeypatch.setattr("instep.engines.processes.wire.Shore.land", fail)
        assert net[0].weight.data_ptr() != before
        for _ in range(2):
            with torch.no_grad():
                net[0].weight.add_(0.1)
            torch.testing.assert_close(model(x), net(x))
        net[0].weight.data = net[0].weight.data.clone() * 2
        torch.testing.assert_close(model(x), net(x))
        net.load_state_dict(mlp().double().state_dict())
        torch.testing.assert_close(model(x), net(x))
    torch.testing.assert_close(net(x), copy.deepcopy(net)(x))


def test_large_tensors_pass_the_ring() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"twice": x * 2 * self.scale, "half": (x[:, :1] / 2).half(), "none": x[:, :0], "bool": x > 0}

    net = Big().cuda()
    with wrap(net, [0, 0], probe=False) as model:
        for size in (10, 3_000_000, 70, 9_000_000):
            x = torch.randn(4, size, device="cuda", requires_grad=True)
            out = model(x)
            out["twice"].sum().backward()
            torch.testing.assert_close(
                {k: v.detach() for k, v in out.items()}, {k: v.detach() for k, v in net(x).items()}
            )
            assert (x.grad == 2).all()
