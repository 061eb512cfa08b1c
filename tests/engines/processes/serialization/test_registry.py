"""Values survive a round trip between two processes; classes of the script come back as the script's own."""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from instep.engines.processes.serialization.registry import CodeRegistry
from instep.errors import CannotCross

from ..connections import LocalChannel, script

SCRIPT = """
import collections, dataclasses, enum, functools, typing
from dataclasses import dataclass
import torch
from torch import nn
from transformers.utils import ModelOutput

@dataclass
class Answer:
    scores: torch.Tensor
    names: list

@dataclass
class Output(ModelOutput):
    logits: torch.Tensor = None

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

Pair = collections.namedtuple("Pair", "first second")
T = typing.TypeVar("T")
Name = typing.NewType("Name", str)

class Base(nn.Module):
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        REGISTERED.append(cls.__name__)

REGISTERED = []

class Net(Base, typing.Generic[T]):
    kinds = [Answer, Pair]

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.tied = self.layer.weight
        self.color = Color.BLUE
        self.layer.register_forward_hook(lambda module, args, out: out * factor())

    @functools.cached_property
    def double(self):
        return 2 * self.layer.weight

    def forward(self, x: torch.Tensor, name: Name = None) -> typing.Optional[T]:
        scores = self.layer(x)
        return Answer(scores, ["a"]), Output(logits=scores), self.color, Pair(scores, Net), make

    def made(self):
        class Made:
            def factor(self):
                return factor()
        return Made(), lambda: factor()

@functools.lru_cache(maxsize=3)
def factor():
    return FACTOR

FACTOR = 3.0
make = Net
"""


class Kept(Tensor):
    pass


def test_script_classes_survive_a_round_trip() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    net = at_home.Net()
    copy = channel.to_worker(net)
    assert type(copy) is not at_home.Net
    assert type(copy).__name__ == "Net"
    assert copy.tied is copy.layer.weight
    assert type(copy.tied) is nn.Parameter
    assert copy.tied.requires_grad
    assert isinstance(type(copy).__dict__["double"], functools.cached_property)
    x = torch.randn(4, 3)
    answer, output, color, pair, make = channel.to_parent(copy(x))
    want = net(x)
    assert type(answer) is at_home.Answer
    assert type(output) is at_home.Output
    assert color is at_home.Color.BLUE
    assert type(pair) is at_home.Pair
    assert pair.second is make is at_home.Net
    torch.testing.assert_close(answer.scores, want[0].scores)
    assert output.logits is answer.scores is pair.first
    assert channel.pickle_size < 600
    assert channel.worker.modified_globals() == []
    assert at_home.Net.forward.__globals__ is at_home.__dict__, "home's class is as it was"


def test_definitions_are_sent_once() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    first = type(channel.to_worker(at_home.Net()))
    sent = channel.pickle_size
    again = channel.to_worker([at_home.Net(), at_home.Color.RED, at_home.Pair(1, 2)])
    assert type(again[0]) is first
    assert type(again[2]) is first.kinds[1]
    assert channel.pickle_size < sent / 3
    redefined = script(SCRIPT)
    assert type(channel.to_worker(redefined.Net())) is not first, "a class of the same name is another class"


def test_definitions_are_sent_again_after_mark_all_unsent() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    channel.parent.pack(at_home.Pair(1, 2))
    with pytest.raises(Exception, match="was not received"):
        channel.to_worker(at_home.Pair(1, 2))
    channel.parent.mark_all_unsent()
    pair = type(channel.to_worker(at_home.Pair(1, 2)))
    channel.parent.mark_all_unsent()
    assert type(channel.to_worker(at_home.Pair(1, 2))) is pair
    assert type(channel.to_parent(pair(3, 4))) is at_home.Pair


def test_functions_created_in_a_worker_get_the_parents_globals() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    made, function = channel.to_parent(channel.to_worker(at_home.Net()).made())
    assert function.__globals__ is at_home.__dict__
    assert function() == made.factor() == 3.0
    assert type(channel.to_parent(channel.to_worker(made))) is type(made)


def test_closures_share_their_variables() -> None:
    at_home = script("""
def counter():
    count = 0
    def add():
        nonlocal count
        count += 1
        return count
    def read():
        return count
    def again(n):
        return 0 if n == 0 else 1 + again(n - 1)
    return add, read, again
""")
    add, read, again = LocalChannel().to_worker(at_home.counter())
    add()
    assert (add(), read(), again(3)) == (2, 2, 3)


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


