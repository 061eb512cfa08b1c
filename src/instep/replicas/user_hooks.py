"""Detection of module hooks that the user registered, and removal of hooks on tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.replicas.names import module_names
from instep.runtime.torch_private import global_hooks

KNOWN_LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "compressed_tensors", "diffusers", "instep", "optimum", "peft", "torch", "torchao"}
    | {"transformers"}
)


def user_defined(hooks: Iterable[Any]) -> Iterator[Any]:
    """The hooks that are not defined by a known library."""
    return (hook for hook in hooks if _defining_package(hook) not in KNOWN_LIBRARIES)


def unwrap_hook(hook: Any) -> Any:
    """The function behind a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _defining_package(hook: Any) -> str:
    """The top-level package that defines the hook's function, or the class of a callable object."""
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
    """Description of a hook that the user registered, for messages."""

    kind: str
    name: str
    module: str


class UserHooks:
    """Finds hooks that the user registered. Searches again only after a hook was registered or the modules changed."""

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._tables: list[dict[int, Any]] = []
        """Hook tables of the modules, as of `_generation`."""
        self._generation = -1
        self._no_user_hooks: list[tuple[Any, ...]] | None = None
        """The hooks, by identity, among which no user's was found."""

    def find(self, modules: Sequence[nn.Module] | None, generation: int) -> UserHook | None:
        """The first user hook on `modules`, by default the registered ones. `generation` changes with them."""
        for kind, hooks in global_hooks():
            for hook in user_defined(hooks):
                return UserHook(f"global {kind}", hook_name(hook), "every module")
        if modules is None:
            modules = list(self._source.modules())
        if generation != self._generation or not self._tables:
            self._tables = [
                table for module in modules for table in map(module.__dict__.get, _HOOK_TABLES) if table is not None
            ]
            self._generation, self._no_user_hooks = generation, None
        present = [tuple(table.values()) for table in self._tables if table] if any(self._tables) else []
        if present == self._no_user_hooks:
            return None
        found = next(_hooks_on_modules(modules), None)
        if found is None:
            self._no_user_hooks = present
            return None
        module, kind, hook = found
        name = module_names(self._source, [module])[0]
        return UserHook(kind, hook_name(hook), f"module {name!r}" if name else "the wrapped module")


def remove_tensor_hooks(tensors: Iterable[Tensor], handle_ids: Collection[int]) -> None:
    """Remove hooks from tensors, by the ids of their handles."""
    for tensor in tensors:
        tables: tuple[Any, ...] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        for hooks in filter(None, tables):
            for number in [number for number in hooks if number in handle_ids]:
                del hooks[number]


def _hooks_on_modules(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in modules:
        for table, kind in _HOOK_TABLES.items():
            hooks = module.__dict__.get(table)
            if hooks:
                yield from ((module, kind, hook) for hook in user_defined(hooks.values()))


def hook_name(hook: Any) -> str:
    """The qualified name of a hook, for messages."""
    function = unwrap_hook(hook)
    return getattr(function, "__qualname__", None) or type(function).__name__
