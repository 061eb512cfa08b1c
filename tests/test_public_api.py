"""The public names and signatures. A change here is a change of the API and belongs in the changelog."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import instep

FUNCTIONS = {
    "all_gather": "(x, dim=0)",
    "all_reduce": "(x, op='sum')",
    "data_parallel": "(module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None, **options)",
    "gather": "(outputs, target_device, dim=0, *, merge='auto')",
    "is_primary": "()",
    "merge": "(parts, sizes=None, *, merge='auto', out_dims='auto', dim=0)",
    "parallel_apply": "(modules, inputs, kwargs_tup=None, devices=None)",
    "register": "(cls, *, size, split, merge, map=None)",
    "replica": "()",
    "replicate": "(network, devices, detach=False)",
    "scatter": "(inputs, target_gpus, dim=0, *, in_dims='auto')",
    "shutdown": "()",
    "split": "(value, parts, dim=0, *, in_dims='auto', min_shard=1)",
    "weighted_by": "(weight)",
    "whole": "(value)",
    "with_loss": "(module, criterion, *, target=-1, weight=None)",
}

DATA_PARALLEL = (
    "(module, device_ids=None, output_device=None, dim=0, *, engine='auto', in_dims='auto', out_dims='auto', "
    "merge='auto', state=None, methods=(), min_shard=1, shares=None, cost=None, place=None, "
    "on_unmerged_state='error', hooks='whole', private_copies=False, sync_batchnorm=True, probe=True, "
    "batches='global', gather=None, reduce=None, restarts=3, timeout=600.0)"
)

METHODS = {
    "call": "(self, method, *args, **kwargs)",
    "close": "(self)",
    "compile": "(self, *args, **kwargs)",
    "explain": "(self, *args, **kwargs)",
    "forward": "(self, *args, **kwargs)",
    "frozen": "(self)",
    "no_sync": "(self)",
}

ERRORS = {
    "BridgeError",
    "CannotCross",
    "CollectiveError",
    "EngineError",
    "MergeError",
    "RankFailure",
    "StateError",
    "StructureError",
    "WorkerFailure",
    "WrapError",
}


def signature(function: Callable[..., Any]) -> str:
    """A signature as text, without annotations."""
    found = inspect.signature(function)
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_exported_names() -> None:
    expected = {*FUNCTIONS, *ERRORS, "DataParallel", "InstepError", "Shards"}
    assert set(instep.__all__) == expected
    assert len(instep.__all__) == len(expected)
    assert all(hasattr(instep, name) for name in expected)


@pytest.mark.parametrize(("name", "expected"), FUNCTIONS.items(), ids=FUNCTIONS.keys())
def test_function_signatures(name: str, expected: str) -> None:
    assert signature(getattr(instep, name)) == expected


def test_data_parallel() -> None:
    assert signature(instep.DataParallel) == DATA_PARALLEL
    public = {name for name in vars(instep.DataParallel) if not name.startswith("_")}
    assert {name: signature(getattr(instep.DataParallel, name)) for name in public} == METHODS


def test_shards() -> None:
    assert signature(instep.Shards) == "(parts)"


def test_errors() -> None:
    for name in ERRORS:
        assert issubclass(getattr(instep, name), instep.InstepError), name
    assert issubclass(instep.InstepError, Exception)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", instep.__version__)
