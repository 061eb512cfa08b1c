"""The functions of `torch.nn.parallel`, for any structure."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.thread_pool import is_replica_thread


def test_scatter_and_gather_are_inverse() -> None:
    batch = {"x": torch.randn(5, 3, requires_grad=True), "names": list("abcde"), "scale": 2.0}
    parts = instep.scatter(batch, ["cpu", "cpu", "cpu"])
    assert [len(part["names"]) for part in parts] == [2, 2, 1]
    gathered = instep.gather(parts, "cpu")
    assert gathered["names"] == batch["names"]
    assert gathered["scale"] == 2.0
    assert torch.equal(gathered["x"], batch["x"])
    gathered["x"].sum().backward()
    assert batch["x"].grad.eq(1).all()


def test_gather_takes_rules_and_dims() -> None:
    outputs = [{"loss": torch.tensor(1.0), "y": torch.ones(3, 2)}, {"loss": torch.tensor(4.0), "y": torch.ones(3, 1)}]
    merged = instep.gather(outputs, "cpu", dim=1, merge={"loss": "mean"})
    assert merged["loss"] == 2.0
    assert merged["y"].shape == (3, 3)


@pytest.mark.parametrize("detach", [False, True])
def test_replicate(detach: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    replicas = instep.replicate(net, ["cpu", "cpu"], detach=detach)
    assert len(replicas) == 2
    for replica in replicas:
        assert replica is not net
        assert torch.equal(replica[0].weight, net[0].weight)
    out = replicas[0](torch.randn(4, 3)).pow(2).sum() + replicas[1](torch.randn(4, 3)).pow(2).sum()
    if detach:
        assert not any(p.requires_grad for p in replicas[0].parameters())
        assert not out.requires_grad
    else:
        out.backward()
        assert net[0].weight.grad is not None


def test_parallel_apply() -> None:
    nets = [nn.Linear(3, 2), nn.Linear(3, 4)]
    inputs = [torch.randn(2, 3), (torch.randn(5, 3),)]
    outs = instep.parallel_apply(nets, inputs)
    torch.testing.assert_close(outs[0], nets[0](inputs[0]))
    torch.testing.assert_close(outs[1], nets[1](inputs[1][0]))

    class Keyword(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            assert is_replica_thread()
            return x * scale

    both = instep.parallel_apply([Keyword(), Keyword()], inputs, ({"scale": 2.0}, {"scale": 3.0}), ["cpu", "cpu"])
    torch.testing.assert_close(both[1], inputs[1][0] * 3)
    none = instep.parallel_apply(nets, inputs, (None, None), (None, None))
    torch.testing.assert_close(none, outs)
    for name, extra in (
        ("inputs", {"inputs": inputs[:1]}),
        ("kwargs_tup", {"kwargs_tup": ({},)}),
        ("devices", {"devices": ["cpu"]}),
    ):
        with pytest.raises(ValueError, match=f"2 modules and 1 entries in {name}"):
            instep.parallel_apply(**{"modules": nets, "inputs": inputs, **extra})


def test_parallel_apply_names_the_replica() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        instep.parallel_apply([nn.Linear(3, 2), Fails()], [torch.randn(2, 3)] * 2)
    notes = [*getattr(caught.value, "__notes__", []), str(caught.value.__cause__)]
    assert any("raised in replica 1 on cpu" in line for line in notes)


def test_data_parallel() -> None:
    net = nn.Linear(3, 2)
    plain = copy.deepcopy(net)
    x = torch.randn(5, 3)
    out = instep.data_parallel(net, x, ["cpu"] * 2)
    torch.testing.assert_close(out, plain(x))
    out.sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(net.weight.grad, plain.weight.grad)
    torch.testing.assert_close(instep.data_parallel(net, (x,), ["cpu"] * 2, module_kwargs={}), plain(x))
    torch.testing.assert_close(instep.data_parallel(net, None, ["cpu"] * 2, module_kwargs={"input": x}), plain(x))


def test_scatter_replicates_values_without_a_batch() -> None:
    assert instep.scatter({"scale": 2.0}, ["cpu", "cpu"]) == [{"scale": 2.0}, {"scale": 2.0}]


def test_parallel_apply_inside_a_replica_does_not_deadlock() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return sum(instep.parallel_apply([self.left, self.right], [x, x]))

    net = Pair()
    x = torch.randn(4, 3)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        torch.testing.assert_close(model(x), net.left(x) + net.right(x))


class Pair(NamedTuple):
    left: Any
    right: Any


ROWS = torch.arange(10.0).view(5, 2)
FIRST, SECOND = ROWS[:3], ROWS[3:]
GATHERED: dict[str, tuple[list[Any], Any]] = {
    "negative dim": ([FIRST, SECOND], ROWS),
    "0-d tensors": ([torch.tensor(1.0), torch.tensor(1.0)], torch.tensor([1.0, 1.0])),
    "0-d integers": ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])),
    "a loss beside outputs": (
        [{"loss": torch.tensor(1.0), "y": FIRST}, {"loss": torch.tensor(4.0), "y": SECOND}],
        {"loss": torch.tensor([1.0, 4.0]), "y": ROWS},
    ),
    "other numbers of rows": ([(FIRST, torch.ones(4)), (SECOND, torch.ones(1))], (ROWS, torch.ones(5))),
    "list of tensors": ([[FIRST, FIRST], [SECOND, SECOND]], [ROWS, ROWS]),
    "list as long as the part": ([[FIRST] * 3, [SECOND] * 3], [ROWS] * 3),
    "namedtuple and None": ([Pair(FIRST, None), Pair(SECOND, None)], Pair(ROWS, None)),
    "ordered dictionary": (
        [OrderedDict(a=FIRST, b=[FIRST]), OrderedDict(b=[SECOND], a=SECOND)],
        OrderedDict(a=ROWS, b=[ROWS]),
    ),
    "no rows": ([ROWS, ROWS[:0]], ROWS),
    "the same tensor": ([FIRST, FIRST], torch.cat([FIRST, FIRST])),
    "one output": ([{"y": ROWS}], {"y": ROWS}),
}


@pytest.mark.parametrize(("outputs", "expected"), GATHERED.values(), ids=GATHERED.keys())
def test_gather_takes_what_torch_takes(outputs: list[Any], expected: Any) -> None:
    gathered = instep.gather(outputs, "cpu")
    assert type(gathered) is type(expected)
    torch.testing.assert_close(gathered, expected)


def test_gather_concatenates_lists_without_tensors() -> None:
    outputs = [[FIRST, ["a", "b", "c"]], [SECOND, ["d", "e"]]]
    rows, names = instep.gather(outputs, "cpu")
    assert torch.equal(rows, ROWS)
    assert names == list("abcde")


def test_gather_along_other_dims_and_to_the_cpu() -> None:
    columns = [ROWS[:, :1], ROWS[:, 1:]]
    for dim in (1, -1):
        assert torch.equal(instep.gather(columns, -1, dim=dim), ROWS)
    assert torch.equal(instep.gather([FIRST, SECOND], "cpu", -2), ROWS)
    assert [part.tolist() for part in instep.scatter(ROWS, ["cpu"] * 2, dim=-1)] == [c.tolist() for c in columns]


def test_messages_name_the_arguments_of_the_function() -> None:
    with pytest.raises(ValueError, match=r"merge="):
        instep.gather([{"a": ROWS}, {"a": ROWS, "b": ROWS}], "cpu")
    with pytest.raises(instep.MergeError, match=r"merge={'n': \.\.\.}") as caught:
        instep.gather([{"n": 1, "y": FIRST}, {"n": 2, "y": FIRST[:1]}], "cpu")
    assert "min_shard" not in str(caught.value)
    assert instep.gather([{"n": 1}, {"n": 2}], "cpu", merge={"n": "sum"}) == {"n": 3}
    with pytest.raises(instep.MergeError, match="gather got no outputs"):
        instep.gather([], "cpu")
    with pytest.raises(instep.StructureError, match=r"cannot split entry 'w' \(Tensor \[3\]\)") as caught:
        instep.scatter({"x": ROWS, "y": ROWS, "w": torch.ones(3)}, ["cpu"] * 2)
    assert "Say with in_dims what 'w' is: None if every replica gets all of it" in str(caught.value)
    parts = instep.scatter({"x": ROWS, "w": torch.ones(3)}, ["cpu"] * 2, in_dims={"w": None})
    assert [len(part["w"]) for part in parts] == [3, 3]
    with pytest.raises(instep.StructureError, match=r"how to split the structure \(list of 5\)"):
        instep.scatter([ROWS] * 5, ["cpu"] * 2)
    for call in (lambda: instep.scatter(ROWS, "cpu"), lambda: instep.replicate(nn.Linear(2, 2), "cpu")):
        with pytest.raises(instep.WrapError, match=r"='cpu': write a list"):
            call()


def test_scatter_splits_arguments_and_keywords_together() -> None:
    """As `scatter_kwargs` of torch does."""
    (args, kwargs), (other, more) = instep.scatter(((ROWS,), {"y": ROWS, "scale": 2.0}), ["cpu"] * 2)
    assert torch.equal(args[0], kwargs["y"])
    assert torch.equal(other[0], SECOND)
    assert more["scale"] == 2.0
    for value in (None, (), {}, torch.tensor(1.0)):
        assert instep.scatter(value, ["cpu"] * 2) == [value, value]


@pytest.mark.parametrize("inputs", [(torch.randn(4, 4),), (torch.randn(()), torch.randn(()))], ids=["rows", "0-d"])
def test_scatter_and_gather_are_twice_differentiable(inputs: tuple[Tensor, ...]) -> None:
    leaves = tuple(value.double().requires_grad_() for value in inputs)

    def function(*values: Tensor) -> Any:
        parts = list(instep.scatter(values[0], ["cpu"] * 2)) if len(values) == 1 else values
        return instep.gather([part * part for part in parts], "cpu")

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.same = self.scale
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.same + self.listed[0]


def test_replicas_keep_shared_parameters_and_buffers() -> None:
    net = Tied()
    replicas = instep.replicate(net, ["cpu", "cpu"])
    for replica in replicas:
        assert replica.first.weight is replica.second.weight
        assert replica.same is replica.scale
        assert replica.scale is not net.scale
        assert len(list(replica.parameters())) == 4
    sum(replica(ROWS).pow(2).sum() for replica in replicas).backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    (2 * net(ROWS).pow(2).sum()).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in net.parameters()])
    for detach in (False, True):
        torch.save(instep.replicate(net, ["cpu", "cpu"], detach=detach), io.BytesIO())


class Nested(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        x = inputs[1][0]
        return [x, (x.sin(), [x + 1]), OrderedDict(a=x, b=[x.cos()])]


class Keywords(nn.Module):
    def forward(self, x: Tensor, y: Tensor, factor: float, z: Tensor | None = None) -> Tensor:
        return factor * (x * y if z is None else x * y + z)


class Entry(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch["data"] * 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 3, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        self.rnn.flatten_parameters()
        return self.rnn(x)


class Cast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Constant(nn.Module):
    def forward(self) -> Tensor:
        return torch.ones(3)


WHOLE: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "several inputs": (Keywords, (ROWS, ROWS + 1, 0.5), {}),
    "keywords": (Keywords, (ROWS, ROWS + 1, 0.5), {"z": ROWS}),
    "nested inputs and outputs": (Nested, (ROWS.cos(), (ROWS.sin(), ROWS), ROWS), {}),
    "an empty list": (Entry, None, {"batch": {"data": ROWS, "unused": []}}),
    "an empty dictionary": (Entry, None, {"batch": {"data": ROWS, "unused": {}}}),
    "an empty tuple": (Entry, None, {"batch": {"data": ROWS, "unused": ()}}),
    "no inputs": (Constant, None, {}),
    "sparse gradients": (lambda: nn.Embedding(10, 2, sparse=True), torch.randint(10, (5, 4)), {}),
    "a recurrent network": (Recurrent, torch.randn(5, 4, 2), {}),
    "autocast in forward": (lambda: Cast(2, 2), ROWS, {}),
    "channels last": (lambda: nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), torch.randn(5, 2, 4, 4), {}),
}


@pytest.mark.parametrize(("make", "inputs", "keywords"), WHOLE.values(), ids=WHOLE.keys())
def test_data_parallel_gives_what_the_module_gives(
    make: Callable[[], nn.Module], inputs: Any, keywords: dict[str, Any]
) -> None:
    """Situations of torch's tests of data parallelism."""
    plain = make()
    net = copy.deepcopy(plain)
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    expected = plain(*args, **keywords)
    for devices in (["cpu"] * 2, ("cpu",), None):
        output = instep.data_parallel(net, inputs, devices, module_kwargs=keywords)
        assert type(output) is type(expected)
        torch.testing.assert_close(output, expected)
        with torch.no_grad():
            torch.testing.assert_close(instep.data_parallel(net, inputs, devices, None, 0, keywords), expected)
    if list(plain.parameters()):
        first, other = (value[0] if isinstance(value, tuple) else value for value in (expected, output))
        first.float().pow(2).sum().backward()
        net.zero_grad()
        other.float().pow(2).sum().backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
            assert mine.grad.layout is theirs.grad.layout
            assert mine.grad.is_sparse or mine.grad.stride() == theirs.grad.stride()


