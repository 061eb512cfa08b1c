"""Outputs with a rule of their own whose parts are not alike: an error by name, never some of what one device gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn.utils.rnn import pack_sequence

import instep
from instep.errors import MergeError

from .merge_helpers import refused

engines = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])


# Sparse tensors


class Bag(nn.Module):
    """A sparse matrix of words: its width is the given one, or the largest word."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.width = width

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        rows = torch.arange(len(words)).repeat_interleave(words.shape[1])
        size = (len(words), self.width or int(words.max()) + 1)
        counts = torch.sparse_coo_tensor(
            torch.stack([rows, words.flatten()]), torch.ones(words.numel()), size, check_invariants=True
        )
        return {"words": counts}


WORDS = torch.tensor([[0, 1], [2, 1], [0, 2], [3, 9], [8, 7]])


@engines
def test_sparse_outputs_of_other_widths_say_to_give_a_size(engine: str) -> None:
    net = Bag()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=engine != "threads") as model:
        model(WORDS % 3)
        with pytest.raises(MergeError) as caught:
            model(WORDS)
        message = str(caught.value)
        assert "the output 'words': sparse tensors of shapes" in message
        assert ", 3]" in message
        assert ", 10]" in message
        assert "torch.sparse_coo_tensor(indices, values, size)" in message
        net.width = 10
        torch.testing.assert_close(model(WORDS)["words"], net(WORDS)["words"])


def test_sparse_parts_are_joined_only_if_their_other_dims_agree() -> None:
    parts = [{"a": torch.ones(3, 2).to_sparse()}, {"a": torch.ones(2, 4).to_sparse()}]
    assert "the output 'a': sparse tensors of shapes [[3, 2], [2, 4]]" in refused(parts)
    assert "shapes [[3, 2], [2, 2, 1]]" in refused([torch.ones(3, 2).to_sparse(), torch.ones(2, 2, 1).to_sparse()])


# Graphs


class Graphs(nn.Module):
    """Graphs that have something more where a sample is large: a fact of the whole batch on one device."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.more = more

    def forward(self, x: Tensor) -> dict[str, Any]:
        data = pytest.importorskip("torch_geometric.data")
        found = []
        for row in self.layer(x):
            graph = data.HeteroData()
            graph["user"].x = row[None]
            if bool((x > 100).any()):
                graph["user" if self.more == "key" else "item"].z = row[None]
            found.append(graph)
        return {"graphs": data.Batch.from_data_list(found)}


@engines
@pytest.mark.parametrize("more", ["key", "kind"])
def test_graphs_with_something_more_are_refused_whichever_part_has_it(engine: str, more: str) -> None:
    pytest.importorskip("torch_geometric")
    net = Graphs(more)
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False) as model:
        torch.testing.assert_close(model(x)["graphs"]["user"].x, net(x)["graphs"]["user"].x)
        for sample, where in ((0, "part 0 and not in part 1"), (4, "part 1 and not in part 0")):
            large = x.clone()
            large[sample] = 200
            with pytest.raises(MergeError) as caught:
                model(large)
            what = "the attribute 'z' of 'user'" if more == "key" else "the node or edge type 'item'"
            assert f"cannot merge the output 'graphs': {what} is in {where}; give it to every graph" in str(
                caught.value
            )
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
        model(x)
        with pytest.raises(MergeError, match=r"the output 'graphs': .* is in part 1 and not in part 0"):
            model(large)


# Everything else


def _dictionary(y: Tensor, odd: bool) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict({"a": {"k": y, **({"z": y} if odd else {})}}, batch_size=[len(y)])


def _wide_dictionary(y: Tensor, odd: bool) -> Any:
    return pytest.importorskip("tensordict").TensorDict({"a": y.repeat(1, 1 + odd), "b": y}, batch_size=[len(y)])


def _batch(y: Tensor, odd: bool) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list([data.Data(x=row.repeat(1 + odd)[None]) for row in y])


def _jagged(y: Tensor, odd: bool) -> Tensor:
    return torch.nested.nested_tensor([row.repeat(1 + odd)[None] for row in y.detach()], layout=torch.jagged)


def _nested(y: Tensor, odd: bool) -> Tensor:
    layout = torch.jagged if odd else torch.strided
    return torch.nested.nested_tensor([row[None] for row in y.detach()], layout=layout)


def _transformed(y: Tensor, odd: bool) -> Any:
    transforms = [distributions.ExpTransform()] * (1 + odd)
    return distributions.TransformedDistribution(distributions.Normal(y, torch.ones_like(y)), transforms)


ODD: dict[str, tuple[Callable[[Tensor, bool], Any], str, str]] = {
    "dictionary": (_dictionary, "['k']", "['k', 'z']"),
    "wide": (_wide_dictionary, "shapes [{}, 2]", "shapes [{}, 4]"),
    "graphs": (_batch, "shapes [{}, 2]", "shapes [{}, 4]"),
    "distribution": (
        lambda y, odd: distributions.Normal(y.repeat(1, 1 + odd), 1.0),
        "([{}, 2], [])",
        "([{}, 4], [])",
    ),
    "transforms": (_transformed, "transforms has different lengths in the parts: [", "from shards of [3, 2]"),
    "packed": (lambda y, odd: pack_sequence([row.repeat(1 + odd)[None] for row in y]), "[{}, 2]", "[{}, 4]"),
    "jagged": (_jagged, "[{}, '*', 2]", "[{}, '*', 4]"),
    "nested": (_nested, "'Tensor, torch.strided, nested'", "'NestedTensor, torch.jagged, nested'"),
    "sparse": (lambda y, odd: y.to_sparse() if odd else y, "'Tensor, torch.strided'", "'Tensor, torch.sparse_coo'"),
}
"""By name, what makes an output and what is to be said of it where it is the usual one and where it is not."""


class Odd(nn.Module):
    """An output of a kind of its own, other where a sample is large."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, name: str) -> dict[str, Any]:
        self.calls += 1
        torch.rand(2)
        return {"out": {name: ODD[name][0](self.layer(x), bool((x > 100).any()))}}


