"""The leak checks in conftest.py fail tests that leak, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py").read_text()

LEAKING = """
    import os, subprocess, threading
    import torch

    def test_thread():
        threading.Thread(target=threading.Event().wait, args=(60,), name="forgotten", daemon=True).start()

    def test_process():
        global process
        process = subprocess.Popen(["sleep", "4"])

    def test_variable_set():
        os.environ["INSTEP_LEFT"] = "behind"

    def test_variable_removed():
        del os.environ["INSTEP_GIVEN"]

    def test_dtype():
        torch.set_default_dtype(torch.float64)

    def test_device():
        torch.set_default_device("meta")

    def test_grad_mode():
        torch.set_grad_enabled(False)

    def test_threads_of_torch():
        torch.set_num_threads(torch.get_num_threads() + 1)

    def test_determinism():
        torch.use_deterministic_algorithms(True)
"""

COMPLAINTS = [
    "thread still runs: forgotten",
    "process still runs: * (sleep 4)",
    "os.environ: INSTEP_LEFT was (not set), is behind",
    "os.environ: INSTEP_GIVEN was given, is (not set)",
    "torch: default dtype was torch.float32, is torch.float64",
    "torch: default device was cpu, is meta",
    "torch: grad mode was True, is False",
    "torch: number of threads was *, is *",
    "torch: deterministic algorithms was False, is True",
]

CLEAN = """
    import os, random, threading
    import hypothesis, hypothesis.strategies as st
    import numpy as np, pytest, torch

    draws = []

    @pytest.mark.parametrize("again", [False, True])
    def test_draws_are_seeded(again):
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
        assert draws[0] == draws[-1]

    @hypothesis.given(st.integers())
    def test_draws_of_every_example_are_seeded(number):
        assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))

    def test_restored_settings_are_no_leak(monkeypatch):
        monkeypatch.setenv("INSTEP_SET", "for now")
        with torch.no_grad(), torch.device("meta"):
            torch.empty(1)

    def test_a_thread_that_ends_in_time_is_no_leak():
        threading.Timer(0.2, lambda: None).start()
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.RunResult:
    # In a separate process, so that nothing leaks into this one.
    monkeypatch.setenv("INSTEP_GIVEN", "given")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_clean=CLEAN, test_leaking=LEAKING)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.slow
def test_leaking_tests_fail_and_clean_ones_pass(run: pytest.RunResult) -> None:
    leaking, clean = LEAKING.count("def test_"), CLEAN.count("def test_") + 1
    run.assert_outcomes(passed=leaking + clean, errors=leaking)
    run.stdout.fnmatch_lines([f"*{complaint}" for complaint in COMPLAINTS])
