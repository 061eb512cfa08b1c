"""Detection of module hooks that the user registered."""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from instep.replicas.names import module_names
from instep.runtime.torch_private import global_hooks

KNOWN_LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "compressed_tensors", "diffusers", "instep", "optimum", "peft", "torch", "torchao"}
    | {"transformers"}
)


def user_defined(hooks: Iterable[Any]) -> Iterator[Any]:
    """Those hooks that no library put there."""
    return (hook for hook in hooks if _defining_package(hook) not in KNOWN_LIBRARIES)


def unwrap_hook(hook: Any) -> Any:
    """The function behind a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _defining_package(hook: Any) -> str:
    """The package that a hook's function, or the class of a hook that is an object, is defined in."""
    function = unwrap_hook(hook)
    where = getattr(function, "__module__", None) if hasattr(function, "__code__") else type(function).__module__
    return (where or "").partition(".")[0]


_HOOK_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


class UserHook(NamedTuple):
    """A user's hook: what kind it is, what it is called, and the module it is on."""

    kind: str
    name: str
    module: str


class UserHooks:
    """Whether a module has hooks of the user's; looked for again only when a hook or a module may have come."""

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._no_hooks_at: tuple[int, int] | None = None
        self._library_only: set[tuple[Any, int]] = set()
        """By the manner of a call: how many hooks came to be where none of them was the user's."""

    def find(self, modules: Sequence[nn.Module] | None, made: int) -> UserHook | None:
        """The first hook there is on `modules`, or on those that are registered; `made` changes when these do."""
        for kind, hooks in global_hooks():
            for hook in user_defined(hooks):
                return UserHook(f"global {kind}", hook_name(hook), "every module")
        now = RemovableHandle.next_id, made  # torch counts every hook that is registered anywhere
        if now == self._no_hooks_at:
            return None
        found = next(_hooks_on_modules(list(self._source.modules()) if modules is None else modules), None)
        if found is None:
            self._no_hooks_at = now
            return None
        module, kind, hook = found
        name = module_names(self._source, [module])[0]
        return UserHook(kind, hook_name(hook), f"module {name!r}" if name else "the wrapped module")

    def remove_tensor_hooks(self, numbers: range, manner: Any) -> UserHook | None:
        """The first of the hooks with these numbers that is the user's, on a tensor; all that are, are taken off again.

        `manner` is what calls have in common that make the same hooks. A hook that `forward` puts on one of its tensors
        hangs on the graph, where only Python's collector finds it.
        """
        if (manner, len(numbers)) in self._library_only:
            return None
        found = None
        for table in [held for held in gc.get_objects() if type(held) is OrderedDict]:
            mine = [number for number in numbers if number in table and any(user_defined([table[number]]))]
            for number in mine:
                found = found or UserHook("hook", hook_name(table.pop(number)), "a tensor in forward")
        if found is None:
            self._library_only.add((manner, len(numbers)))
        return found


def _hooks_on_modules(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in modules:
        for table, kind in _HOOK_TABLES.items():
            hooks = module.__dict__.get(table)
            if hooks:
                yield from ((module, kind, hook) for hook in user_defined(hooks.values()))


def hook_name(hook: Any) -> str:
    """What a hook is called, for messages."""
    function = unwrap_hook(hook)
    return getattr(function, "__qualname__", None) or type(function).__name__
