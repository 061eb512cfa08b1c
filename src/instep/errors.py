"""The exceptions that instep raises itself; exceptions of the user's module keep their type."""

from __future__ import annotations


class InstepError(Exception):
    """The parent of every error that instep raises by itself."""


class StructureError(InstepError, ValueError):
    """An input cannot be split without guessing; the message names the leaf and the line to write."""


class MergeError(InstepError, ValueError):
    """The replicas' outputs cannot be joined without guessing; the message names the leaf and the line to write."""


class StateError(InstepError, RuntimeError):
    """`forward` changed the module differently on the replicas and no rule says what that means for the whole."""


class BridgeError(InstepError, RuntimeError):
    """A gradient was asked for that cannot pass between the caller's graph and the replicas' graphs."""


class CollectiveError(InstepError, RuntimeError):
    """Replicas did not come to the same cross-replica operation; the message names both sides."""


class EngineError(InstepError, RuntimeError):
    """An engine cannot run, or was asked to do what it cannot do."""


class CannotCross(EngineError):
    """Something cannot be sent to, or rebuilt in, another process; the message says where it is and what to do."""


class RemoteGradientError(CannotCross, BridgeError):
    """An output needs a gradient that does not come back from another process; the message names its place."""


class RemoteArgumentError(CannotCross, StructureError):
    """`forward` changed an argument in place in another process, where it is a copy; the message names the argument."""


class WorkerFailure(EngineError):
    """A worker process died and its part of a step cannot be run again; the message says what ended it."""


class WrapError(InstepError, TypeError):
    """A module cannot be wrapped the way it was asked for."""
