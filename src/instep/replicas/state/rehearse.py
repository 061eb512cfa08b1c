"""Finding out how a call may read state that an earlier one left on the module: by computing it in several ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from instep.errors import StateError
from instep.replicas.replica import Replica
from instep.replicas.replica_set import ReplicaSet
from instep.replicas.state.carried import ONE_DEVICE, SPLIT, UNKNOWN, WHOLE, CarriedValue, tensors_by_path
from instep.runtime.locks import run_uninterrupted
from instep.runtime.rng import CallerRng
from instep.structure.tree import Path, flatten_one_level


def compare_runs(
    carried: list[CarriedValue],
    again: Callable[[list[CarriedValue]], Any],
    on_one: Callable[[], Any],
    alone: Callable[[], Any],
    crew: ReplicaSet,
    random: CallerRng,
) -> Any:
    """The module's own result; and whether replicas that have their part of carried state, or the whole of it, come
    to what one replica does with the whole batch. Dropout layers are quiet meanwhile; a module that draws random
    numbers otherwise cannot be compared with itself."""
    parts = [slot for slot in carried if slot.module is not None]
    ways: dict[str, Callable[[], Any]] = {ONE_DEVICE: on_one, SPLIT: partial(again, parts), WHOLE: partial(again, [])}
    results: dict[str, Any] = {}
    drew = False
    drawing = [m for m in crew.modules or [] if m.training and isinstance(m, (_DropoutNd, nn.RNNBase))]
    wake = partial(_set_training, drawing, True)
    try:
        _set_training(drawing, False)
        for way, attempt in ways.items():
            try:
                with torch.no_grad():
                    results[way] = attempt()
            except StateError:  # not for want of the right way
                raise
            except Exception as error:  # this way is not the one: the module itself says what is wrong, if anything is
                results[way] = error
            drew = drew or (way == ONE_DEVICE and random.is_shared_generator_used())
            crew.restore_containers()
            crew.discard()
            random.restore()
        run_uninterrupted(wake)
    except BaseException:
        run_uninterrupted(wake)
        raise
    shown = any(bool(tensor.any()) for slot in carried for tensor, _ in slot.leaves())  # zeros prove nothing
    output = alone()
    fitting = [way for way in (WHOLE, SPLIT) if not drew and results_agree(results[ONE_DEVICE], results[way])]
    for slot in carried:
        slot.comparisons += 1
        slot.unread_fingerprint = crew.fingerprint.current if len(fitting) > 1 else None
    if shown or not fitting:
        record_verdict(carried, fitting[0] if fitting else ONE_DEVICE, crew.fingerprint.current)
    elif any(slot.comparisons >= _MAX_INCONCLUSIVE for slot in carried):
        record_verdict(carried, ONE_DEVICE, crew.fingerprint.current)
    return output


_MAX_INCONCLUSIVE = 3


def _set_training(modules: Sequence[nn.Module], training: bool) -> None:
    """Turn dropout, also that of recurrent layers, on or off."""
    for module in modules:
        module.training = training


def record_verdict(slots: Sequence[CarriedValue], verdict: str, kind: int) -> None:
    """Note what a call that was computed in several ways has shown."""
    for slot in slots:
        if slot.verdict == UNKNOWN:
            slot.verdict = WHOLE if verdict == SPLIT and slot.module is None else verdict
            if slot.unread_fingerprint is None:
                slot.verdicts_by_fingerprint[kind] = slot.verdict
    if verdict == ONE_DEVICE:
        names = ", ".join(repr(slot.path) for slot in slots)
        warnings.warn(
            f"forward may read {names}, which an earlier call left there, one row a sample; whether each sample reads "
            f"its own row cannot be told. Such calls run on one device.\n"
            f"If each does, keep it as an attribute of a module, not in a dictionary, and write:  "
            f"state={{{slots[0].path!r}: 'cat'}}",
            stacklevel=7,
        )


def carried_after_call(slots: Sequence[CarriedValue], replicas: Sequence[Replica]) -> list[Any]:
    """What a call has left in carried state, that of all replicas joined."""
    found = []
    for slot in slots:
        if slot.module is None:
            continue
        index = next(i for i, module in enumerate(replicas[0].source_modules) if module is slot.module)
        held = []
        for replica in replicas:
            module = replica.modules[index]
            held.append(module._buffers[slot.name] if slot.name in module._buffers else module.__dict__.get(slot.name))
        rows = zip(*[list(tensors_by_path(value)) for value in held], strict=False)
        found.append([_concatenate([tensor for _, tensor in row], slot.dims.get(row[0][0])) for row in rows])
    return found


def _concatenate(tensors: Sequence[Tensor], dim: int | None) -> Tensor:
    first = tensors[0].detach()
    if dim is None or len(tensors) == 1 or first.ndim <= dim:
        return first
    return torch.cat([tensor.detach().to(first.device) for tensor in tensors], dim)


def results_agree(left: Any, right: Any) -> bool:
    """Whether two ways came to the same numbers up to rounding; no numbers at all prove nothing."""
    if isinstance(left, Exception) or isinstance(right, Exception):
        return False
    ones, others = list(_iter_numbers(left)), list(_iter_numbers(right))
    return (
        bool(ones)
        and [path for path, _ in ones] == [path for path, _ in others]
        and all(
            one.shape == other.shape and _allclose(one, other)
            for (_, one), (_, other) in zip(ones, others, strict=True)
        )
    )


def _iter_numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor and number of a structure, with the keys that lead to it."""
    if isinstance(value, (int, float, complex)):
        yield path, torch.as_tensor(value)
    elif isinstance(value, Tensor):
        yield path, value
    elif (node := flatten_one_level(value)) is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _iter_numbers(child, (*path, key))


_TOLERANCE = {torch.float64: 1e-8, torch.float32: 3e-4}


def _allclose(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach().to(one.device)
    if not (one.is_floating_point() or one.is_complex()) or one.dtype != other.dtype:
        return torch.equal(one, other)
    if not one.numel():
        return True
    scale = float(torch.maximum(one.abs().max(), other.abs().max()))
    return torch.allclose(one, other, rtol=0, atol=scale * _TOLERANCE.get(one.dtype, 5e-2), equal_nan=True)
