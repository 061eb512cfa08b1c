"""What a forward on the replicas has shown about a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from instep.call.one_device import Reason


class ForwardVerdict(NamedTuple):
    """What a forward on the replicas has shown about the call."""

    retry: bool = False
    """Run the replicas again: they may have used incomplete data (see `LostExchange`), or only some ranks ran a
    prepared call."""
    changed_containers: tuple[str, ...] = ()
    """Paths of containers that replicas share, and that forward changed: run them again, each with its own copy."""
    serialize: bool = False
    """They drew from one generator at the same time: run them again, one after another."""
    compare_weights: bool = False
    """The rules that the probe has left for a mean give the shards different weights: probe and run them again."""
    infer_loss: bool = False
    """The criterion returned no mean of torch: infer how its results merge, and run the replicas again."""
    one_device: Reason | None = None
    failed: bool = False
    """It raised an error, which the caller gets unless another rank says how to run the replicas again."""

    @property
    def runs_again(self) -> bool:
        """Whether the call runs again, in some way."""
        return self._replace(failed=False) != ACCEPTED

    @classmethod
    def combine(cls, verdicts: Sequence[ForwardVerdict]) -> ForwardVerdict:
        """The verdict of processes that have to go on in the same way, in an order that is the same for all."""
        return cls(
            any(verdict.retry for verdict in verdicts),
            tuple(dict.fromkeys(path for verdict in verdicts for path in verdict.changed_containers)),
            any(verdict.serialize for verdict in verdicts),
            any(verdict.compare_weights for verdict in verdicts),
            any(verdict.infer_loss for verdict in verdicts),
            next((verdict.one_device for verdict in verdicts if verdict.one_device), None),
            any(verdict.failed for verdict in verdicts),
        )


ACCEPTED = ForwardVerdict()
