"""Hooks that a user put on modules see whole batches, or shards where that was asked for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune

import instep

ENGINES = ["serial", "threads", "processes"]
each_engine = pytest.mark.parametrize("engine", ENGINES)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Recorder:
    """A hook that is an object, and has a method that can be one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, module: nn.Module, args: Any, *_: Any) -> None:
        self.sizes.append(len(args[0]))

    method = __call__


KINDS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward hook": lambda layer, hook: layer.register_forward_hook(hook),
    "forward pre-hook": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "backward hook": lambda layer, hook: layer.register_full_backward_hook(lambda m, gi, go: hook(m, go)),
    "backward pre-hook": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
}


@each_engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["", "2"])
def test_a_hook_sees_whole_batches_with_one_warning(engine: str, kind: str, path: str) -> None:
    module, plain, seen = net(), net(), Recorder()
    plain.load_state_dict(module.state_dict())
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
        model(torch.randn(4, 3))
        handle = KINDS[kind](module.get_submodule(path), seen)
        x = torch.randn(7, 3, requires_grad=True)
        where = f"module '{path}'" if path else "the wrapped module"
        with pytest.warns(UserWarning, match=rf"because {where} has a {kind}[\s\S]*hooks='per_replica'"):
            out = model(x)
        out.sum().backward()
        model(x).sum().backward()
        assert seen.sizes == [7, 7]
        torch.testing.assert_close(out, plain(x))
        handle.remove()
        before = module[0].weight.grad.clone()
        model(x).sum().backward()
        assert seen.sizes == [7, 7]
        torch.testing.assert_close(module[0].weight.grad, before * 1.5)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_per_replica_hooks_see_shards(engine: str) -> None:
    seen: list[int] = []
    module = net()
    module[0].register_forward_hook(lambda m, args, out: seen.append(len(out)))
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine, hooks="per_replica") as model:
        model(torch.randn(7, 3))
    assert sorted(seen) == ([4] if engine == "processes" else [3, 4])  # what a hook notes in a worker stays there


@pytest.mark.parametrize("make", [lambda seen: seen, lambda seen: seen.method, lambda seen: functools.partial(seen)])
def test_objects_methods_and_partials_are_hooks_too(make: Callable[[Recorder], Any]) -> None:
    seen, module = Recorder(), net()
    module[0].register_forward_hook(make(seen))
    with instep.DataParallel(module, ["cpu"] * 2) as model, pytest.warns(UserWarning, match="Recorder"):
        model(torch.randn(5, 3))
    assert seen.sizes == [5]


def test_a_hook_for_every_module() -> None:
    seen: list[int] = []
    module = net()
    with instep.DataParallel(module, ["cpu"] * 2) as model:
        model(torch.randn(5, 3))
        handle = register_module_forward_hook(lambda m, args, out: seen.append(len(out)))
        try:
            with pytest.warns(UserWarning, match="has a global forward hook"):
                model(torch.randn(5, 3))
        finally:
            handle.remove()
        assert set(seen) == {5}


def test_a_hook_on_a_module_that_is_not_registered() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = [nn.Linear(3, 2)]

        def forward(self, x: Tensor) -> Tensor:
            return self.plain[0](x)

    seen, module = Recorder(), Hides()
    module.plain[0].register_forward_hook(seen)
    with instep.DataParallel(module, ["cpu"] * 2) as model, pytest.warns(UserWarning, match="module 'Linear' has"):
        model(torch.randn(5, 3))
    assert seen.sizes == [5]


def test_a_new_layer_with_a_hook_is_noticed() -> None:
    seen, module, late = Recorder(), net(), nn.Linear(3, 4)
    late.register_forward_hook(seen)
    with instep.DataParallel(module, ["cpu"] * 2) as model:
        model(torch.randn(5, 3))
        module[0] = late
        with pytest.warns(UserWarning, match="module '0' has"):
            model(torch.randn(5, 3))
    assert seen.sizes == [5]


def test_hooks_of_the_wrapper_leave_the_call_parallel() -> None:
    seen: list[int] = []
    shards: list[int] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            shards.append(len(x))
            return super().forward(x)

    with instep.DataParallel(Asks(3, 2), ["cpu"] * 2) as model:
        model.register_forward_hook(lambda m, args, out: seen.append(len(out)))
        model(torch.randn(5, 3))
    assert (seen, sorted(shards)) == ([5], [2, 3])


WORKERS: dict[str, Callable[[nn.Module], Any]] = {
    "spectral_norm, old": nn.utils.spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("work", WORKERS.values(), ids=WORKERS.keys())
def test_hooks_of_torch_layers_do_not_count(engine: str, work: Callable[[nn.Module], Any]) -> None:
    shards: list[int] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            shards.append(len(x))
            return super().forward(x)

    built = []
    for _ in range(2):
        torch.manual_seed(3)
        module = Asks(3, 4)
        work(module)
        built.append(module)
    plain, module = built
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x = torch.randn(7, 3)
            out = model(x)
            torch.testing.assert_close(out, plain(x))
        assert shards.count(4) == 3  # the first replica's; a worker notes its own
        for (name, mine), theirs in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, msg=name)


def test_an_unknown_hooks_option_is_an_error() -> None:
    with pytest.raises(instep.WrapError, match="write 'whole' or 'per_replica'"):
        instep.DataParallel(net(), ["cpu"] * 2, hooks="shards")


@pytest.mark.parametrize("hooks", ["whole", "per_replica"])
def test_a_hook_that_was_copied_from_another_module_is_noticed(hooks: str) -> None:
    """Copying a hook table registers nothing, so that torch's counter of hooks stays the same."""
    donor, module, sizes = nn.Linear(3, 3), net(), []
    donor.register_forward_hook(lambda _module, args, _output: sizes.append(len(args[0])))
    with torch.no_grad(), instep.DataParallel(module, ["cpu"] * 2, engine="serial", hooks=hooks) as model:
        model(torch.randn(4, 3))
        model(torch.randn(4, 3))
        module[0]._forward_hooks.update(donor._forward_hooks)
        if hooks == "whole":
            with pytest.warns(UserWarning, match="module '0' has a forward hook"):
                model(torch.randn(4, 3))
            assert sizes == [4]
        else:
            model(torch.randn(4, 3))
            assert sorted(sizes) == [2, 2]
        module[0]._forward_hooks.clear()
        sizes.clear()
        model(torch.randn(4, 3))
        assert not sizes