def test_what_torch_does_otherwise() -> None:
    class Clears(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.zero_grad()
            return super().forward(x)

    with pytest.raises(instep.BridgeError, match="zero_grad"):
        instep.data_parallel(Clears(2, 2), ROWS, ["cpu"] * 2)
    x, net = torch.ones(2, 4, requires_grad=True), nn.Linear(4, 1)
    out = instep.data_parallel(net, x, ["cpu"] * 2, engine="serial")
    torch.autograd.grad(out.sum(), x, create_graph=True)[0].mean().backward()
    torch.testing.assert_close(net.weight.grad, torch.full((1, 4), 0.25))


def test_data_parallel_starts_workers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = WorkerProcess.__init__

    def count(self: WorkerProcess, name: str) -> None:
        started.append(name)
        start(self, name)

    monkeypatch.setattr(WorkerProcess, "__init__", count)
    instep.shutdown()
    net = nn.Linear(2, 2)
    plain = copy.deepcopy(net)
    try:
        for _ in range(3):
            for module in (net, plain):
                module.zero_grad()
                out = instep.data_parallel(net, ROWS, ["cpu"] * 2, engine="processes") if module is net else plain(ROWS)
                out.pow(2).sum().backward()
            torch.testing.assert_close(net.weight.grad, plain.weight.grad)
    finally:
        instep.shutdown()
    assert started == ["replica 1 on cpu"]
