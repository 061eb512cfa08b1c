"""The replicas of one source module, made together and kept abreast of it together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from instep.devices import home_of
from instep.errors import WrapError
from instep.reduce import send
from instep.replicas.memory import Lay, Writes
from instep.replicas.replica import Replica
from instep.replicas.watch import Changes, Watch


class Crew:
    """One replica a device. `ready` makes them when they are first needed and follows the source at every call."""

    def __init__(
        self, source: nn.Module, devices: Sequence[torch.device], *, private: bool = False, joint: bool = False
    ) -> None:
        self.source = source
        self.devices = list(devices)
        self.private = private
        self.joint = joint
        """Whether replicas take part in the caller's own graph instead of having leaves of their own."""
        self.frozen = False
        """Whether values are taken as unchanged: nothing is sent or compared."""
        self.replicas: list[Replica] = []
        self._watch: Watch | None = None

    def ready(self) -> list[Replica]:
        """The replicas, with everything that changed on the source since the last call."""
        changes = self._watch.look() if self._watch is not None else None
        if changes is None or changes.structure or not self._lay.holds():
            self._make()
        elif changes:
            self._apply(changes)
        if not self.frozen:
            self._send()
        self._writes.begin()
        return self.replicas

    def written(self) -> list[Tensor]:
        """Trainable tensors of the source that were written since the replicas were last ready."""
        return self._writes.found()

    def _apply(self, changes: Changes) -> None:
        """Set on every replica what was set on the source; modules or containers that are new need a new crew."""
        assert self._watch is not None
        before = self._extent()
        for replica in self.replicas:
            replica.apply(changes)
        if self._extent() == before:
            self._watch.update(changes)
            self._note_writes()
        else:
            self._make()

    def _extent(self) -> tuple[int, int]:
        cloner = self.replicas[0].cloner
        return len(cloner.modules), len(cloner.containers)

    def discard(self) -> None:
        """Make the replicas anew at the next call: after a failure nobody knows what they hold."""
        self._watch = None

    def _make(self) -> None:
        home, now = self.devices[0], home_of(self.source)
        if now not in (None, home):
            raise WrapError(
                f"the module was moved to {now} after it was wrapped for {home}.\n"
                f"Wrap it anew: instep.DataParallel(model, device_ids=[...])."
            )
        self.replicas = []
        for index, device in enumerate(self.devices):
            near = device == home and not self.private
            self.replicas.append(
                Replica(index, self.source, device, alias=near and not self.joint, share=near and self.joint)
            )
        first = self.replicas[0]
        containers = [(value, items) for value, items, _ in first.cloner.containers]
        self._watch = Watch(first.source_modules, containers)
        self._lay = Lay([] if self.joint else [source for source, _ in first.trainable])
        self._note_writes()

    def _note_writes(self) -> None:
        self._writes = Writes([pair for replica in self.replicas for pair in replica.trainable])

    def _send(self) -> None:
        """Parameters to the replicas that have memory of their own."""
        far = [replica for replica in self.replicas if not (replica.tensors.alias or replica.tensors.share)]
        if self.joint:
            for replica in far:
                replica.link()
            if far:
                self._note_writes()
        elif far:
            sources: list[Tensor] = [source for source, _ in far[0].trainable]
            send(sources, [[leaf for _, leaf in replica.trainable] for replica in far])
