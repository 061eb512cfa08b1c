"""Errors of rules of state and of what replicas do together: what they say, and that the call changed nothing."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import CannotCross

from .test_errors import ENGINES, Net, assert_fails, assert_unchanged, snapshot


def leaves(value: Callable[[Tensor], Any]) -> Callable[[Net, Tensor], Tensor]:
    """Sets the attribute `note`."""

    def then(net: Net, y: Tensor) -> Tensor:
        net.note = value(y)
        return y

    return then


RULES: dict[str, tuple[Callable[[Net, Tensor], Any], Any, list[str]]] = {
    "a sum of words": (
        leaves(lambda y: f"saw {float(y.detach().sum())}"),
        {"note": "sum"},
        ["state={'note': 'sum'} cannot be applied", "a str", "Write another rule, or a function"],
    ),
    "a mean of lists": (
        leaves(lambda y: [str(float(y.detach().sum()))]),
        {"note": "mean"},
        ["state={'note': 'mean'} cannot be applied", "a list", "a function (old, new, sizes) -> value"],
    ),
    "the largest complex number": (
        leaves(lambda y: complex(float(y.detach().sum()), 1)),
        {"note": "max"},
        ["state={'note': 'max'} cannot be applied", "a complex"],
    ),
    "a sum of what was not there": (
        lambda net, y: (setattr(net, "fresh", float(y.detach().sum())), y)[1],
        {"fresh": "sum"},
        ["state={'fresh': 'sum'} needs a value from before the call", "set it in __init__"],
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("then", "state", "words"), RULES.values(), ids=RULES.keys())
def test_a_rule_that_does_not_fit(
    engine: str, then: Callable[[Net, Tensor], Any], state: Any, words: list[str]
) -> None:
    net = Net(then)
    assert_fails(instep.StateError, words, net, torch.randn(5, 3), engine=engine, options={"state": state})
    assert not hasattr(net, "fresh")


TOGETHER: dict[str, tuple[Callable[[Net, Tensor], Any], list[str]]] = {
    "a sum of bools": (
        lambda net, y: instep.all_reduce(y > 0),
        ["all_reduce: op='sum' does not apply to bools", "op='max' for any, op='min' for all"],
    ),
    "a mean of integers": (
        lambda net, y: instep.all_reduce(y.long(), "mean"),
        ["all_reduce: op='mean' does not apply to torch.int64", "op='sum', or x.float()"],
    ),
    "another operation": (lambda net, y: instep.all_reduce(y, "median"), ["op='median'", "sum, mean, max, min"]),
    "words that differ": (
        lambda net, y: instep.all_gather({"n": str(len(y)), "y": y}),
        [
            "all_gather: the leaf 'n' is '3' on replica 0 and '2' on replica 1",
            "Put values of single samples into a list",
        ],
    ),
    "words in a sum": (
        lambda net, y: instep.all_reduce({"n": str(len(y))}),
        ["all_reduce: the leaf 'n' is '3' on replica 0 and '2' on replica 1", "Only numbers and tensors are reduced"],
    ),
    "a sparse tensor": (
        lambda net, y: instep.all_gather(y.detach().to_sparse()),
        ["all_gather: the argument is a Tensor of layout torch.sparse_coo", "Pass dense tensors instead"],
    ),
    "another structure": (
        lambda net, y: instep.all_gather({f"k{len(y)}": y}),
        ["different collectives", "all_gather(dim=0) of dict(k", "Every replica has to make the same calls"],
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("then", "words"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_replicas_cannot_do_together(engine: str, then: Callable[[Net, Tensor], Any], words: list[str]) -> None:
    assert_fails(instep.CollectiveError, words, Net(then), torch.randn(5, 3), engine=engine)


def test_a_module_that_is_wrapped_already() -> None:
    with pytest.raises(instep.WrapError, match=r"(?s)already wrapped by DataParallel.*DataParallel\(model\.module\)"):
        instep.DataParallel(nn.DataParallel(nn.Linear(2, 2)), ["cpu"] * 2)


def test_values_of_on_unmerged_state() -> None:
    with pytest.raises(instep.WrapError, match=r"on_unmerged_state='ignore': write 'error' or 'warn'"):
        instep.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, on_unmerged_state="ignore")


def pair(y: Tensor) -> Any:
    """A tuple of a class of the name `Pair`, which is another one each time."""
    return namedtuple("Pair", ["y"])(y)


SAME_WORDS: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "another type of one name": (
        lambda net, y: instep.all_gather({"pair": pair(y)}),
        "all_gather: the leaf 'pair' has different types on the replicas (Pair, Pair).",
    ),
    "another key of one name": (
        lambda net, y: instep.all_gather({"by": {1 if len(y) == 3 else "1": y}}),
        "all_gather: the leaf 'by' has different entries on the replicas: [1] and ['1'].",
    ),
}


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize(("then", "words"), SAME_WORDS.values(), ids=SAME_WORDS.keys())
def test_what_differs_though_it_is_called_the_same(engine: str, then: Callable[[Net, Tensor], Any], words: str) -> None:
    assert_fails(instep.CollectiveError, [words], Net(then), torch.randn(5, 3), engine=engine)


class Tape(bytearray):
    """Bytes with attributes, of which Python makes no plain copy."""


@pytest.mark.parametrize("engine", ENGINES)
def test_an_object_that_forward_changes_and_that_cannot_be_copied(engine: str) -> None:
    def count(net: Net, y: Tensor) -> Tensor:
        net.tape.seen += 1
        return y

    net = Net(count)
    net.tape = Tape(b"abc")
    net.tape.seen = 0
    words = ["forward changes 'tape'", "which all replicas share", "Change it outside forward."]
    assert_fails(instep.StateError, words, net, torch.randn(5, 3), engine=engine)
    assert net.tape.seen == 0


SECOND_DERIVATIVE = (
    r"(?s)create_graph=True cannot pass through the replicas' separate graphs.*"
    r"model\.call\('penalty', \.\.\.\).*DataParallel\(\.\.\., engine='serial'\)"
)


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("private", [False, True])
def test_a_second_derivative_is_refused_and_changes_nothing(engine: str, private: bool) -> None:
    net, x = Net(lambda net, y: y.tanh()), torch.randn(5, 3, requires_grad=True)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        loss = model(x).sum()
        before = snapshot(net)
        for ask in (
            lambda: torch.autograd.grad(loss, x, create_graph=True),
            lambda: loss.backward(create_graph=True, inputs=[x, *net.parameters()]),
        ):
            with pytest.raises(instep.BridgeError, match=SECOND_DERIVATIVE):
                ask()
            assert_unchanged(net, before)
            assert x.grad is None
        loss = model(x).sum()
        (mine,) = torch.autograd.grad(loss, x)
        (theirs,) = torch.autograd.grad(net.layer(x).tanh().sum(), x)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("way", ["gather", "reduce"])
def test_a_gradient_that_comes_to_a_collective_by_another_way(way: str) -> None:
    left: list[Tensor] = []
    keep = left.append  # which no replica follows to the list

    def leave(net: Net, y: Tensor) -> Tensor:
        keep(instep.all_gather(y) if way == "gather" else instep.all_reduce(y.sum(0)))
        return y

    net = Net(leave)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        model(torch.randn(5, 3))
        before = snapshot(net)
        words = rf"(?s)a gradient reached all_{way}.* outside the backward of its call.*\nReturn from forward"
        with pytest.raises(instep.CollectiveError, match=words):
            left[-1].sum().backward()
        assert_unchanged(net, before)


WRITERS = """
SEEN, COUNT = [], 0

