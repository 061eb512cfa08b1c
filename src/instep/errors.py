"""The exceptions that instep raises itself; exceptions of the user's module keep their type."""

from __future__ import annotations

from typing import Any


class InstepError(Exception):
    """Base class of the exceptions that instep raises."""


class StructureError(InstepError, ValueError):
    """An argument cannot be split unambiguously, or `forward` changes one that all replicas share."""

    problem: Any = None
    """A `SplitProblem`, where entries of `in_dims` that may solve it can be tried (`instep.probe.readings`)."""


class MergeError(InstepError, ValueError):
    """The replicas' outputs cannot be merged unambiguously. The message names the leaves and what to write."""

    problems: tuple[Any, ...] = ()
    """One `Problem` for each leaf, where the rules that merge it can be tried (`instep.probe.lines`)."""
    footer: tuple[str, ...] = ()
    """Sentences at the end of the message."""


class StateError(InstepError, RuntimeError):
    """`forward` changes state that cannot be merged: without a rule, or in a trainable parameter."""

    problems: tuple[Any, ...] = ()
    """One `Problem` for each attribute without a rule."""
    footer: tuple[str, ...] = ()
    """Sentences at the end of the message."""


class BridgeError(InstepError, RuntimeError):
    """A gradient cannot pass between the caller's graph and the replicas' graphs."""


class CollectiveError(InstepError, RuntimeError):
    """A collective cannot run: replicas make different calls, one does not arrive, or the argument is unsupported."""


class EngineError(InstepError, RuntimeError):
    """An engine cannot run, or does not support what was requested."""


class CannotCross(EngineError):
    """An object cannot be sent to, or rebuilt in, another process. The message says where it is and what to do."""


class RemoteGradientError(CannotCross, BridgeError):
    """The gradient of an output cannot be sent to the process that computed the output."""


class RemoteArgumentError(CannotCross, StructureError):
    """`forward` changed an argument in place in another process, where it is a copy; the message names the argument."""


class WorkerFailure(EngineError):
    """A worker process died and its part of a step cannot be run again. The message gives the cause."""


class LostExchange(WorkerFailure):
    """Replicas may have used incomplete data, for example of a worker that died: all of them run the call again."""


class RankFailure(EngineError):
    """The ranks of a job are not in step: they make different calls, or one has ended. The message names them."""


class WrapError(InstepError, TypeError):
    """A module cannot be wrapped with these arguments."""
