"""The random streams of prepared forwards and their backwards, in a worker."""

from __future__ import annotations

from typing import Any

import torch

from instep.engines.processes.messages import PreparedForwardRequest
from instep.engines.processes.worker.prepared import PreparedRng, RetainedCall
from instep.runtime.rng import ReplicaRng

NOTHING: Any = None


def begin(rng: PreparedRng, seed: int) -> ReplicaRng:
    return rng.begin_forward(PreparedForwardRequest(1, [], seed, seed, ([], []), None, None))


def retained(streams: ReplicaRng) -> RetainedCall:
    """A forward that keeps its streams."""
    return RetainedCall(NOTHING, NOTHING, [], {}, [], [], streams, 1)


def test_streams_serve_calls_with_the_same_seeds_until_something_is_drawn() -> None:
    rng = PreparedRng(1, 2, torch.device("cpu"))
    first = begin(rng, 5)
    assert begin(rng, 5) is first
    assert begin(rng, 6) is not first
    second = begin(rng, 6)
    with second.forward_context(1):
        torch.rand(1)
    assert not second.is_untouched
    assert begin(rng, 6) is not second


def test_a_backward_uses_its_own_seed_until_something_is_drawn_on_the_cpu() -> None:
    """Also if forward has drawn on a device, so that its streams are kept."""
    call = retained(begin(PreparedRng(1, 2, torch.device("cpu")), 5))
    streams = call.streams(7)
    with streams.backward_context(1):
        drawn = torch.rand(3)
    streams.report_use()
    assert call.streams(8) is streams
    assert streams.caller.cpu.base_seed == 7
    other = retained(begin(PreparedRng(1, 2, torch.device("cpu")), 7)).streams(7)
    with other.backward_context(1):
        assert torch.equal(torch.rand(3), drawn)
