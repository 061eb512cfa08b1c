"""`with_loss`: a module that returns the loss, which replicas compute on their shards.

The mean over a batch is not the mean of the shards' means if shards count unequally. Each replica therefore returns the
sum of its losses and the divisor of the mean; both are summed over the replicas, and the quotient is the exact loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.call.transparent import Transparent
from instep.errors import MergeError, WrapError
from instep.runtime.probe_flag import is_probing
from instep.structure.merge_messages import loss_not_additive, wrong_divisor

Criterion = Callable[..., Any]
Target = int | str | Callable[..., Any]


def with_loss(
    module: nn.Module,
    criterion: Criterion,
    *,
    target: Target = -1,
    weight: Callable[[Any, Any], Any] | None = None,
) -> WithLoss:
    """Combine a module and a criterion into one module that takes the target too and returns the loss.

    Wrapped by `DataParallel`, the replicas compute the loss: outputs stay on their devices, and the call returns the
    exact loss of the whole batch, for shards of any sizes. Parameters and `state_dict` are those of `module`.

    >>> net = nn.Linear(4, 3)
    >>> model = with_loss(net, nn.CrossEntropyLoss(ignore_index=-100))
    >>> model(torch.randn(5, 4), torch.tensor([0, 1, 2, -100, 0])).shape
    torch.Size([])
    >>> list(model.state_dict())
    ['weight', 'bias']

    Args:
        module: The module that computes the output.
        criterion: Called as `criterion(output, target)`: a loss of `torch.nn` or `torch.nn.functional` (also with
            `functools.partial`), or any function.
        target: Where the target is among the arguments of a call: a position (default: the last) or the name of a
            keyword argument. The module receives the other arguments. Or a function of all arguments that returns the
            target, such as `lambda batch: batch["labels"]`; the module then receives all arguments.
        weight: The divisor of the criterion's mean, as a function of output and target, for a criterion that is not a
            loss of torch and whose mean is not over samples: `lambda output, target: (target != 0).sum()`.
    """
    if not all((isinstance(module, nn.Module), callable(criterion))):
        raise WrapError("with_loss takes a module and a criterion: instep.with_loss(net, nn.CrossEntropyLoss()).")
    if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
        raise WrapError(
            f"{type(criterion).__name__} has trainable parameters, which module.parameters() would not return.\n"
            f"Make the criterion a submodule of the module, and pass with_loss a function of the module's output."
        )
    return WithLoss(module, Loss(criterion, target, weight))


@dataclass
class Loss:
    """A criterion, the position of its target, and the divisor of its mean."""

    criterion: Criterion
    target: Target
    weight: Callable[[Any, Any], Any] | None

    @property
    def is_sum(self) -> bool:
        """Whether replicas return a sum and a divisor."""
        loss = _torch_loss(self.criterion)
        return self.weight is not None or (loss is not None and loss.reduction != "none")

    def target_names(self) -> list[str]:
        """The name of the target among the arguments of a call, if it has one."""
        if isinstance(self.target, int):
            return [TARGET_NAME]
        return [self.target] if isinstance(self.target, str) else []

    def shard_parts(self, output: Any, target: Any) -> Any:
        """What a replica returns: the sum of its losses and the divisor, or what the criterion returns.

        During a probe also what the criterion returns, for `check`.
        """
        parts = self._shard_parts(output, target)
        return {**parts, CRITERION_RESULT: self.criterion(output, target)} if self.is_sum and is_probing() else parts

    def _shard_parts(self, output: Any, target: Any) -> Any:
        loss = _torch_loss(self.criterion)
        if self.weight is not None:
            return _weighted_parts(self.criterion(output, target), self.weight(output, target))
        if loss is None or loss.reduction == "none":
            return self.criterion(output, target)
        sum_loss = copy.copy(loss)
        is_float = target.is_floating_point()
        dtype = torch.promote_types(output.dtype, target.dtype) if is_float else output.dtype
        # The mean of a batch fits into a half-precision number, but its sum may overflow: it is computed in float32.
        autocast = torch.is_autocast_enabled(output.device.type)
        in_float32 = dtype in _HALF_DTYPES and loss.reduction != "sum" and not autocast
        if in_float32:
            sum_loss._buffers = {name: _half_to_float(value) for name, value in loss._buffers.items()}
        divisor = 1 if loss.reduction == "sum" else _divisor(sum_loss, output, target)
        sum_loss.reduction = "sum"
        if not in_float32:
            return {"sum": sum_loss(output, target), "divisor": divisor}
        total = sum_loss(output.float(), target.float() if is_float else target)
        return {"sum": total, "divisor": divisor, "dtype": dtype}

    def finish(self, merged: Any) -> Any:
        """The loss of the whole batch, from the summed parts."""
        if not self.is_sum:
            return merged
        torch_loss = _torch_loss(self.criterion)
        if self.weight is None and torch_loss is not None and torch_loss.reduction == "sum":
            return merged["sum"]
        loss = merged["sum"] / merged["divisor"]
        return loss.to(merged["dtype"]) if "dtype" in merged else loss

    def check(self, runs: Sequence[Any], compare_runs: bool, tolerance: float) -> MergeError | None:
        """The error, if any, that a trial shows. `runs` are the results of `shard_parts` for two parts and the whole.

        In every run, the sum over the divisor must equal what the criterion returns. If results of different runs are
        comparable (`compare_runs`), the two parts must add up to the whole.

        Removes the criterion's results from `runs`.
        """
        expected = [run.pop(CRITERION_RESULT) for run in runs]
        for run, result in zip(runs, expected, strict=True):
            if not self._matches(run, result, tolerance):
                name = type(_torch_loss(self.criterion)).__name__
                return wrong_divisor(name, run["divisor"], self.finish(run), result)
        first, second, _ = runs
        both = {**first, **{name: first[name] + second[name] for name in ("sum", "divisor")}}
        return loss_not_additive() if compare_runs and not self._matches(both, expected[2], tolerance) else None

    def _matches(self, parts: Any, expected: Any, tolerance: float) -> bool:
        if not float(parts["divisor"]) or not bool(torch.isfinite(torch.as_tensor(expected)).all()):
            return True  # cannot be compared
        loss, expected = [torch.as_tensor(value).double() for value in (self.finish(parts), expected)]
        if loss.shape != expected.shape:
            return False
        limit = tolerance * expected.abs().clamp(min=1e-2)  # relative, but not to values near zero
        return bool(((loss - expected).abs() <= limit).all())

    def split_target(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Separate the module's arguments from the target."""
        if callable(self.target):
            return args, kwargs, self.target(*args, **kwargs)
        if isinstance(self.target, str):
            if self.target not in kwargs:
                raise TypeError(
                    f"with_loss(..., target={self.target!r}): the call has no keyword argument {self.target!r}.\n"
                    f"Write model(x, {self.target}=...)."
                )
            return args, {name: value for name, value in kwargs.items() if name != self.target}, kwargs[self.target]
        if not -len(args) <= self.target < len(args):
            raise TypeError(
                f"with_loss takes the target from position {self.target}, but the call has {len(args)} positional "
                f"arguments.\nWrite model(x, target), or with_loss(..., target='name of the keyword')."
            )
        position = self.target % len(args)
        return (*args[:position], *args[position + 1 :]), kwargs, args[position]


