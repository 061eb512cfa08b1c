"""`instep run`: torchrun with the defaults of one machine, one rank for each GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch

from instep.errors import EngineError

USAGE = "instep run [--nproc N] [options of torchrun] script.py [arguments of the script]"


def run(arguments: Sequence[str]) -> int:
    """Run a script on several ranks. Returns the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(options.nproc_per_node)))
    try:
        torchrun.run(options)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:  # the ranks have printed their tracebacks
        raise EngineError(_describe_failures(error)) from None
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of torchrun. `--nproc N` may also follow the script."""
    from torch.distributed import run as torchrun

    parser = torchrun.get_args_parser()
    parser.prog, parser.usage, parser.description = "instep run", USAGE, __doc__
    parser.add_argument("--nproc", metavar="N", help="ranks on this machine (default: one per GPU)")
    parser.set_defaults(nproc_per_node=os.environ.get("PET_NPROC_PER_NODE"))
    options = parser.parse_args(list(arguments))
    rest = options.training_script_args
    if rest[:1] == ["--nproc"] and len(rest) > 1 and options.nproc is None:
        options.nproc, options.training_script_args = rest[1], rest[2:]
    options.nproc_per_node = options.nproc or options.nproc_per_node or _number_of_gpus()
    names = ("nnodes", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "node_rank", "rdzv_conf")
    if all(getattr(options, name) == parser.get_default(name) for name in names):
        options.standalone = True
    return options


def _number_of_gpus() -> str:
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not count:
        raise EngineError("there is no GPU here to take the number of ranks from. Write it: instep run --nproc 2 ...")
    return str(count)


def threads_per_rank(nproc: str) -> int:
    """This machine's cores divided among its ranks; 1 if their number is not known."""
    return max(1, (os.cpu_count() or 1) // max(1, int(nproc))) if nproc.isdecimal() else 1


def _describe_failures(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    ranks = sorted(failure.rank for failure in failures.values())
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    names = ", ".join(map(str, ranks))
    return (
        f"rank {first.rank} failed first, with exit code {first.exitcode}. Failed ranks: {names}. Their messages are "
        f"above."
    )
