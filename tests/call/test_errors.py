"""Every error says where, what and what to write; and a call that fails changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

ENGINES = ["serial", "threads", "processes"]


class Thing:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Net(nn.Module):
    """Draws a number, updates a buffer, and then does what the test asks for."""

    def __init__(self, then: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.then = then
        self.note = "as it was"

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        torch.rand(3)
        self.calls += 1
        return self.then(self, self.layer(x))


def snapshot(net: nn.Module) -> list[Any]:
    tensors = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
    return [torch.get_rng_state(), net.note, *(t.detach().clone() for t in tensors)]


def assert_unchanged(net: nn.Module, before: list[Any]) -> None:
    for old, new in zip(before, snapshot(net), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def assert_fails(
    error: type[Exception], words: list[str], net: Net, *args: Any, engine: str, options: Any = None, **kwargs: Any
) -> BaseException:
    """The call raises, its message has these words in this order, nothing has changed, and the next call works."""
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, **(options or {})) as model:
        before = snapshot(net)
        with pytest.raises(error) as caught:
            model(*args, **kwargs)
        assert re.search(".*".join(map(re.escape, words)), str(caught.value), re.DOTALL), str(caught.value)
        assert_unchanged(net, before)
        net.then = lambda net, y: y
        x = torch.randn(5, 3)
        torch.testing.assert_close(model(x), net.layer(x))
        assert net.calls == 1
    return caught.value


def fine(net: Net, y: Tensor) -> Tensor:
    return y


BAD_INPUT: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "a size that does not fit": (
        (torch.ones(5, 3), torch.ones(4)),
        ["others.0", "Tensor [4]", "for a batch of 5", "'x': size 5", "what 'others.0' is: None"],
    ),
    "the batch in another dim": (
        (torch.ones(5, 3), torch.ones(2, 5)),
        ["others.0", "Tensor [2, 5]", "what 'others.0' is: ", "which has size 5"],
    ),
    "a list with two readings": (
        (torch.ones(4, 3), [torch.ones(4, 2) for _ in range(4)]),
        ["others.0", "one entry per sample", "what 'others.0' is: 'samples'", "0 if every"],
    ),
    "an iterator": ((torch.ones(4, 3), iter([1])), ["others.0", "iterator", "list(...)"]),
    "a module": ((torch.ones(4, 3), nn.Linear(1, 1)), ["others.0", "Linear", "submodule"]),
    "an object with tensors": (
        (torch.ones(4, 3), Thing(torch.ones(4))),
        ["others.0", "Thing", "instep.register(Thing, size="],
    ),
    "too many shards": ((torch.ones(4, 3), instep.Shards([1, 2, 3])), ["Shards of 3 entries", "2 replica"]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("args", "words"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input(args: tuple[Any, ...], words: list[str], engine: str) -> None:
    ran: list[int] = []

    def note(net: Net, y: Tensor) -> Tensor:
        ran.append(len(y))
        return y

    assert_fails(instep.StructureError, words, Net(note), *args, engine=engine)
    assert not ran, "bad input raises before any replica runs"


BAD_OUTPUT: dict[str, tuple[Callable[[Net, Tensor], Any], list[str]]] = {
    "a loss": (
        lambda net, y: {"loss": y.mean()},
        ["'loss'", "0-d tensor that differs", "merge={'loss': ...}", "'mean'"],
    ),
    "a number": (lambda net, y: {"n": len(y)}, ["'n'", "a constant or the number of samples (3, 2)", "'sum'"]),
    "a count": (lambda net, y: {"n": (y == y).sum() * 0}, ["'n'", "a constant or a count", "(0, 0)", "'sum'"]),
    "a string": (lambda net, y: f"{len(y)} samples", ["'3 samples', '2 samples'"]),
    "no dim is the batch": (
        lambda net, y: (y, y[:1]),
        ["'1'", "shapes [[1, 2], [1, 2]]", "shards of [3, 2] samples", "'pad'"],
    ),
    "two dims follow the batch": (lambda net, y: {"logits": y @ y.T}, ["'logits'", "[[3, 3], [2, 2]]"]),
    "an object": (lambda net, y: [Thing(y)] * 1, ["Thing", "instep.register(Thing", "'first'"]),
    "other types": (lambda net, y: y if len(y) == 3 else [y], ["different types", "Tensor", "list"]),
    "other keys": (
        lambda net, y: {f"k{len(y)}": y},
        ["first replica has the entries ['k3']", "replica 1 has no ['k3']"],
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("then", "words"), BAD_OUTPUT.values(), ids=BAD_OUTPUT.keys())
def test_output_that_cannot_be_merged(then: Callable[[Net, Tensor], Any], words: list[str], engine: str) -> None:
    options = {"probe": False}  # the probe refuses most of them before any replica runs
    assert_fails(instep.MergeError, words, Net(then), torch.randn(5, 3), engine=engine, options=options)


def add_up(net: Net, y: Tensor) -> Tensor:
    net.total += y.detach().sum()
    return y


def set_note(net: Net, y: Tensor) -> Tensor:
    net.note = f"saw {len(y)}"
    return y


def keep_loss(net: Net, y: Tensor) -> Tensor:
    net.note = y.mean()
    return y


def count(net: Net, y: Tensor) -> Tensor:
    net.total += len(y)
    return y


BAD_STATE: dict[str, tuple[Callable[[Net, Tensor], Any], list[str]]] = {
    "a buffer": (
        add_up,
        ["'total' to a different value", "'sum'", "on_unmerged_state='warn'"],
    ),
    "an attribute": (set_note, ["changed 'note' to a different value", "'sum'"]),
    "a loss on the module": (keep_loss, ["'note'", "cannot be merged", "merge={'note': ...}"]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("then", "words"), BAD_STATE.values(), ids=BAD_STATE.keys())
def test_state_that_no_rule_explains(then: Callable[[Net, Tensor], Any], words: list[str], engine: str) -> None:
    options = {"probe": False}
    assert_fails(instep.StateError, words, Net(then), torch.randn(5, 3), engine=engine, options=options)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_count_of_samples_is_not_taken_for_a_count_of_calls(engine: str) -> None:
    assert_fails(instep.StateError, ["changed 'total'"], Net(count), torch.randn(6, 3), engine=engine)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_backward_inside_forward_is_refused_where_its_gradients_would_be_lost(engine: str) -> None:
    def descend(net: Net, y: Tensor) -> Tensor:
        y.sum().backward()
        return y.detach()

    assert_fails(
        instep.BridgeError,
        ["inside forward", "call backward() outside forward"],
        Net(descend),
        torch.randn(5, 3),
        engine=engine,
    )


def write(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.weight.mul_(0.5)
    return y


UNTOUCHED = ["write to it.\nThe module's parameter has its value from before the call.\nChange it"]
OVERWRITTEN = [
    "write to it.\nThe module's parameters 'layer.weight' have the new values, because replicas share their memory",
    "restore them with load_state_dict",
    "With private_copies=True replicas do not share memory with the module.",
]


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_written_in_forward(engine: str, private: bool) -> None:
    options = {"private_copies": private}
    words = ["wrote to the trainable parameter 'layer.weight'", *UNTOUCHED, "outside forward"]
    assert_fails(instep.StateError, words, Net(write), torch.randn(5, 3), engine=engine, options=options)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_written_in_a_later_call(engine: str, private: bool) -> None:
    """An error there, too. Where replicas share the memory of the module, what they wrote stays, and it says so."""
    net, x = Net(fine), torch.randn(5, 3)
    options: Any = {"private_copies": private, "probe": False}  # which would see it beforehand
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, **options) as model:
        model(x)
        model(x)  # values are looked at in the second one too
        before = net.layer.weight.detach().clone()
        net.then = write
        said = ["wrote to the trainable parameter 'layer.weight'", *(UNTOUCHED if private else OVERWRITTEN), "outside"]
        with pytest.raises(instep.StateError, match="(?s)" + ".*".join(map(re.escape, said))):
            model(x)
        assert torch.equal(net.layer.weight, before) == private


def replace(net: Net, y: Tensor) -> Tensor:
    net.layer.weight.data = net.layer.weight.data * 0.5
    return y


def write_in_one(net: Net, y: Tensor) -> Tensor:
    return write(net, y) if len(y) == 2 else y


@pytest.mark.parametrize("then", [replace, write_in_one])
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_what_a_write_that_does_not_reach_the_module_says(engine: str, then: Callable[[Net, Tensor], Any]) -> None:
    """Other memory for a replica's parameter; a write in another process, on pages of its own."""
    net, x = Net(fine), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False) as model:
        model(x)
        model(x)
        before = net.layer.weight.detach().clone()
        net.then = then
        reaches = engine == "threads" and then is write_in_one
        with pytest.raises(instep.StateError, match=re.escape((OVERWRITTEN if reaches else UNTOUCHED)[0])):
            model(x)
        assert torch.equal(net.layer.weight, before) != reaches


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_written_through_data_in_another_mode(engine: str, private: bool) -> None:
    """The first call in each mode is tried, so the write is seen, and nothing of the module is written."""

    def clamp(net: Net, y: Tensor) -> Tensor:
        if not net.training:
            net.layer.weight.data.clamp_(-0.01, 0.01)
        return y

    net, x = Net(clamp), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        model(x)
        model.eval()
        before = net.layer.weight.detach().clone()
        for _ in range(2):
            with pytest.raises(instep.StateError, match=r"wrote to the trainable parameter 'layer\.weight'"):
                model(x)
            assert torch.equal(net.layer.weight, before)
        model.train()
        torch.testing.assert_close(model(x), net.layer(x))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_written_through_data_from_some_call_on(engine: str) -> None:
    """No counter moves, and replicas that share memory write more than once: values are looked at ever less often."""

    def decay(net: Net, y: Tensor) -> Tensor:
        if net.decays:
            net.layer.weight.data.mul_(0.9)
        return y

    net, x = Net(decay), torch.randn(5, 3)
    net.decays = False
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False) as model:
        for _ in range(6):
            model(x)
        net.decays = True
        model(x)  # the seventh
        before = net.layer.weight.detach().clone()
        with pytest.raises(instep.StateError, match=r"(?s)parameter 'layer\.weight'.*value from before the call"):
            model(x)
        assert torch.equal(net.layer.weight, before)


