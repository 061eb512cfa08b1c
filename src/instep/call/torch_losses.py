"""Losses of torch whose divisor is known, and criteria that return the mean of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from instep.runtime.torch_private import has_thread_local_transform

_FUNCTIONAL_CRITERIA: dict[Any, Any] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
}
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_ELEMENT = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
)
_BY_SAMPLE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
_LOSSES: tuple[Any, ...] = (*_BY_CLASS, *_BY_ELEMENT, *_BY_SAMPLE)
_MAX_COUNTED = 256
"""The length of a one-dimensional target on the CPU up to which its values are counted in Python."""


def torch_loss(criterion: Any) -> Any:
    """The criterion as a loss of `torch.nn` with a known divisor; None for any other criterion."""
    if isinstance(criterion, partial) and not criterion.args and criterion.func in _FUNCTIONAL_CRITERIA:
        try:
            return _FUNCTIONAL_CRITERIA[criterion.func](**criterion.keywords)
        except TypeError:
            return None
    if not isinstance(criterion, nn.Module):
        cls = _FUNCTIONAL_CRITERIA.get(criterion) if getattr(criterion, "__hash__", None) else None
        return None if cls is None else _default_criterion(cls)
    if criterion._forward_hooks or criterion._forward_pre_hooks:
        return None
    for cls in _LOSSES:
        if isinstance(criterion, cls) and type(criterion).forward is cls.forward:
            return criterion
    return None


@cache
def _default_criterion(loss: type[nn.Module]) -> nn.Module:
    """A loss with default arguments. It is shared: callers change copies only."""
    return loss()


def divisor_of(criterion: Any, output: Tensor, target: Tensor) -> Any:
    """The divisor of the criterion's mean over a batch."""
    if isinstance(criterion, nn.MultiLabelSoftMarginLoss):  # the loss itself takes the mean over classes
        shapes = [value.shape for value in (output, target, criterion.weight) if value is not None]
        shape = torch.broadcast_shapes(*shapes)
        return shape.numel() // max(1, shape[output.ndim - 1])
    if isinstance(criterion, _BY_SAMPLE):
        return len(output) if output.ndim > 1 else 1
    if isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean":
        return len(output)
    if isinstance(criterion, _BY_ELEMENT):
        return torch.broadcast_shapes(output.shape, target.shape).numel()
    if target.is_floating_point():  # class probabilities
        return output.numel() // output.shape[1 if output.ndim > 1 else 0]
    if criterion.weight is None and _can_count_in_python(target):
        return len(target) - target.tolist().count(criterion.ignore_index)
    counted = target.long() != criterion.ignore_index  # in uint8, -100 would be class 156
    if criterion.weight is None:
        return counted.sum()
    return (criterion.weight[target.where(counted, 0)] * counted).sum()


def _can_count_in_python(target: Tensor) -> bool:
    """Whether Python counts a short target faster than torch does, and nothing traces or transforms this code."""
    if torch.compiler.is_compiling() or type(target) is not Tensor or not target.is_cpu or target.ndim != 1:
        return False
    return len(target) <= _MAX_COUNTED and not has_thread_local_transform()


class MeanRecorder(TorchFunctionMode):
    """Context manager: records the means of `torch.nn.functional`, and may compute them as a sum over a divisor."""

    def __init__(self, sums: Callable[[Any, Tensor, Tensor], dict[str, Any]] | None) -> None:
        """`sums` returns the sum and the divisor of a loss, given its output and target. None: use torch's mean."""
        super().__init__()
        self._sums = sums
        self._means: list[tuple[Tensor, int, dict[str, Any]]] = []
        """The means, with their versions, sums and divisors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        loss = _mean_loss(func, args, options)
        if loss is None:
            if self._means:  # inference tensors have no version that would show a write in place
                self._means = [entry for entry in self._means if not _is_used(entry[0], args)]
            return func(*args, **options)
        parts = {} if self._sums is None else self._sums(loss, *args)
        mean = func(*args, **options) if self._sums is None else quotient(parts)
        self._means.append((mean, _version(mean), parts))
        return mean

    def parts(self, result: Any) -> dict[str, Any] | None:
        """The sum and divisor of a value; None if it is not one of the means, or was changed in place."""
        found = (entry for entry in self._means if entry[0] is result)
        mean, version, parts = next(found, (None, 0, None))
        return parts if mean is not None and _version(mean) == version else None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_used(mean: Tensor, args: Sequence[Any]) -> bool:
    """Whether an inference tensor is an argument of a call."""
    return mean.is_inference() and any(value is mean for value in args)


def quotient(parts: Mapping[str, Any]) -> Any:
    """The mean, from a sum and a divisor."""
    mean = parts["sum"] / parts["divisor"]
    return mean.to(parts["dtype"]) if "dtype" in parts else mean


def _mean_loss(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The loss of `torch.nn` that a call computes; None if it is not a mean with a known divisor."""
    cls = _FUNCTIONAL_CRITERIA.get(func)
    if cls is None or len(args) != 2:
        return None
    try:
        loss = cls(**{name: value for name, value in options.items() if value is not None})
    except TypeError:  # an option that the class does not have
        return None
    return loss if loss.reduction in ("mean", "batchmean") else None
