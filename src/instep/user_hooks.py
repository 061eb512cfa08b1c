"""Hooks that a user put on modules, which are written for whole batches.

A hook on a submodule of a replica would see a shard, at the same time as other replicas' hooks see theirs. So a call of
a module that has such hooks runs on the module itself. Hooks by which torch and other libraries do their work are made
for whatever comes in, and do not count: they are told by the package that their function is defined in.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from instep.private import global_hooks
from instep.replicas.hook_owner import bare_hook, users
from instep.replicas.names import module_names

_KINDS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


class Hook(NamedTuple):
    """A user's hook: what kind it is, what it is called, and the module it is on."""

    kind: str
    name: str
    module: str


class UserHooks:
    """Whether a module has hooks of the user's; looked for again only when a hook or a module may have come."""

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._clear_at: tuple[int, int] | None = None
        self._told = False
        self._foreign: set[tuple[Any, int]] = set()
        """By the manner of a call: how many hooks came to be where none of them was the user's."""

    def find(self, modules: Sequence[nn.Module] | None, made: int) -> Hook | None:
        """The first hook there is on `modules`, or on those that are registered; `made` changes when these do."""
        for kind, hooks in global_hooks():
            for hook in users(hooks):
                return Hook(f"global {kind}", name_of(hook), "every module")
        now = RemovableHandle.next_id, made  # torch counts every hook that is registered anywhere
        if now == self._clear_at:
            return None
        found = next(_hooks_on(list(self._source.modules()) if modules is None else modules), None)
        if found is None:
            self._clear_at = now
            return None
        module, kind, hook = found
        name = module_names(self._source, [module])[0]
        return Hook(kind, name_of(hook), repr(name) if name else "the wrapped module")

    def made(self, numbers: range, manner: Any) -> Hook | None:
        """The first of the hooks with these numbers that is the user's, on a tensor; all that are, are taken off again.

        `manner` is what calls have in common that make the same hooks. A hook that `forward` puts on one of its tensors
        hangs on the graph, where only Python's collector finds it.
        """
        if (manner, len(numbers)) in self._foreign:
            return None
        found = None
        for table in [held for held in gc.get_objects() if type(held) is OrderedDict]:
            mine = [number for number in numbers if number in table and any(users([table[number]]))]
            for number in mine:
                found = found or Hook("hook", name_of(table.pop(number)), "a tensor of forward's")
        if found is None:
            self._foreign.add((manner, len(numbers)))
        return found

    def tell(self, hook: Hook, stacklevel: int = 6) -> None:
        """Say once that such calls run on one device."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"the {hook.kind} {hook.name!r} on {hook.module} is shown whole batches: calls run on one device as "
                f"long as it is there.\n"
                f"With DataParallel(..., hooks='per_replica') they run on all, and it is shown shards.",
                stacklevel=stacklevel,
            )


def _hooks_on(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in modules:
        for table, kind in _KINDS.items():
            hooks = module.__dict__.get(table)
            if hooks:
                yield from ((module, kind, hook) for hook in users(hooks.values()))


def name_of(hook: Any) -> str:
    """What a hook is called, for messages."""
    function = bare_hook(hook)
    return getattr(function, "__qualname__", None) or type(function).__name__
