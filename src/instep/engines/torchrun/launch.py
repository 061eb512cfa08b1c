"""Joining the ranks that a launcher has started: process groups, devices, and the store they meet on."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from instep.engines.torchrun.channel import Message, RankChannel
from instep.engines.torchrun.local_memory import machine_identity
from instep.engines.torchrun.local_slots import LocalSlots
from instep.engines.torchrun.monitor import RankMonitor
from instep.errors import EngineError
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.launcher import LAUNCH_VARIABLES, local_rank
from instep.runtime.torch_private import abort_group, backend_of, default_store

_stores: Any = dist  # torch does not export the types of stores
_CONNECT_SECONDS = 10.0
"""How long a rank tries to reach the store before it says so."""
_REREAD_SECONDS = 1.0
"""After this time without an answer, a rank reads again which generation of the job rank 0 has published."""


@dataclass
class Ranks:
    """This rank's connections to the others."""

    channel: RankChannel
    new_bucket_group: Callable[[], Any]

    def __post_init__(self) -> None:
        self.bucket_group = self.new_bucket_group()
        """The group in which gradients are reduced."""
        self.channel.on_out_of_step = self._replace_bucket_group

    def _replace_bucket_group(self) -> None:
        """Called on all ranks when they are out of step: some may have begun a reduction that others never begin."""
        abort_group(backend_of(self.bucket_group, self.channel.device))
        self.bucket_group = self.new_bucket_group()

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def count(self) -> int:
        return self.channel.count


_first_values: list[torch.Tensor] = []
"""What groups have reduced first. Threads of Gloo must not free a tensor (see `RankChannel`)."""
_monitor_numbers = itertools.count()
_connections: dict[torch.device, tuple[Any, Ranks]] = {}
"""By device, the default process group and this rank's connections."""


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def connect(device: torch.device, timeout: float) -> Ranks:
    """This rank's connections, made at the first call, with its timeout. All ranks have to call it."""
    if not dist.is_initialized():
        _init_process_group(device, timeout)
    default_group = dist.group.WORLD
    found = _connections.get(device)
    if found is None or found[0] is not default_group:
        found = _connections[device] = default_group, _make_connections(device, timeout)
    return found[1]


def _make_connections(device: torch.device, timeout: float) -> Ranks:
    limit = timedelta(seconds=timeout)
    backend = _device_backend(device)
    host_group = dist.new_group(backend="gloo", timeout=limit)
    is_gloo = device.type == "cpu" or backend == "gloo"
    device_group = host_group if is_gloo else _new_group(backend, limit, device)
    rank, count = dist.get_rank(), dist.get_world_size()
    store = _stores.PrefixStore(f"instep/monitor/{next(_monitor_numbers)}", _monitor_store())
    monitor = RankMonitor(store, rank, count, threading.main_thread().ident or 0)
    atexit.register(monitor.close)
    channel = RankChannel(host_group, device_group, device, monitor)
    _share_memory(channel, timeout)
    return Ranks(channel, partial(_new_group, backend, limit, device))


def _share_memory(channel: RankChannel, timeout: float) -> None:
    """Let ranks that are all on one machine exchange messages through memory."""
    if channel.count == 1:
        return
    step = "connecting the ranks"
    identities = [message.body for message in channel.exchange(Message(step, body=(machine_identity(), os.getpid())))]
    if not identities[0][0] or len({identity for identity, _ in identities}) > 1:
        return
    memory = channel.share_memory(step, LocalSlots.nbytes(channel.count))
    if memory is None:
        return
    slots = None
    with suppress(OSError):
        pids, on_accelerator = [pid for _, pid in identities], channel.device.type != "cpu"
        slots = LocalSlots(memory, channel.rank, channel.count, pids, timeout, on_accelerator=on_accelerator)
    succeeded = [message.body for message in channel.exchange(Message(step, body=slots is not None))]
    if slots is not None and all(succeeded):
        channel.use_local_slots(slots)


def _new_group(backend: str, limit: timedelta, device: torch.device) -> Any:
    """A group of all ranks that is connected: NCCL connects in the first collective, which blocks the host."""
    group = dist.new_group(backend=backend, timeout=limit)
    _first_values.append(torch.zeros(1, device=device))
    dist.all_reduce(_first_values[-1], group=group)
    return group