def _with_large(x: Tensor, sample: int) -> Tensor:
    large = x.clone()
    large[sample] = 200
    return large


def _is_here(name: str) -> bool:
    packages = {"dictionary": "tensordict", "wide": "tensordict", "graphs": "torch_geometric"}
    if name == "dictionary" and torch.__version__ < "2.11":  # the tensordict of that torch names one side's keys only
        return False
    return name not in packages or importlib.util.find_spec(packages[name]) is not None


@engines
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_parts_that_are_not_alike_are_named_with_both_sides(engine: str) -> None:
    net, x = Odd(), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False, state={"calls": "first"}) as model:
        for name in filter(_is_here, ODD):
            _, usual, odd = ODD[name]
            for sample, sides in ((0, (odd, usual)), (4, (usual, odd))):
                stream, calls = torch.get_rng_state(), net.calls.clone()
                # Some of these do not come back from a worker with a gradient, which is another error.
                with torch.set_grad_enabled(engine != "processes"), pytest.raises(MergeError) as caught:
                    model(_with_large(x, sample), name)
                message = str(caught.value)
                assert f"cannot merge the output 'out.{name}': " in message
                for side, size in zip(sides, (3, 2), strict=True):
                    assert side.format(size) in message, message
                assert f"merge={{'out.{name}': ...}}" in message
                assert torch.equal(stream, torch.get_rng_state())
                assert torch.equal(calls, net.calls)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", list(filter(_is_here, ODD)))
def test_a_trial_of_parts_that_are_not_alike_is_an_error_too(name: str) -> None:
    net, x = Odd(), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", state={"calls": "first"}) as model:
        model(x, name)
        for sample in (0, 4):
            with pytest.raises(MergeError, match=f"the output 'out.{name}': "):
                model(_with_large(x, sample), name)


def test_the_cause_is_kept() -> None:
    parts = [pack_sequence([torch.ones(1, width)] * size) for size, width in ((3, 2), (2, 4))]
    with pytest.raises(MergeError, match="the parts of a PackedSequence do not match") as caught:
        instep.merge([{"p": part} for part in parts], [3, 2])
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__.__cause__) is RuntimeError


def test_what_is_no_matter_of_the_parts_is_left_alone() -> None:
    class Full:
        pass

    def merge(parts: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    instep.register(Full, size=lambda v: 1, split=lambda v, sizes: [v], merge=merge)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        instep.merge([Full(), Full()], [1, 1])


def test_what_was_split_and_then_changed_is_named_too() -> None:
    parts = instep.split({"p": pack_sequence([torch.ones(1, 2)] * 5)}, 2)
    parts[1]["p"] = pack_sequence([torch.ones(1, 4)] * 2)
    with pytest.raises(MergeError, match=r"'p': the parts of a PackedSequence .* \[3, 2\] and .* \[2, 4\]"):
        instep.merge(parts)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_jagged_tensors_that_are_ragged_elsewhere_are_not_joined() -> None:
    one, two = (torch.nested.nested_tensor([torch.ones(2, 4)] * n, layout=torch.jagged) for n in (3, 2))
    assert "the parts are ragged in different dims: [1, 2]" in refused([one, two.transpose(1, 2)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", ["sparse", "strided", "jagged"])
def test_gather_of_tensors_of_any_layout(layout: str) -> None:
    def make(size: int) -> Tensor:
        if layout == "sparse":
            return torch.ones(size, 2).to_sparse()
        rows = [torch.ones(n + 1, 2) for n in range(size)]
        return torch.nested.nested_tensor(rows, layout=getattr(torch, layout))

    found = instep.gather([make(2), make(3)], "cpu")
    assert (found.layout, found.size(0)) == (make(5).layout, 5)
    once = make(2)
    assert instep.gather([once, once], "cpu").size(0) == 4


def test_gradients_pass_through_a_gather_of_sparse_tensors() -> None:
    parts = [torch.randn(size, 2, requires_grad=True) for size in (2, 3)]
    instep.gather([part.to_sparse() for part in parts], "cpu").to_dense().pow(2).sum().backward()
    for part in parts:
        assert part.grad is not None
        torch.testing.assert_close(part.grad, 2 * part.detach())
