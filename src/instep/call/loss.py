"""`with_loss`: computes the loss on the replicas, exactly."""

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
    """The module and its criterion as one module, which takes the target too and returns the loss.

    Wrapped by `DataParallel`, the loss is computed on the replicas: outputs stay there, and what comes back is the loss
    of the whole batch, exact for shards of any sizes. `state_dict` and parameters are those of `module`.

    >>> net = nn.Linear(4, 3)
    >>> model = with_loss(net, nn.CrossEntropyLoss(ignore_index=-100))
    >>> model(torch.randn(5, 4), torch.tensor([0, 1, 2, -100, 0])).shape
    torch.Size([])
    >>> list(model.state_dict())
    ['weight', 'bias']

    Args:
        module: whatever makes the output.
        criterion: called as `criterion(output, target)`: a loss of `torch.nn` or `torch.nn.functional` (also with
            `functools.partial`), or any function.
        target: where the target is among the arguments of a call: a position (the last), or the name of a keyword;
            the module gets the others. A function takes all arguments and returns the target; the module then gets
            all of them: `target=lambda batch: batch["labels"]`.
        weight: for a function that takes a mean over something else than samples, what it divides by:
            `weight=lambda output, target: (target != 0).sum()`. The losses of torch.nn are known.
    """
    if not all((isinstance(module, nn.Module), callable(criterion))):
        raise WrapError("with_loss takes a module and a criterion: instep.with_loss(net, nn.CrossEntropyLoss()).")
    if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
        raise WrapError(
            f"{type(criterion).__name__} has parameters of its own, which would be missing from the module's.\n"
            f"Make it a part of the module, and give with_loss a function of what that returns."
        )
    return WithLoss(module, Loss(criterion, target, weight))


