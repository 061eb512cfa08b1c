"""What a call restores if it fails or runs again."""

from __future__ import annotations

from collections.abc import Callable

from instep.engines.base import Engine
from instep.replicas.replica_set import ReplicaSet
from instep.runtime.ambient import AmbientState
from instep.runtime.locks import run_uninterrupted
from instep.runtime.rng import CallerRng


class Transaction:
    """Context manager around a call on the replicas. Undoes a call that fails, and on request one that runs again."""

    def __init__(
        self,
        replicas: ReplicaSet,
        engine: Engine,
        ambient: AmbientState,
        rng: CallerRng,
        check_rerun_allowed: Callable[[], None],
    ) -> None:
        """
        Args:
            replicas: The replicas that run the call.
            engine: The engine that runs them.
            ambient: The state of this thread.
            rng: The caller's generators, with their states before the call.
            check_rerun_allowed: Raises `StateError` if the call cannot run again.
        """
        self._replicas, self._engine, self._check_rerun_allowed = replicas, engine, check_rerun_allowed
        self.ambient, self.rng = ambient, rng

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        """Undo a failed call. Replicas that still run after an interruption are undone when they end."""
        if exception_type is None:
            return
        replicas = self._replicas
        later = replicas.deferred_restore()
        run_uninterrupted(self.ambient.restore, replicas.restore_containers, replicas.discard, self.rng.restore)
        self._engine.add_idle_callback(later)

    def rollback(self) -> None:
        """Undo a forward on the replicas; `StateError` if it wrote to an argument."""
        self._check_rerun_allowed()
        self.ambient.restore()
        self._replicas.restore_containers()
        self._replicas.discard()
        self.rng.restore()