def grows(net, y):
    SEEN.append(len(y))
    return y

def counts(net, y):
    global COUNT
    COUNT += 1
    return y
"""


@pytest.mark.parametrize(("writer", "name"), [("grows", "SEEN"), ("counts", "COUNT")])
@pytest.mark.parametrize("engine", ["processes"])
def test_a_global_that_forward_changes_in_a_worker(engine: str, writer: str, name: str) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(WRITERS, script)
    words = [
        f"forward changed the global '{name}' in a worker process, where the script does not see it",
        "Return the value, set it on the module, or write engine='threads'.",
    ]
    assert_fails(CannotCross, words, Net(script[writer]), torch.randn(5, 3), engine=engine)


def cache(y: Tensor, *, lengths: int = 1, sizes: int = 1) -> Any:
    """A cache whose length is another one for another number of samples, or that holds two batches."""
    made = pytest.importorskip("transformers").DynamicCache()
    keys = y[:, None, :2, None].expand(-1, 1, 2, 4)[:, :, : 1 + len(y) % lengths]
    made.update(keys, keys, 0)
    if sizes > 1:
        made.update(keys[1:], keys[1:], 1)
    return made


def quantized(y: Tensor) -> Any:
    """A cache that keeps its keys and values in eight bits."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this release of transformers quantizes caches only with optional packages")
    config = transformers.GPT2Config(n_embd=4, n_head=1, n_layer=1)
    made = transformers.QuantizedCache("fp8", config)
    keys = y.detach()[:, None, :2, None].expand(-1, 1, 2, 4)
    made.update(keys, keys, 0)
    return made