def _device_backend(device: torch.device) -> str:
    """The backend of the default group for a device; `EngineError` if it has none."""
    config = str(dist.get_backend_config())
    backends = dict(part.split(":", 1) for part in config.split(",")) if ":" in config else {device.type: config}
    backend = backends.get(device.type)
    if backend is None or (device.type == "cpu" and backend == "nccl"):
        raise EngineError(
            f"the process group has the backend {config!r}, which has no collectives for {device.type} tensors, and "
            f"the module is on {device}.\n"
            f"Leave out init_process_group (instep calls it), or write "
            f"init_process_group('cpu:gloo,cuda:nccl')."
        )
    return backend


def _monitor_store() -> Any:
    """A connection to the ranks' store that no other thread uses."""
    store: Any = default_store()
    return store.clone() if hasattr(store, "clone") else store


def _init_process_group(device: torch.device, timeout: float) -> None:
    """Initialize the default process group on a store that is fresh, also after an elastic restart."""
    missing = [name for name in LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise EngineError(
            f"engine='torchrun' needs a launcher that starts one process per device: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set.\n"
            f"Start the script with:  instep run script.py   (or torchrun --nproc-per-node 2 script.py)"
        )
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _stores.PrefixStore("instep", _connect_to_store(os.environ, rank, timeout))
    store = _stores.PrefixStore(_agree_on_generation(store, rank, count, timeout), store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout))
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _connect_to_store(environment: Mapping[str, str], rank: int, timeout: float) -> Any:
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    started_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + timeout
    while True:
        limit = timedelta(seconds=min(timeout, _CONNECT_SECONDS))
        try:
            store = _stores.TCPStore(
                host, port, is_master=rank == 0 and not started_by_agent, timeout=limit, wait_for_workers=False
            )
            break
        except (RuntimeError, dist.DistError) as error:
            problem = (
                f"rank {rank} cannot reach the store of the ranks at {host}:{port} (MASTER_ADDR and MASTER_PORT).\n"
                f"Check that rank 0 runs, that this machine resolves {host!r}, and that no firewall closes port {port}."
            )
            if started_by_agent or time.monotonic() > deadline:  # the agent has started the store before this process
                raise EngineError(f"{problem}\nThe cause: {error}") from error
            warn_caller(f"{problem}\nThis rank goes on trying for {deadline - time.monotonic():.0f} s.")
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _agree_on_generation(store: Any, rank: int, count: int, timeout: float) -> str:
    """A name that all ranks of this start of the job have in common, and that no earlier start has used.

    Rank 0 publishes it, and answers each rank. A name that an earlier start has left in the store gets no answer.
    """
    deadline = time.monotonic() + timeout
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("generation", own)
        answered: set[str] = set()
        while len(answered) < count - 1:
            for other in range(1, count):
                key = f"{own}/hello/{other}"
                if store.check([key]) and (token := store.get(key).decode()) not in answered:
                    store.set(f"{own}/answer/{token}", "")
                    answered.add(token)
            _sleep_before(deadline, rank, f"only {len(answered) + 1} of {count} ranks have started")
        return own
    while True:
        generation = store.get("generation").decode()
        store.set(f"{generation}/hello/{rank}", own)
        reread = time.monotonic() + _REREAD_SECONDS
        while time.monotonic() < reread:
            if store.check([f"{generation}/answer/{own}"]):
                return str(generation)
            _sleep_before(deadline, rank, "rank 0 has not answered")


def _sleep_before(deadline: float, rank: int, problem: str) -> None:
    if time.monotonic() > deadline:
        raise EngineError(f"rank {rank}: {problem} within the timeout. Check the output of the other ranks.")
    time.sleep(0.01)


def rank_device(module_device: torch.device | None) -> torch.device:
    """The device of this rank: the accelerator with the number of its LOCAL_RANK, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return module_device or torch.device("cpu")
    available, index = torch.accelerator.device_count(), local_rank()
    if index >= available:
        raise EngineError(
            f"this machine has {available} {accelerator.type} device(s), and rank {index} on it has none of its own.\n"
            f"Start fewer ranks (--nproc-per-node {available}), or share a device: device_ids=[0]."
        )
    return torch.device(accelerator.type, index)
