"""The functions of `torch.nn.parallel`, for any structure."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import instep
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
    merged = instep.gather(outputs, "cpu", dim=1, rules={"loss": "mean"})
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
    with pytest.raises(ValueError, match="2 modules, 1 inputs and 2 kwargs"):
        instep.parallel_apply(nets, inputs[:1])


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
