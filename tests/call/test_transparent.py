"""A wrapped module looks like the module."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(2))
        self.name = "net"

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale + self.shift

    def double_up(self, x: Tensor) -> Tensor:
        """Says which replica's module it runs on by the size of what it gets."""
        return torch.full((len(x),), len(x))

    @property
    def width(self) -> int:
        return 3


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def model(net: Net) -> Iterator[instep.DataParallel]:
    with instep.DataParallel(net, ["cpu"] * 2) as wrapped:
        yield wrapped


def test_names_are_the_bare_modules(model: instep.DataParallel, net: Net) -> None:
    assert list(model.state_dict()) == list(net.state_dict()) == ["shift", "layer.weight", "layer.bias"]
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert [name for name, _ in model.named_buffers()] == ["shift"]
    assert [name for name, _ in model.named_modules()] == ["", "layer"]
    assert [name for name, _ in model.named_children()] == ["layer"]
    assert next(iter(model.parameters())) is net.layer.weight
    assert model.module is net
    assert model.get_parameter("layer.weight") is net.layer.weight


def test_attributes_and_methods_show_through(model: instep.DataParallel, net: Net) -> None:
    assert model.name == "net"
    assert model.width == 3
    assert model.layer is net.layer
    assert "double_up" in dir(model)
    with pytest.raises(AttributeError, match="neither DataParallel nor Net has an attribute 'nothing'"):
        model.nothing  # noqa: B018
    assert not hasattr(model, "nothing")


def test_other_methods_run_whole_or_in_parallel(model: instep.DataParallel, net: Net) -> None:
    x = torch.randn(5, 3)
    assert model.double_up(x).tolist() == [5] * 5
    with pytest.raises(instep.MergeError, match="depend on other samples"):  # it tells the size of its shard
        model.call("double_up", x)
    with instep.DataParallel(net, ["cpu"] * 2, methods=("double_up",), probe=False) as parallel:
        assert parallel.call("double_up", x).tolist() == [3, 3, 3, 2, 2]
        assert parallel.double_up(x).tolist() == [3, 3, 3, 2, 2]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixed_keys_load(model: instep.DataParallel, net: Net, prefix: str) -> None:
    wanted = {name: torch.randn_like(value) for name, value in net.state_dict().items()}
    model.load_state_dict({prefix + name: value for name, value in wanted.items()})
    for name, value in net.state_dict().items():
        assert torch.equal(value, wanted[name])


def test_a_state_dict_of_data_parallel_loads(model: instep.DataParallel) -> None:
    other = nn.DataParallel(Net())
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.layer.weight, other.module.layer.weight.cpu())


def test_a_module_that_has_such_names_itself_keeps_them() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    holder = Holder()
    with instep.DataParallel(holder, ["cpu"] * 2) as model:
        assert list(model.state_dict()) == ["module.weight", "module.bias"]
        model.load_state_dict({name: torch.zeros_like(value) for name, value in holder.state_dict().items()})
        assert model(torch.ones(4, 2)).eq(0).all()


def test_wrong_keys_are_refused(model: instep.DataParallel) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"layer.weight": torch.zeros(2, 3)})


def test_modes_and_dtypes(model: instep.DataParallel, net: Net) -> None:
    assert model.eval() is model
    assert not model.training
    assert not net.layer.training
    assert model.train().training
    assert model.half() is model
    assert net.layer.weight.dtype is torch.float16
    assert model.to(torch.float64) is model
    assert net.shift.dtype is torch.float64
    assert model.requires_grad_(False) is model
    assert not net.layer.weight.requires_grad


def test_inside_another_module(net: Net) -> None:
    outer = nn.Sequential(instep.DataParallel(net, ["cpu"] * 2), nn.Linear(2, 2))
    assert list(outer.state_dict()) == ["0.shift", "0.layer.weight", "0.layer.bias", "1.weight", "1.bias"]
    outer.load_state_dict({name: torch.zeros_like(value) for name, value in outer.state_dict().items()})
    assert net.layer.weight.eq(0).all()
    assert len(list(outer.parameters())) == 4
    outer.eval()
    assert not net.layer.training
    outer(torch.randn(4, 3)).sum().backward()
    assert net.layer.weight.grad is not None
    outer[0].close()


def test_a_wrapper_inside_a_wrapped_module_runs_plainly(net: Net) -> None:
    inner = instep.DataParallel(net, ["cpu"] * 2)
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    plain = nn.Sequential(copy.deepcopy(net), copy.deepcopy(outer[1]))
    with instep.DataParallel(outer, ["cpu"] * 2) as model:
        x = torch.randn(5, 3)
        out = model(x)
        torch.testing.assert_close(out, plain(x))
        out.sum().backward()
        plain(x).sum().backward()
        torch.testing.assert_close(net.layer.weight.grad, plain[0].layer.weight.grad)