def graphs(y: Tensor, **more: Tensor) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    made = data.Batch.from_data_list(
        [data.Data(x=row[None], edge_index=torch.zeros(2, 1, dtype=torch.long)) for row in y]
    )
    for key, value in more.items():
        made[key] = value
    return made


QUANTIZED = "a quantized QuantizedCache (layers.0._quantized_keys) can be neither split nor merged; use a DynamicCache"
TWO_SIZES = [
    "a DynamicCache holds batches of different sizes (5 samples in layers.0.keys, 4 samples in layers.1.keys)",
    "fill every layer with the same samples, or select the same ones from every layer",
]

UNJOINED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a cache": (
        lambda y: cache(y, lengths=2),
        "pad the inputs to one length, or leave the cache out of the outputs",
    ),
    "a quantized cache": (quantized, QUANTIZED),
    "a cache of two sizes": (
        lambda y: cache(y, sizes=2),
        "a DynamicCache holds batches of different sizes (",
    ),
    "graphs": (
        lambda y: graphs(y.detach(), scale=y.detach().sum()),
        ") and is not per graph",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize(("make", "words"), UNJOINED.values(), ids=UNJOINED.keys())
def test_outputs_of_other_packages_that_cannot_be_joined(
    engine: str, probe: bool, make: Callable[[Tensor], Any], words: str
) -> None:
    net = Net(lambda net, y: {"y": y, "made": make(y)})
    said = ["cannot merge the output 'made': ", words, "from shards of [", "merge={'made': ...}", "'drop'"]
    assert_fails(instep.MergeError, said, net, torch.randn(5, 3), engine=engine, options={"probe": probe})


UNCUT: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "a quantized cache": (quantized, ["(QuantizedCache): ", QUANTIZED]),
    "a cache of two sizes": (lambda x: cache(x, sizes=2), ["(DynamicCache): ", *TWO_SIZES]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("make", "words"), UNCUT.values(), ids=UNCUT.keys())
def test_arguments_of_other_packages_that_cannot_be_cut(
    engine: str, make: Callable[[Tensor], Any], words: list[str]
) -> None:
    x, ran = torch.randn(5, 3), []
    net = Net(lambda net, y: (ran.append(len(y)), y)[1])
    for args, kwargs, path in (
        ((make(x),), {}, "others.0"),
        ((), {"past": {"kept": [make(x), 0.5]}}, "past.kept.0"),
    ):
        said = [f"cannot split argument {path!r} ", *words, f"{path!r}", "None", "instep.whole(...)"]
        assert_fails(instep.StructureError, said, net, x, *args, engine=engine, **kwargs)
        assert not ran
        net.then, net.calls = lambda net, y: (ran.append(len(y)), y)[1], torch.zeros(())


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize(("make", "words"), UNCUT.values(), ids=UNCUT.keys())
def test_what_cannot_be_cut_is_handed_over_whole(engine: str, make: Callable[[Tensor], Any], words: list[str]) -> None:
    """As the message says, in both ways."""
    x, net = torch.randn(5, 3), Net(lambda net, y: y)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        torch.testing.assert_close(model(x, instep.whole(make(x))), net.layer(x))
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, in_dims={"others.0": None}) as model:
        torch.testing.assert_close(model(x, make(x)), net.layer(x))
