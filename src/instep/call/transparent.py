"""Base class of wrappers that behave as the module they wrap: same attributes, parameters and `state_dict`."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from instep.call.interop import wrapper_class
from instep.errors import WrapError
from instep.runtime.torch_private import unwrap_compiled

Self = TypeVar("Self", bound="Transparent")

# The first attribute that DistributedDataParallel reads from its module.
_DDP_IGNORE_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"
WRAPPED_TWICE_MESSAGE = (
    "torch.nn.DataParallel cannot wrap instep.DataParallel: both would split the batch.\n"
    "Wrap the plain module with one of them: model.module."
)


def _forwarded_attribute(name: str) -> Any:
    """A property that reads an attribute of the wrapped module, whatever the wrapper's classes define."""

    def read(self: Transparent) -> Any:
        return getattr(self.__dict__["module"], name)

    def write(self: Transparent, value: Any) -> None:
        """Ignore the empty registries that `nn.Module.__init__` assigns."""

    return property(read, write)


def _forwarded_method(name: str) -> Any:
    """A method that calls the wrapped module's method of the same name."""

    def call(self: Transparent, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    call.__name__ = name
    return call


# accelerate replaces `forward` of a model that it prepares, and keeps the former one.
OWN_ATTRIBUTES = frozenset({"forward", "_original_forward", "_is_accelerate_prepared"})


class Transparent(nn.Module):
    """A wrapper that reads, sets and deletes attributes on `module`.

    It uses the module's own registries of parameters, buffers and submodules, so their names have no prefix. Attributes
    whose names begin with `_instep_` belong to the wrapper, and so does a `forward` that is set on it.
    """

    module: nn.Module

    _parameters = _forwarded_attribute("_parameters")
    _buffers = _forwarded_attribute("_buffers")
    _modules = _forwarded_attribute("_modules")
    _non_persistent_buffers_set = _forwarded_attribute("_non_persistent_buffers_set")
    training = _forwarded_attribute("training")

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["module"] = module
        nn.Module.__init__(self)

    def __getattr__(self, name: str) -> Any:
        if name == _DDP_IGNORE_ATTRIBUTE:
            raise WrapError(
                "DistributedDataParallel cannot wrap instep.DataParallel: both would split the batch.\n"
                "Wrap the plain module with one of them: model.module."
            )
        if "module" not in self.__dict__:
            raise AttributeError(name)
        try:
            return getattr(self.__dict__["module"], name)
        except AttributeError:
            raise AttributeError(
                f"neither {wrapper_class(self).__name__} nor {type(self.module).__name__} has an attribute {name!r}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise WrapError(
                "the class of instep.DataParallel cannot be changed, e.g. by register_parametrization(model, ...).\n"
                "Change the module: register_parametrization(model.module, ...)."
            )
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["module"], name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.__dict__["module"], name)

    def _is_own(self, name: str) -> bool:
        return name in self.__dict__ or name.startswith("_instep_") or name in OWN_ATTRIBUTES

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """As `nn.Module.modules`. Refuses `torch.nn.DataParallel`, which calls it to replicate the module."""
        if sys._getframe(1).f_code is torch.nn.parallel.replicate.__code__:
            raise WrapError(WRAPPED_TWICE_MESSAGE)
        return super().modules(*args, **kwargs)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def _indexable_module(self) -> Any:
        """The module, typed as a sequence or mapping."""
        return self.module

    def __len__(self) -> int:
        return len(self._indexable_module())

    def __getitem__(self, key: Any) -> Any:
        return self._indexable_module()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._indexable_module()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._indexable_module()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indexable_module())

    def __bool__(self) -> bool:
        return True

    def train(self: Self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        self.module.apply(fn)
        return self

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)
        return self

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        self.module.to(*args, **kwargs)
        return self

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        self.module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return unwrap_compiled(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`.

        Keys may have the prefix `module.` of `nn.DataParallel` and `DistributedDataParallel`, or the prefix
        `_orig_mod.` of `torch.compile`.
        """
        module = unwrap_compiled(self.module)
        return module.load_state_dict(bare_keys(state_dict, module), strict=strict, assign=assign)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.module._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.module.named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return unwrap_compiled(self.module).named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return unwrap_compiled(self.module).named_buffers(*args, **kwargs)

    register_buffer = _forwarded_method("register_buffer")
    register_parameter = _forwarded_method("register_parameter")
    register_module = _forwarded_method("register_module")
    add_module = _forwarded_method("add_module")
    register_state_dict_pre_hook = _forwarded_method("register_state_dict_pre_hook")
    register_state_dict_post_hook = _forwarded_method("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _forwarded_method("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _forwarded_method("register_load_state_dict_post_hook")


def bare_keys(state: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """A state dict without wrappers' prefixes, unless the module's own keys have them."""
    expected = module.state_dict().keys()
    for prefix in ("module.", "_orig_mod.") * 3:
        if not state or not all(key.startswith(prefix) for key in state):
            continue
        if any(key.startswith(prefix) for key in expected):
            continue
        bare: OrderedDict[str, Any] = OrderedDict((key.removeprefix(prefix), value) for key, value in state.items())
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:  # versions of the modules' entries, by module name
            bare._metadata = {_bare_name(name, prefix): entry for name, entry in metadata.items()}  # type: ignore[attr-defined]
        state = bare
    return state


def _bare_name(name: str, prefix: str) -> str:
    return "" if name + "." == prefix else name.removeprefix(prefix)