class OwnError(Exception):
    """An exception that cannot be made from its message alone."""

    def __init__(self, size: int, *, code: int) -> None:
        super().__init__(f"size {size}")
        self.size, self.code = size, code


@pytest.mark.parametrize("engine", ["serial", "threads"])  # a worker's frames come as a note: see tests/faults
def test_the_users_exception_keeps_its_type_and_says_where(engine: str) -> None:
    def fail(net: Net, y: Tensor) -> Tensor:
        if len(y) == 2:
            raise OwnError(len(y), code=7)
        return y

    error = assert_fails(OwnError, ["size 2"], Net(fail), torch.randn(5, 3), engine=engine)
    assert isinstance(error, OwnError)
    assert (error.size, error.code) == (2, 7)
    said = [*getattr(error, "__notes__", []), str(error.__cause__)]
    assert any("raised in replica 1 on cpu" in line for line in said)
    names = []
    traceback = error.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert names[-1] == "fail"


@pytest.mark.parametrize("engine", ENGINES)
def test_rules_make_each_of_them_right(engine: str) -> None:
    net = Net(lambda net, y: {"y": add_up(net, y), "loss": y.mean(), "n": len(y)})
    rules = {"merge": {"loss": "mean", "n": "sum"}, "state": {"total": "sum"}}
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, **rules) as model:
        x = torch.randn(5, 3)
        out = model(x)
        expected = net.layer(x)
        assert out["n"] == 5
        torch.testing.assert_close(out["loss"], expected.mean())
        torch.testing.assert_close(net.total, expected.detach().sum())
        assert net.calls == 1
        out["loss"].backward()
        mine = net.layer.weight.grad.clone()
        net.zero_grad()
        expected.mean().backward()
        torch.testing.assert_close(mine, net.layer.weight.grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_unmerged_state_can_be_a_warning(engine: str) -> None:
    net = Net(set_note)
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine, on_unmerged_state="warn") as model,
        pytest.warns(UserWarning, match="changed 'note' to a different value"),
    ):
        model(torch.randn(5, 3))
    assert net.note == "saw 3"


def test_a_module_spread_over_devices() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(instep.WrapError, match=r"on several devices \(cpu, meta\).*module\.to\('cpu'\)"):
        instep.DataParallel(net, ["cpu"] * 2)