class WithLoss(Transparent):
    """A module with its criterion. It has the module's attributes and returns the loss; see `with_loss`."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__(module)
        self._instep_loss = loss

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if isinstance(self._instep_loss.criterion, nn.Module):
            self._instep_loss.criterion._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._instep_loss.criterion, nn.Module):
            self._instep_loss.criterion.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, target = self._instep_loss.split_target(args, kwargs)
        return self._instep_loss.criterion(self.module(*args, **kwargs), target)

    def _instep_parts(self, *args: Any, **kwargs: Any) -> Any:
        """What replicas run instead of `forward`."""
        args, kwargs, target = self._instep_loss.split_target(args, kwargs)
        return self._instep_loss.shard_parts(self.module(*args, **kwargs), target)

    def __repr__(self) -> str:
        return f"with_loss({self.module!r}, {self._instep_loss.criterion!r})"


def _weighted_parts(loss: Any, weight: Any) -> dict[str, Any]:
    """A shard's mean as a sum. A shard with weight zero has no mean (it is NaN) and adds nothing."""
    return {"sum": loss * weight if float(weight) else loss.new_zeros(()), "divisor": weight}


def _half_to_float(value: Tensor | None) -> Tensor | None:
    return value.float() if value is not None and value.dtype in _HALF_DTYPES else value


CRITERION_RESULT = "criterion"
"""Key of the criterion's own result among the parts of a shard."""
TARGET_NAME = "target"
"""Name of a positional target, which the module does not receive."""
_HALF_DTYPES = (torch.float16, torch.bfloat16)
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


def _torch_loss(criterion: Any) -> Any:
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
    for cls in (*_BY_CLASS, *_BY_ELEMENT, *_BY_SAMPLE):
        if isinstance(criterion, cls) and type(criterion).forward is cls.forward:
            return criterion
    return None


@cache
def _default_criterion(loss: type[nn.Module]) -> nn.Module:
    """A loss with default arguments. It is shared: callers change copies only."""
    return loss()


def _divisor(criterion: Any, output: Tensor, target: Tensor) -> Any:
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
    counted = target != criterion.ignore_index
    if criterion.weight is None:
        return counted.sum()
    return (criterion.weight[target.where(counted, 0)] * counted).sum()
