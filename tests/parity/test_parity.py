"""Training with replicas gives the outputs, the losses, the gradients and the weights of the plain module.

Everything is in float64, where a sum over samples that is taken shard by shard differs from the plain one in the last
bits: about 1e-16 of a gradient of order one. Five steps of SGD keep that below 1e-12. AdamW divides a gradient by its
own size and at least 1e-8, so that where the true gradient is zero (a key's bias in attention) noise of 1e-17 moves a
weight by 1e-9 times the learning rate: 1e-10 is above that, and far below what any lost or doubled sample would do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import cycle
from typing import Any

import pytest
import torch

import instep

from .cases import BY_NAME, CASES, Case, History, train
from .compare import assert_same

STEPS = 5
ENGINES = ["serial", "threads", "processes"]
MEMORY = {"aliased": False, "private": True}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "sgd-foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw-plain": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "sparse-adam": partial(torch.optim.SparseAdam, lr=0.01),
}
TOLERANCE = {name: 1e-12 if name.startswith("sgd") else 1e-10 for name in OPTIMIZERS}

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_memory = pytest.mark.parametrize("private", MEMORY.values(), ids=MEMORY.keys())
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@cache
def train_plain(name: str, sizes: Sequence[int], optimizer: str) -> History:
    """Train the plain module."""
    case = BY_NAME[name]
    return train(case, case.modules(), sizes, OPTIMIZERS[optimizer])


def train_replicated(case: Case, sizes: Sequence[int], optimizer: str, replicas: int, **options: Any) -> History:
    with ExitStack() as stack:
        wrapped = [
            stack.enter_context(instep.DataParallel(module, ["cpu"] * replicas, **case.options, **options))
            for module in case.modules()
        ]
        return train(case, wrapped, sizes, OPTIMIZERS[optimizer])


def check(case: Case, sizes: Sequence[int], optimizer: str, replicas: int, **options: Any) -> None:
    plain = train_plain(case.name, tuple(sizes), optimizer)
    history = train_replicated(case, sizes, optimizer, replicas, **options)
    tolerance = TOLERANCE[optimizer]
    assert_same(history.outputs[0], plain.outputs[0], tolerance, "first output")
    assert_same(history.gradients, plain.gradients, tolerance, "first gradient")
    assert_same(history.losses, plain.losses, tolerance, "loss")
    assert_same(history.outputs, plain.outputs, tolerance, "output")
    assert_same(history.weights, plain.weights, tolerance, "weights")


GRID = [
    pytest.param(engine, private, replicas, batch, id=f"{engine}-{memory}-x{replicas}-batch{batch}")
    for engine in ENGINES
    for memory, private in MEMORY.items()
    for replicas in (1, 2, 3, 4)
    for batch in (1, 2, 3, 7, 16)
    # Splitting and merging run in this process, as with threads: fewer shapes are enough.
    if engine != "processes" or (replicas, batch) in ((2, 7), (3, 2), (4, 16))
]


def with_optimizers(points: Sequence[Any], optimizers: Sequence[str], quick: Collection[str]) -> Any:
    """Parametrize with the points of a grid; each point gets one of the optimizers in turn.

    Points are marked slow unless a pattern of `quick` matches their id.
    """

    return pytest.mark.parametrize(
        ("engine", "private", "replicas", "batch", "optimizer"),
        [
            pytest.param(
                *point.values,
                optimizer,
                id=f"{point.id}-{optimizer}",
                marks=() if any(fnmatchcase(point.id, pattern) for pattern in quick) else pytest.mark.slow,
            )
            for point, optimizer in zip(points, cycle(optimizers), strict=False)
        ],
    )


@with_optimizers(
    GRID,
    ["sgd", "sgd-foreach", "sgd-fused"],
    quick=[
        *("serial-*-x2-batch7", "threads-*-x2-batch7", "processes-aliased-x2-batch7"),
        *("*-aliased-x1-batch3", "*-aliased-x3-batch2", "serial-aliased-x4-batch16", "threads-aliased-x4-batch16"),
    ],
)
@each_case
def test_five_steps_of_sgd(case: Case, engine: str, private: bool, replicas: int, batch: int, optimizer: str) -> None:
    name = "sgd" if case.sparse else optimizer  # fused SGD does not support sparse gradients
    check(case, [batch] * STEPS, name, replicas, engine=engine, private_copies=private)


@with_optimizers(
    [point for point in GRID if point.values[0] != "processes" or point.values[2] != 4],
    ["adamw-plain", "adamw-foreach", "adamw-fused"],
    quick=["serial-aliased-x2-batch7", "threads-aliased-x2-batch7", "threads-aliased-x3-batch16"],
)
@pytest.mark.parametrize("name", [case.name for case in CASES if not case.sparse])
def test_five_steps_of_adamw(name: str, engine: str, private: bool, replicas: int, batch: int, optimizer: str) -> None:
    check(BY_NAME[name], [batch] * STEPS, optimizer, replicas, engine=engine, private_copies=private)


@pytest.mark.parametrize("replicas", [2, 3], ids=lambda n: f"x{n}")
@each_memory
@each_engine
def test_five_steps_of_sparse_adam(engine: str, private: bool, replicas: int) -> None:
    check(BY_NAME["sparse-embedding"], [7] * STEPS, "sparse-adam", replicas, engine=engine, private_copies=private)


@pytest.mark.parametrize(
    "private", [pytest.param(False, id="aliased"), pytest.param(True, id="private", marks=pytest.mark.slow)]
)
@each_engine
@each_case
def test_batches_of_changing_size(case: Case, engine: str, private: bool) -> None:
    check(case, [7, 3, 16, 1, 2, 5], "sgd", 3, engine=engine, private_copies=private)
