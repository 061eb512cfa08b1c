"""instep: run a PyTorch module on several devices in step, and get back what one device would have given."""

from __future__ import annotations

from instep.call.loss import with_loss
from instep.collectives.functional import all_gather, all_reduce, replica
from instep.engines.select import shutdown
from instep.errors import (
    BridgeError,
    CannotCross,
    CollectiveError,
    EngineError,
    InstepError,
    MergeError,
    RankFailure,
    StateError,
    StructureError,
    WorkerFailure,
    WrapError,
)
from instep.functional import data_parallel, gather, parallel_apply, replicate, scatter
from instep.parallel import DataParallel
from instep.runtime.launcher import is_primary, use_own_gpu
from instep.runtime.version import __version__ as __version__
from instep.structure.merge import merge
from instep.structure.merge_rules import weighted_by
from instep.structure.register import register
from instep.structure.spec import Shards, whole
from instep.structure.split import split

__all__ = [
    "BridgeError",
    "CannotCross",
    "CollectiveError",
    "DataParallel",
    "EngineError",
    "InstepError",
    "MergeError",
    "RankFailure",
    "Shards",
    "StateError",
    "StructureError",
    "WorkerFailure",
    "WrapError",
    "all_gather",
    "all_reduce",
    "data_parallel",
    "gather",
    "is_primary",
    "merge",
    "parallel_apply",
    "register",
    "replica",
    "replicate",
    "scatter",
    "shutdown",
    "split",
    "weighted_by",
    "whole",
    "with_loss",
]

use_own_gpu()