VALUES: dict[str, Any] = {
    "plain": lambda: {"a": [1, 2.5, None, "x", b"y", 1j, {3}, True], (1, 2): range(3)},
    "torch": lambda: [torch.float16, torch.device("cpu", 0), torch.Size([2, 3]), torch.strided, torch.channels_last],
    "sparse": lambda: [sparse(), sparse().to_sparse_csr()],
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "packed": lambda: nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    "tensors": lambda: [torch.ones(()), torch.ones(0, 2), torch.ones(2, dtype=torch.bfloat16), torch.arange(3)],
    "subclass": lambda: torch.ones(3).as_subclass(Kept),
    "meta": lambda: torch.empty(3, device="meta"),
    "arrays": lambda: [np.arange(5000.0), np.arange(6.0).reshape(2, 3).T, np.array(["a", None], dtype=object)],
    "distribution": lambda: torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
}


def flat(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [flat(item) for item in value]
    if isinstance(value, Tensor):
        parts = [] if value.is_meta else value.unbind() if value.is_nested else [value.to_dense()]
        return type(value), value.dtype, value.layout, [part.tolist() for part in parts]
    if isinstance(value, torch.distributions.Normal):
        return flat([value.loc, value.scale])
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_values_survive_a_round_trip(make: Any) -> None:
    value = make()
    assert flat(LocalChannel().to_worker(value)) == flat(value)


def test_tensors_are_sent_outside_the_pickle() -> None:
    shared, weight = torch.ones(5000), nn.Parameter(torch.ones(5000), requires_grad=False)
    weight.group = "decay"  # type: ignore[attr-defined]
    array = np.arange(10_000)
    array.flags.writeable = False
    parcel = CodeRegistry(is_parent=True).pack([shared, {"again": shared}, weight, sparse(), array])
    assert len(parcel.body) < 1000
    assert parcel.tensors[0] is shared
    assert parcel.tensors[1] is weight
    one, again, other, _, back = CodeRegistry(is_parent=False).unpack(parcel)
    assert one is again["again"]
    assert (type(other), other.requires_grad, other.group) == (nn.Parameter, False, "decay")
    assert np.array_equal(back, array)
    assert not back.flags.writeable


def test_parametrized_modules() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    channel, x = LocalChannel(), torch.randn(4, 3)
    copy = channel.to_worker(net)
    torch.testing.assert_close(copy(x), net(x))
    assert type(channel.to_parent(copy)[0]) is type(net[0])


def test_generators_and_weak_references() -> None:
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(1, 1)
    channel = LocalChannel()
    copy, held, weak, dead = channel.to_worker([generator, layer, weakref.ref(layer), weakref.ref(set())])
    assert torch.equal(torch.rand(3, generator=copy), torch.rand(3, generator=generator))
    assert weak() is held
    assert dead() is None


def test_a_value_that_is_nested_too_deeply_is_an_error() -> None:
    chain: list[Any] = []
    for _ in range(100_000):
        chain = [chain]
    with pytest.raises(CannotCross, match=r"argument 'chain' cannot be sent .* nested too deeply"):
        LocalChannel().to_worker(chain, "argument 'chain'")
    while chain:
        (chain,) = chain


class Order:
    PATHS = {"kwargs": "argument ", "module": "the module"}

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def holding(thing: Any) -> nn.Module:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    net[1].cache = {"file": [thing]}  # type: ignore[assignment]
    net[1].owner = [net]  # type: ignore[assignment]
    net.encoder = net[1]
    return net


def closing_over(lock: Any) -> Any:
    return lambda: lock


@pytest.mark.parametrize(
    ("value", "what", "message"),
    [
        (lambda: {"lock": threading.Lock()}, "argument 'batch'", r"argument 'batch'\['lock'\] \(a _thread.lock\)"),
        (lambda: {"batch": [threading.Lock()]}, "argument ", r"argument 'batch'\[0\] \(a _thread.lock\)"),
        (lambda: Order(kwargs={"b": {"f": sys.__stdin__}}), "", r"argument 'b'\['f'\] \(a _io.TextIOWrapper\)"),
        (lambda: Order(module=holding(contextvars.copy_context())), "", "the module, attribute '1.cache"),
        (lambda: holding(x for x in "ab"), "", r"attribute '1.cache\['file'\]\[0\]' \(a generator\)"),
        (lambda: closing_over(threading.RLock()), "the hook", "variable 'lock', which closing_over.<locals>.<lambda>"),
        (lambda: threading.Thread(), "x", r"x \(a threading.Thread\)"),
    ],
)
def test_errors_name_the_unpicklable_object(value: Any, what: str, message: str) -> None:
    with pytest.raises(CannotCross, match=message) as caught:
        LocalChannel().to_worker(value(), what)
    assert "engine='threads'" in str(caught.value)


def test_a_failed_pack_records_nothing() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    with pytest.raises(CannotCross):
        channel.to_worker([at_home.Pair(1, 2), threading.Lock()])
    assert channel.to_worker(at_home.Pair(1, 2)) == (1, 2)
