"""Tests of driver calls, with a driver that records them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from instep.engines.processes.transport import cuda_driver
from instep.engines.processes.transport.cuda_driver import operation_array, queue_operations, write_operation

DEVICE, INVALID_CONTEXT = torch.device("cuda", 1), 201


@pytest.mark.parametrize(
    ("stream", "current_device", "has_context", "expected"),
    [
        (0, 1, True, ["queue 0"]),
        (0, 0, True, ["enter 1", "queue 0", "leave"]),  # 0 would be the default stream of the current device
        (77, 0, True, ["queue 77"]),
        (77, 0, False, ["queue 77", "enter 1", "queue 77", "leave"]),
    ],
)
def test_operations_are_queued_on_the_stream_of_their_device(
    stream: int, current_device: int, has_context: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def queue(handle: int, *_: object) -> int:
        calls.append(f"queue {handle}")
        return 0 if has_context or "enter 1" in calls else INVALID_CONTEXT

    @contextmanager
    def enter(ordinal: int) -> Iterator[None]:
        calls.append(f"enter {ordinal}")
        yield
        calls.append("leave")

    monkeypatch.setattr(cuda_driver, "_driver", lambda: SimpleNamespace(cuStreamBatchMemOp_v2=queue))
    monkeypatch.setattr(cuda_driver, "_current_context", enter)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current_device, raising=False)
    queue_operations(DEVICE, stream, operation_array(write_operation(0, 1)))
    assert calls == expected
