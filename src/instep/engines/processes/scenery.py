"""What surrounds a call in the process that asks for it, set up in a worker."""

from __future__ import annotations

import contextvars
from itertools import starmap

import torch

from instep.engines.processes.berth import set_backends
from instep.engines.processes.filters import set_warning_filters
from instep.engines.processes.orders import Surroundings
from instep.replicas.ambient import Ambient, Autocast


def anomaly_mode() -> int:
    """Whether autograd looks for anomalies: 0 for no, 1 for where an error comes from, 2 for NaN too."""
    return 1 + torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else 0


def set_anomaly_mode(mode: int) -> None:
    """Let autograd look for anomalies as it does elsewhere."""
    if mode != anomaly_mode():
        torch.set_anomaly_enabled(mode > 0, mode != 1)


class Scenery:
    """The surroundings of the last call: they are told again only where they are others."""

    _around: Surroundings
    _ambient: Ambient

    def __init__(self) -> None:
        self._threads = 0

    def set_up(self, around: Surroundings | None) -> Ambient:
        """Set what is the whole process's, also what the last call has changed of it; returns what is the call's."""
        if around is not None:
            self._around, self._ambient = around, _ambient(around)
        self._set(self._around)
        return self._ambient

    def _set(self, around: Surroundings) -> None:
        if torch.get_default_dtype() != around.dtype:
            torch.set_default_dtype(around.dtype)
        if torch.get_deterministic_debug_mode() != around.deterministic:
            torch.set_deterministic_debug_mode(around.deterministic)
        if torch.get_float32_matmul_precision() != around.precision:
            torch.set_float32_matmul_precision(around.precision)
        cudnn = torch.backends.cudnn
        if (cudnn.benchmark, cudnn.deterministic) != around.cudnn:
            cudnn.benchmark, cudnn.deterministic = around.cudnn
        if self._threads != around.threads:
            torch.set_num_threads(around.threads)
            self._threads = around.threads
        set_backends(around.backends)
        set_anomaly_mode(around.anomaly)
        set_warning_filters(around.filters)


def _context(around: Surroundings) -> contextvars.Context:
    context = contextvars.copy_context()
    for variable, value in around.context:
        context.run(variable.set, value)
    return context


def _ambient(around: Surroundings) -> Ambient:
    return Ambient(
        grad=around.grad,
        inference=around.inference,
        autocast=tuple(starmap(Autocast, around.autocast)),
        autocast_cache=around.autocast_cache,
        device=around.device,
        saved_hooks=around.saved_hooks,
        streams={},
        context=_context(around),
        compiler=None,
        graphs=None,
    )
