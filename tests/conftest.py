"""Fixtures for all tests: fixed seeds, shared workers, and a check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.lifecycle.process import running_workers

SECONDS_TO_END = 2.0

# A shell that starts the suite in the background makes it ignore SIGINT, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Set by pytest for every phase, by torch when it first needs its compiler or CUDA, and by scikit-learn and Lightning on
# import.
FOREIGN_VARIABLES = frozenset(
    {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING"}
    | {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "CAPTURE_NONTENSOR_STACK"}
    | {"PYTORCH_NVML_BASED_CUDA_CHECK"}
)

# Started once by a library for the whole process, and never meant to end before it does.
FOREIGN_THREADS = ("tqdm", "hypothesis", "torch", "inductor", "pydevd", "ThreadPoolExecutor-compile")
FOREIGN_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")


class TorchRandom:
    """Torch's default generator with the interface that hypothesis needs to seed it before every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100)  # make test-all
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_finish() -> None:
    # Imported modules are never freed: exclude them from the collection after every test.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seed all generators, so that a test draws the same numbers alone and in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed would take milliseconds per test
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Run torch on one thread: small operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Worker processes that all tests share: each takes seconds to start."""
    pool = WorkerPool([torch.device("cpu")] * 4)
    yield pool
    pool.close()


def _uses_workers(request: pytest.FixtureRequest) -> bool:
    callspec = getattr(request.node, "callspec", None)
    return callspec is not None and "processes" in str(callspec.params.values())


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads or processes running, or changes the environment or torch's settings.

    The environment and the settings are restored, so that later tests do not fail too.
    """
    if _uses_workers(request):
        pool: WorkerPool = request.getfixturevalue("workers")
        for index in (1, 2, 3):  # an earlier test may have killed one
            if not pool.get(index).is_alive():
                pool.kill(index)
                pool.get(index)
    gc.freeze()  # exclude objects of earlier tests from the collection after this one
    threads, processes = set(threading.enumerate()), _children()
    variables, settings = _variables(), _torch_settings()
    yield
    gc.collect()
    complaints = [
        *(f"thread still runs: {name}" for name in _wait_until_empty(lambda: _thread_names(threads))),
        *(f"process still runs: {name}" for name in _wait_until_empty(lambda: _process_names(processes))),
        *_differences("os.environ", variables, _variables()),
        *_differences("torch", settings, _torch_settings()),
    ]
    _restore(variables, settings)
    if complaints:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(complaints), pytrace=False)


@pytest.fixture
def wrap() -> Iterator[Callable[..., instep.DataParallel]]:
    """Wraps modules for CPU replicas and closes the wrappers when the test ends."""
    wrappers: list[instep.DataParallel] = []

    def make(net: nn.Module, replicas: int = 2, **options: Any) -> instep.DataParallel:
        wrappers.append(instep.DataParallel(net, ["cpu"] * replicas, **options))
        return wrappers[-1]

    yield make
    for model in wrappers:
        model.close()


def _wait_until_empty(names: Callable[[], list[str]]) -> list[str]:
    """Poll `names` until it returns nothing or the time is up; return its last value."""
    deadline = time.monotonic() + SECONDS_TO_END
    while (found := names()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _thread_names(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before
    started = {t for t in new if not (t.daemon and any(word in t.name for word in FOREIGN_THREADS))}
    # Some versions of torch's compiler keep threads with default names.
    names = [t.name for t in started if "torch._dynamo" not in sys.modules or not _is_compiler_thread(t.name)]
    return sorted(name for name in names if name != "instep-exits" or not running_workers())


def _is_compiler_thread(name: str) -> bool:
    return name.startswith("ThreadPoolExecutor-") or name.endswith("(_read_thread)")


def _children() -> set[int]:
    """The ids of this process's children; empty where there is no /proc."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, task.read_text().split()))
        except OSError:  # the thread has ended meanwhile
            continue
    return found


def _process_names(before: set[int]) -> list[str]:
    names = []
    for child in sorted(_children() - before):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        command = b" ".join(words).decode(errors="replace").strip() or "ended, but nobody waited for it"
        if not any(word in command for word in FOREIGN_PROCESSES):
            names.append(f"{child} ({command})")
    return names


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}


def _torch_settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def _differences(where: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missing = "(not set)"
    return [
        f"{where}: {name} was {before.get(name, missing)}, is {after.get(name, missing)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name, missing) != after.get(name, missing)
    ]


def _restore(variables: dict[str, str], settings: dict[str, Any]) -> None:
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    if settings == _torch_settings():
        return
    torch.set_default_dtype(settings["default dtype"])
    torch.set_default_device(None if settings["default device"].type == "cpu" else settings["default device"])
    torch.set_grad_enabled(settings["grad mode"])
    torch.set_num_threads(settings["number of threads"])
    torch.use_deterministic_algorithms(
        settings["deterministic algorithms"], warn_only=settings["deterministic warn only"]
    )
    torch.set_float32_matmul_precision(settings["float32 matmul precision"])