@dataclass
class Loss:
    """A criterion, where its target is found, and what its mean divides by."""

    criterion: Criterion
    target: Target
    weight: Callable[[Any, Any], Any] | None

    @property
    def is_sum(self) -> bool:
        """Whether replicas give sums and divisors."""
        known = _module_form(self.criterion)
        return self.weight is not None or (known is not None and known.reduction != "none")

    def shard_parts(self, output: Any, target: Any) -> Any:
        """What a replica gives: the sum of its losses and what to divide it by, or just what the criterion says.

        In a trial also what the criterion itself says of these samples, for `check`.
        """
        given = self._shard_parts(output, target)
        return {**given, UNREDUCED: self.criterion(output, target)} if self.is_sum and is_probing() else given

    def _shard_parts(self, output: Any, target: Any) -> Any:
        known = _module_form(self.criterion)
        if self.weight is not None:
            return _weighted_parts(self.criterion(output, target), self.weight(output, target))
        if known is None or known.reduction == "none":
            return self.criterion(output, target)
        total = copy.copy(known)
        real = target.is_floating_point()
        dtype = torch.promote_types(output.dtype, target.dtype) if real else output.dtype
        short = dtype in _HALF_DTYPES and known.reduction != "sum" and not torch.is_autocast_enabled(output.device.type)
        if short:
            total._buffers = {name: _to_float64_or_32(value) for name, value in known._buffers.items()}
        divisor = 1 if known.reduction == "sum" else _divisor(total, output, target)
        total.reduction = "sum"
        if not short:
            return {"sum": total(output, target), "divisor": divisor}
        # The mean of a batch is a number like any other, but its sum may be more than a short number can be.
        loss = total(output.float(), target.float() if real else target)
        return {"sum": loss, "divisor": divisor, "dtype": dtype}

    def finish(self, merged: Any) -> Any:
        """The loss from what the replicas gave together."""
        if not self.is_sum:
            return merged
        known = _module_form(self.criterion)
        if self.weight is None and known is not None and known.reduction == "sum":
            return merged["sum"]
        loss = merged["sum"] / merged["divisor"]
        return loss.to(merged["dtype"]) if "dtype" in merged else loss

    def check(self, runs: Sequence[Any], together: bool, tolerance: float) -> MergeError | None:
        """What is wrong with two parts of a batch and the whole, each as `of_shard` gave it in a trial.

        A sum over its divisor has to be what the criterion says of the same samples, and so have, where numbers can be
        compared between runs (`together`), the parts for the whole. Takes out of the runs what only it needs.
        """
        said = [run.pop(UNREDUCED) for run in runs]
        for run, plain in zip(runs, said, strict=True):
            if not self._matches(run, plain, tolerance):
                return wrong_divisor(
                    type(_module_form(self.criterion)).__name__, run["divisor"], self.finish(run), plain
                )
        first, second, _ = runs
        both = {**first, **{name: first[name] + second[name] for name in ("sum", "divisor")}}
        return loss_not_additive() if together and not self._matches(both, said[2], tolerance) else None

    def _matches(self, merged: Any, plain: Any, tolerance: float) -> bool:
        if not float(merged["divisor"]) or not bool(torch.isfinite(torch.as_tensor(plain)).all()):
            return True  # nothing that counts, or nothing that can be compared
        loss, plain = [torch.as_tensor(value).double() for value in (self.finish(merged), plain)]
        if loss.shape != plain.shape:
            return False
        room = tolerance * plain.abs().clamp(min=1e-2)  # what rounding leaves of numbers of ordinary size
        return bool(((loss - plain).abs() <= room).all())

    def split_target(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments of the module, and the target."""
        if callable(self.target):
            return args, kwargs, self.target(*args, **kwargs)
        if isinstance(self.target, str):
            if self.target not in kwargs:
                raise TypeError(f"with_loss(..., target={self.target!r}): the call has no keyword {self.target!r}.")
            return args, {name: value for name, value in kwargs.items() if name != self.target}, kwargs[self.target]
        if not -len(args) <= self.target < len(args):
            raise TypeError(
                f"with_loss takes the target from position {self.target}, and the call has {len(args)} positional "
                f"arguments: model(x, target), or with_loss(..., target='name of the keyword')."
            )
        at = self.target % len(args)
        return (*args[:at], *args[at + 1 :]), kwargs, args[at]


class WithLoss(Transparent):
    """What `with_loss` makes. It looks like the module; called, it returns the loss."""

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
        """What replicas run in place of `forward`."""
        args, kwargs, target = self._instep_loss.split_target(args, kwargs)
        return self._instep_loss.shard_parts(self.module(*args, **kwargs), target)

    def __repr__(self) -> str:
        return f"with_loss({self.module!r}, {self._instep_loss.criterion!r})"


def _weighted_parts(loss: Any, weight: Any) -> dict[str, Any]:
    """A mean as a sum; a shard on which nothing counts has no mean, and no part in the whole's."""
    return {"sum": loss * weight if float(weight) else loss.new_zeros(()), "divisor": weight}


def _to_float64_or_32(value: Tensor | None) -> Tensor | None:
    return value.float() if value is not None and value.dtype in _HALF_DTYPES else value


UNREDUCED = "plain"
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


def _module_form(criterion: Any) -> Any:
    """The criterion as a loss of torch.nn whose mean is understood; None for any other function."""
    if isinstance(criterion, partial) and not criterion.args and criterion.func in _FUNCTIONAL_CRITERIA:
        try:
            return _FUNCTIONAL_CRITERIA[criterion.func](**criterion.keywords)
        except TypeError:
            return None
    if not isinstance(criterion, nn.Module):
        made = _FUNCTIONAL_CRITERIA.get(criterion) if getattr(criterion, "__hash__", None) else None
        return _default_criterion(made) if made is not None else None
    if criterion._forward_hooks or criterion._forward_pre_hooks:
        return None
    for cls in (*_BY_CLASS, *_BY_ELEMENT, *_BY_SAMPLE):
        if isinstance(criterion, cls) and type(criterion).forward is cls.forward:
            return criterion
    return None


@cache
def _default_criterion(loss: type[nn.Module]) -> nn.Module:
    """A loss without arguments, made once: it is asked for several times a call, and only copies of it are changed."""
    return loss()


def _divisor(criterion: Any, output: Tensor, target: Tensor) -> Any:
    """What the mean over a batch divides by."""
    if isinstance(criterion, nn.MultiLabelSoftMarginLoss):  # a mean over classes, then one over all the rest
        shapes = [value.shape for value in (output, target, criterion.weight) if value is not None]
        whole = torch.broadcast_shapes(*shapes)
        return whole.numel() // max(1, whole[output.ndim - 1])
    if isinstance(criterion, _BY_SAMPLE):
        return len(output) if output.ndim > 1 else 1
    if isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean":
        return len(output)
    if isinstance(criterion, _BY_ELEMENT):
        return torch.broadcast_shapes(output.shape, target.shape).numel()
    if target.is_floating_point():  # probabilities of the classes
        return output.numel() // output.shape[1 if output.ndim > 1 else 0]
    counted = target != criterion.ignore_index
    if criterion.weight is None:
        return counted.sum()
    return (criterion.weight[target.where(counted, 0)] * counted).sum()
