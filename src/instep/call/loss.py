"""`with_loss`: a module that returns the loss, which replicas compute on their shards.

The mean over a batch is not the mean of the shards' means if shards count unequally. Each replica therefore returns the
sum of its losses and the divisor of the mean; both are summed over the replicas, and the quotient is the exact loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from instep.call.torch_losses import MeanRecorder, divisor_of, quotient, torch_loss
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
    return WithLoss(module, Loss(criterion, target, weight, LossTrials()))


class NoTorchMean(Exception):
    """A criterion did not return the mean of a loss of torch, which it was seen to return."""


class LossTrials:
    """What trials have shown about a criterion. Copies of the module share this object.

    Trials restore all that a module refers to, so the result is kept elsewhere.
    """

    @property
    def returned_mean(self) -> bool:
        """Whether it always returned the mean of a loss of torch, such as that of `F.cross_entropy`."""
        return _returned_mean.get(self, False)

    def add(self, *, returned_mean: bool) -> None:
        _returned_mean[self] = returned_mean and _returned_mean.get(self, True)

    def __deepcopy__(self, memo: dict[int, Any]) -> LossTrials:
        return self


_returned_mean: WeakKeyDictionary[LossTrials, bool] = WeakKeyDictionary()


class Loss(NamedTuple):
    """A criterion, the position of its target, and the divisor of its mean.

    Immutable, so that calls need not look whether `forward` has changed it.
    """

    criterion: Criterion
    target: Target
    weight: Callable[[Any, Any], Any] | None
    trials: LossTrials

    @property
    def is_sum(self) -> bool:
        """Whether `shard_parts` returns a sum and a divisor."""
        loss = torch_loss(self.criterion)
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
        loss = torch_loss(self.criterion)
        if self.weight is not None:
            parts = _weighted_parts(self.criterion(output, target), self.weight(output, target))
        elif loss is None and is_probing():
            result, mean = self._call_criterion(output, target, None)
            self.trials.add(returned_mean=mean is not None)
            return result
        elif loss is None or loss.reduction == "none":
            return self.criterion(output, target)
        else:
            parts = _with_number(self._sums(loss, output, target))
        return {**parts, CRITERION_RESULT: self.criterion(output, target)} if is_probing() else parts

    def mean_parts(self, output: Any, target: Any) -> Any:
        """The sum and the divisor of the mean that the criterion returns, which is not a loss of torch itself."""
        _, parts = self._call_criterion(output, target, self._sums)
        if parts is None:
            raise NoTorchMean("the criterion did not return the mean of a loss of torch, as in the calls before.")
        parts = _with_number(parts)
        return {**parts, CRITERION_RESULT: self.criterion(output, target)} if is_probing() else parts

    def _call_criterion(
        self, output: Any, target: Any, sums: Callable[..., dict[str, Any]] | None
    ) -> tuple[Any, dict[str, Any] | None]:
        """What the criterion returns; and, if that is the mean of a loss of torch, what `sums` returns for it."""
        if torch.compiler.is_compiling() or hasattr(self.criterion, "_torchdynamo_orig_callable"):
            return self.criterion(output, target), None
        with MeanRecorder(sums) as recorder:
            result = self.criterion(output, target)
        return result, recorder.parts(result)

    def _sums(self, loss: Any, output: Tensor, target: Tensor) -> dict[str, Any]:
        """The sum and the divisor of a loss of torch."""
        sum_loss = object.__new__(type(loss))  # copy.copy takes longer than the loss
        sum_loss.__dict__.update(loss.__dict__)
        is_float = target.is_floating_point()
        dtype = torch.promote_types(output.dtype, target.dtype) if is_float else output.dtype
        # The mean of a batch fits into a half-precision number, but its sum may overflow: it is computed in float32.
        is_half_mean = dtype in _HALF_DTYPES and loss.reduction != "sum"
        in_float32 = is_half_mean and not torch.is_autocast_enabled(output.device.type)
        if in_float32:
            sum_loss._buffers = {name: _half_to_float(value) for name, value in loss._buffers.items()}
        divisor = 1 if loss.reduction == "sum" else divisor_of(sum_loss, output, target)
        sum_loss.__dict__["reduction"] = "sum"
        if not in_float32:
            return {"sum": sum_loss(output, target), "divisor": divisor}
        total = sum_loss(output.float(), target.float() if is_float else target)
        return {"sum": total, "divisor": divisor, "dtype": dtype}

    def finish(self, merged: Any) -> Any:
        """The loss of the whole batch, from the summed parts."""
        loss = torch_loss(self.criterion)
        if self.weight is None and loss is not None and loss.reduction == "sum":
            return merged["sum"]
        return quotient(merged)

    def check(self, runs: Sequence[Any], compare_runs: bool, tolerance: float) -> MergeError | None:
        """The error, if any, that a trial shows. `runs` are the results of `shard_parts` for two parts and the whole.

        In every run, the sum over the divisor must equal what the criterion returns. If results of different runs are
        comparable (`compare_runs`), the two parts must add up to the whole.

        Removes the criterion's results from `runs`.
        """
        expected = [run.pop(CRITERION_RESULT) for run in runs]
        for run, result in zip(runs, expected, strict=True):
            if not self._matches(run, result, tolerance):
                loss = torch_loss(self.criterion)
                name = getattr(self.criterion, "__name__", "") if loss is None else type(loss).__name__
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

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module with `torch.compile`. The criterion is called as it is."""
        self.module.compile(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, target = self._instep_loss.split_target(args, kwargs)
        return self._instep_loss.criterion(self.module(*args, **kwargs), target)

    def _instep_parts(self, *args: Any, **kwargs: Any) -> Any:
        """What replicas run instead of `forward`."""
        args, kwargs, target = self._instep_loss.split_target(args, kwargs)
        return self._instep_loss.shard_parts(self.module(*args, **kwargs), target)

    def _instep_mean_parts(self, *args: Any, **kwargs: Any) -> Any:
        """What replicas run instead of `forward`, if the criterion returns the mean of a loss of torch."""
        args, kwargs, target = self._instep_loss.split_target(args, kwargs)
        return self._instep_loss.mean_parts(self.module(*args, **kwargs), target)

    def __repr__(self) -> str:
        return f"with_loss({self.module!r}, {self._instep_loss.criterion!r})"


def _with_number(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a loss. A count on the CPU becomes a number, which is faster to send and to add."""
    count = parts["divisor"]
    if isinstance(count, Tensor) and count.is_cpu and not count.is_floating_point():
        return parts if torch.compiler.is_compiling() else {**parts, "divisor": int(count)}
    return parts


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
