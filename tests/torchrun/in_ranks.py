"""A pytest plugin that runs tests on the ranks that torchrun has started.

Every rank runs the same tests in the same order. A wrapper of several CPU replicas becomes one whose replicas are the
ranks, whatever engine and number of replicas the test names.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import instep.parallel
import instep.runtime.caller_warnings
from instep.call.options import Options
from instep.engines.torchrun import launch
from instep.engines.torchrun.launch import connect, world_size

TIMEOUT = 60.0
DEVICE = torch.device(os.environ.get("INSTEP_TEST_DEVICE", "cpu"))
BACKEND = os.environ.get("INSTEP_TEST_BACKEND")
"""The backend of a process group that the tests initialize themselves; instep does it otherwise."""

NOT_FOR_RANKS = {
    "test_shards_are_balanced": "reads what all replicas have noted in one process",
    "test_calls_from_many_threads_at_once": "ranks make calls in one order",
    "test_ddp_raises": "initializes the default process group, which the ranks have",
    "test_ddp_refuses_a_fully_frozen_module": "initializes the default process group, which the ranks have",
}
OF_REPLICAS = {
    "test_sparse_and_dense_gradients_of_one_weight": 3,
    "test_seq2seq_with_the_batch_second": 2,
    "test_min_shard_avoids_shards_of_one_without_sync_batchnorm": 3,
    "test_gradients_with_shares_equal_the_plain_modules": 3,
    "test_selected_rows_are_concatenated": 2,
    "test_shapes_that_cannot_be_concatenated_raise_and_merge_rules_help": 2,
    "test_shares": 2,
    "test_cost": 2,
    "test_invalid_shares_and_costs_raise": 2,
}
"""Tests whose numbers hold for a certain number of replicas."""
OF_SEVERAL = frozenset(
    {
        "test_a_mean_over_nodes_is_offered_a_line",
        "test_an_argument_with_as_many_rows_as_nodes_by_chance",
        "test_a_loss_across_samples_without_a_gather_raises",
        "test_a_missing_state_rule_raises_and_changes_nothing",
        "test_as_many_images_as_channels",
        "test_common_mistakes_give_wrong_gradients",
        "test_different_batch_sizes_raise_before_forward_runs",
        "test_one_object_per_batch_raises_and_names_register",
        "test_records_that_depend_on_the_shard_raise",
        "test_running_mean_covers_all_shards_without_sync_batchnorm",
        "test_the_error_names_the_argument_that_does_not_fit",
        "test_unique_values_raise_without_a_merge_rule",
        "test_backward_and_zero_grad_inside_forward_raise",
    }
)
"""Tests of errors and messages that one replica does not give, because nothing is split."""

READINGS = "test_readings.py"
"""Which reading of the arguments a plan takes. One replica takes none."""

_set_up = instep.parallel.DataParallel._set_up


def _set_up_on_ranks(self: Any, options: Options) -> None:
    devices = options.device_ids
    if devices is not None and len(devices) > 1:
        options = replace(options, device_ids=None, engine="torchrun", timeout=TIMEOUT)
    elif options.engine == "auto":
        options = replace(options, engine="serial", device_ids=devices or ("cpu",))
    _set_up(self, options)


@pytest.fixture(autouse=True)
def replicas_are_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests of other folders, wrappers of several replicas run on the ranks, and every rank warns."""
    if "torchrun" not in request.path.parts:
        monkeypatch.setattr(instep.parallel.DataParallel, "_set_up", _set_up_on_ranks)
        monkeypatch.setattr(instep.runtime.caller_warnings, "is_primary", lambda: True)


def pytest_configure() -> None:
    if BACKEND is not None:
        torch.distributed.init_process_group(BACKEND)
    if os.environ.get("INSTEP_TEST_MESSAGES") == "gloo":
        launch.machine_identity = lambda: ""
    connect(DEVICE, TIMEOUT)  # its threads stay: no test has started them


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one engine: all engines are the same here."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        words, name = re.split(r"\W", item.name), getattr(item, "originalname", item.name)
        fits = (
            name not in NOT_FOR_RANKS
            and (world_size() > 1 or (name not in OF_SEVERAL and item.path.name != READINGS))
            and OF_REPLICAS.get(name, world_size()) == world_size()
        )
        (kept if fits and not {"serial", "threads"} & set(words) else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
