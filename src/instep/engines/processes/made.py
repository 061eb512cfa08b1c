"""What a forward in a worker has made, as far as gradients are concerned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from instep.bridge import leaves_below
from instep.engines.processes.freight import CannotCross
from instep.engines.processes.orders import Ran
from instep.replicas.replica import Outcome
from instep.structure.tree import tensors_in


def outputs_of(ran: Ran, outcome: Outcome) -> list[Tensor]:
    """Where a backward may begin."""
    tokens = [] if outcome.seat is None else outcome.seat.tokens
    return [*tensors_in([ran.output, ran.sets, ran.contents, ran.made]), *tokens]


def used_by(ran: Ran, leaves: Mapping[int, Tensor], outcome: Outcome) -> list[int]:
    """The arguments, by their numbers, that what comes back was made from."""
    used = leaves_below(outputs_of(ran, outcome))
    return [number for number, leaf in leaves.items() if id(leaf) in used]


def refuse_graphs(ran: Ran) -> None:
    """What is put into an argument goes back by value: a gradient would not find the way."""
    new = [item for _, _, items in ran.given for _, item in items]
    if any(tensor.requires_grad for tensor in tensors_in(new)):
        raise CannotCross(
            "forward puts a tensor that needs a gradient into an argument, in a worker process, from where its graph "
            "does not come back.\nReturn it from forward, put in tensor.detach(), or write engine='threads'."
        )
