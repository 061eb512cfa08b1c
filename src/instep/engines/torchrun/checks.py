"""Checks that ranks make the same calls with the same modules."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch.utils.data.distributed import DistributedSampler

from instep.errors import RankFailure


class CallDigests(NamedTuple):
    """Digests of what has to be equal on all ranks when they make a call."""

    batch: str
    """Of the arguments; empty if each rank passes its own batch."""
    module: str
    """Of the module's parameters and buffers."""


def check_digests(digests: Sequence[CallDigests]) -> None:
    """`RankFailure` if ranks make a call with different batches or modules."""
    different = _differing([digest.batch for digest in digests])
    if different:
        raise RankFailure(
            f"rank 0 and {describe_ranks(different)} were called with different batches.\n"
            f"Every rank has to pass the same whole batch: seed what chooses and changes samples alike on all ranks. "
            f"(The wrapper gives all ranks the random state of rank 0: create the data loader's iterator after it. "
            f"What one rank draws alone, such as in an evaluation of its own, moves the random states apart.)"
            f"{_sampler_advice()}"
        )
    different = _differing([digest.module for digest in digests])
    if different:
        raise RankFailure(
            f"rank 0 and {describe_ranks(different)} have different parameters or buffers.\n"
            f"Change the module in the same way on every rank: load a checkpoint on all of them, and step the "
            f"optimizer on all of them."
        )


def check_seeds(seeds: Sequence[tuple[int, ...]]) -> None:
    """`RankFailure` if the states of the ranks' random number generators differ."""
    different = _differing(seeds)
    if different:
        raise RankFailure(
            f"rank 0 and {describe_ranks(different)} have different random states.\n"
            f"Draw the same random numbers on every rank: what only one rank draws comes from a torch.Generator of its "
            f"own."
        )


def check_modules(modules: Sequence[tuple[str, list[tuple[Any, ...]]]]) -> None:
    """`RankFailure` if ranks wrap different modules, or use different releases."""
    versions, layout = modules[0]
    for rank, (other_versions, other_layout) in enumerate(modules):
        if other_versions != versions:
            raise RankFailure(
                f"rank 0 has {versions}, and rank {rank} has {other_versions}. Install the same releases."
            )
        if other_layout != layout:
            entry = next((a or b for a, b in zip_longest(layout, other_layout) if a != b), None)
            name = "" if entry is None else f": {entry[0]!r} is the first parameter or buffer that differs"
            raise RankFailure(
                f"rank 0 and rank {rank} wrap different modules{name}.\nBuild the same module on every rank."
            )


def _sampler_advice() -> str:
    """What to do about a `DistributedSampler`; empty if the script has none."""
    if not any(issubclass(type(value), DistributedSampler) for value in gc.get_objects()):
        return ""
    return (
        "\nThis script has a DistributedSampler, which gives every rank other samples: take it out, or write "
        "DataParallel(..., batches='local')."
    )


def _differing(values: Sequence[Any]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value != values[0]]


def out_of_step(operations: Sequence[str]) -> RankFailure:
    """The error of ranks that are in different operations. It names what each is about to do."""
    groups: dict[str, list[int]] = {}
    for rank, operation in enumerate(operations):
        groups.setdefault(operation, []).append(rank)
    lines = "".join(f"  {describe_ranks(ranks)}: {operation}\n" for operation, ranks in groups.items())
    return RankFailure(
        f"the ranks are out of step:\n{lines}"
        f"Every rank has to make the same calls with the same batches. If a step is meant for one rank only, such as "
        f"an evaluation, call the module itself there: model.module(...).{_sampler_advice()}"
    )


def describe_ranks(ranks: Sequence[int]) -> str:
    """The ranks in a message: `rank 3`, or `ranks 0 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