def test_deepcopy_pickle_and_save(model: instep.DataParallel, net: Net) -> None:
    x = torch.randn(5, 3)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert isinstance(other, instep.DataParallel)
        assert other.module is not net
        torch.testing.assert_close(other(x), expected)
        other.layer.weight.data.zero_()
        torch.testing.assert_close(model(x), expected)
        other.close()


def test_wrapping_again_wraps_the_module(model: instep.DataParallel, net: Net) -> None:
    with instep.DataParallel(model, ["cpu"] * 3) as again:
        assert again.module is net
        torch.testing.assert_close(again(torch.ones(6, 3)), net(torch.ones(6, 3)))


@pytest.mark.parametrize("first", ["threads", "processes"])
def test_wrapping_again_closes_the_wrapper_before(net: Net, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, closed = torch.randn(5, 3), []
    old = instep.DataParallel(net, ["cpu"] * 2, engine=first)
    old(x)
    threads = replica_threads()
    assert len(threads) == (2 if first == "threads" else 0)
    close = old._instep_engine.close
    monkeypatch.setattr(old._instep_engine, "close", lambda: (closed.append(first), close()))
    with instep.DataParallel(old, ["cpu"] * 2, engine="serial") as new:
        assert closed == [first]
        assert not replica_threads()
        torch.testing.assert_close(new(x), net(x))
        torch.testing.assert_close(old(x), net(x))  # it starts anew
    old.close()


def replica_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("instep-cpu")]


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_recurrent_weights_that_are_laid_out_anew(engine: str, private: bool) -> None:
    net, x = nn.LSTM(3, 4, batch_first=True), torch.randn(5, 2, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        model(x)
        model.flatten_parameters()
        net.flatten_parameters()
        with torch.no_grad():
            net.weight_hh_l0.mul_(0.5)
        torch.testing.assert_close(model(x), net(x))
        wanted = torch.autograd.grad(net(x)[0].square().sum(), list(net.parameters()))
        model(x)[0].square().sum().backward()
        torch.testing.assert_close(tuple(p.grad for p in net.parameters()), wanted)


@pytest.mark.parametrize("private", [False, True])
def test_recurrent_weights_are_laid_out_once_where_they_are_copies(
    private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, laid_out = nn.LSTM(3, 4, batch_first=True), torch.randn(5, 2, 3), []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: laid_out.append(self))
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", private_copies=private) as model:
        model(x)
        mine = [replica.module for replica in model._instep_replicas.replicas]
        assert [module for module in laid_out if module in mine] == (mine if private else [])
        laid_out.clear()
        model(x)
        assert not laid_out


def test_repr_says_engine_devices_and_why(model: instep.DataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "engine=threads (2 replicas in one process" in repr(model)
    assert "devices=[cpu, cpu]" in repr(model)
    assert "(layer): Linear" in repr(model)
    assert "engine=serial (one device" in repr(instep.DataParallel(Net(), ["cpu"]))
    monkeypatch.setenv("INSTEP_ENGINE", "serial")
    assert "engine=serial (INSTEP_ENGINE=serial)" in repr(instep.DataParallel(Net(), ["cpu"] * 2))
    assert "engine=threads (requested)" in repr(instep.DataParallel(Net(), ["cpu"] * 2, engine="threads"))
    monkeypatch.setenv("INSTEP_ENGINE", "turbo")
    with pytest.raises(instep.EngineError, match="INSTEP_ENGINE='turbo' is not an engine"):
        instep.DataParallel(Net(), ["cpu"] * 2)


def test_sequences_are_indexed_through(net: Net) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with instep.DataParallel(layers, ["cpu"] * 2) as model:
        assert model[0] is layers[0]
        assert len(model) == 2
        assert list(model) == list(layers)
    assert bool(instep.DataParallel(nn.Sequential(), ["cpu"]))
    with pytest.raises(TypeError):
        len(instep.DataParallel(net, ["cpu"]))


def test_hooks_on_the_wrapper_see_the_whole_batch(model: instep.DataParallel) -> None:
    seen: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    model(torch.randn(5, 3))
    assert seen == [(5, 2)]


def test_one_replica_is_the_module_itself(net: Net) -> None:
    one = instep.DataParallel(net, ["cpu"])
    x = torch.randn(4, 3)
    assert torch.equal(one(x), net(x))

    class Odd(nn.Module):
        def forward(self, x: Tensor, other: object) -> object:
            return other

    thing = iter([1, 2])
    assert instep.DataParallel(Odd(), ["cpu"])(x, thing) is thing
    assert instep.DataParallel(Odd(), ["cpu"])(x, {"a": [instep.whole(3)]}) == {"a": [3]}


def test_without_an_accelerator_the_default_is_the_module_itself(net: Net) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without an accelerator")
    assert instep.DataParallel(net)._instep_devices == [torch.device("cpu")]


def test_explain_has_a_row_for_each_leaf(model: instep.DataParallel) -> None:
    x = torch.randn(5, 3)
    text = str(model.explain(x, scale=2.0))
    assert "a batch of 5: 3 on cpu, 2 on cpu (threads" in text
    assert "x      Tensor [5, 3]  split along dim 0" in text
    assert "scale  float          whole (float)" in text
    assert "outputs: known after the first call" in text
    model(x, scale=2.0)
    assert "concatenated along dim 0" in str(model.explain(x, scale=2.0))
    assert "no argument is batched" in str(model.explain(3.0))


def test_a_module_that_was_moved_away_is_noticed(model: instep.DataParallel, net: Net) -> None:
    model(torch.randn(4, 3))
    net.to("meta")
    with pytest.raises(instep.WrapError, match="moved to meta after it was wrapped for cpu"):
        model(torch.randn(4, 3))


def test_explain_on_one_device(net: Net) -> None:
    """As it is before and after a call; lists of other lengths than the batch's, and whatever else, are no error."""
    model, x = instep.DataParallel(net, ["cpu"]), torch.randn(4, 3)
    words = """\
the call runs on cpu alone: there is one replica
inputs:
  x      Tensor [4, 3]  as it is
  scale  float          as it is
outputs: as the module returns them"""
    assert str(model.explain(x, 2.0)) == words
    model(x, 2.0)
    assert str(model.explain(x, 2.0)) == words
    odd = {"ids": x, "texts": ["a"] * 9, "more": {"times": iter([1]), "none": {}}}
    assert model.explain(odd, instep.whole(3.0)).inputs == (
        ("x.ids", "Tensor [4, 3]", "as it is"),
        ("x.texts", "list of 9", "as it is"),
        ("x.more.times", "list_iterator", "as it is"),
        ("x.more.none", "dict of 0", "as it is"),
        ("scale", "float", "as it is"),
    )
    assert "inputs: none\n" in str(model.explain())


def test_explain_of_a_call_that_one_replica_runs(model: instep.DataParallel) -> None:
    model(torch.randn(4, 3))  # its merged outputs are not shown for a call that merges nothing
    for x, heading in (
        (torch.randn(1, 3), "a batch of 1 runs on cpu alone"),
        (3.0, "the call runs on cpu alone: no argument is batched"),
    ):
        text = str(model.explain(x))
        assert text.startswith(heading)
        assert text.endswith("outputs: as the module returns them")


def test_state_dict_hooks_of_the_wrapper_run(model: instep.DataParallel) -> None:
    seen: list[str] = []
    model.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    model.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    model.load_state_dict(model.state_dict())
    assert seen.count("load") == 1
    assert "save" in seen


def test_a_batch_of_one_is_placed_like_any_other(net: Net) -> None:
    with instep.DataParallel(net, ["cpu"] * 2, output_device="meta") as model:
        assert model(torch.randn(4, 3)).device.type == "meta"
        assert model(torch.randn(1, 3)).device.type == "meta"


def test_in_dims_by_position_follow_the_signature_not_the_call() -> None:
    class Weighs(nn.Module):
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return x @ weights

    x, weights = torch.randn(4, 4), torch.randn(4, 2)
    with instep.DataParallel(Weighs(), ["cpu"] * 2, in_dims=(0, None)) as model:
        torch.testing.assert_close(model(x, weights), x @ weights)
        torch.testing.assert_close(model(weights=weights, x=x), x @ weights)


def test_tensors_registered_on_the_wrapper_are_the_modules(model: instep.DataParallel, net: Net) -> None:
    model.register_buffer("late", torch.ones(2))
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    model.add_module("more", nn.Linear(1, 1))
    assert {"late", "extra", "more.weight"} <= set(net.state_dict())


def test_a_class_that_is_changed_is_followed(model: instep.DataParallel, net: Net) -> None:
    class Doubled(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale) * 2

    x = torch.randn(4, 3)
    before = model(x)
    net.__class__ = Doubled
    torch.testing.assert_close(model(x), before * 2)
