"""`docs/messages.md` shows every error and warning, as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instep.engines.processes.lifecycle.pool import WorkerPool

from .harness import Message
from .page import INTERNAL, PAGE, UNRENDERED, render, run_scenarios, unshown_sites
from .sites import find_sites


def is_pinned_torch() -> bool:
    constraints = Path(__file__).parents[2] / "constraints.txt"
    return f"torch=={torch.__version__.partition('+')[0]}" in constraints.read_text("utf-8").split()


@pytest.fixture(scope="module")
def topics(workers: WorkerPool) -> dict[str, list[Message]]:
    workers.get(1)  # held by the fixture, so that no scenario ends it
    return run_scenarios()


@pytest.mark.skipif(not is_pinned_torch(), reason="some messages are torch's own; the page shows the pinned version's")
def test_the_page_is_up_to_date(topics: dict[str, list[Message]]) -> None:
    assert render(topics).splitlines() == PAGE.read_text("utf-8").splitlines(), "run: make messages"


def test_titles_are_unique_within_a_topic(topics: dict[str, list[Message]]) -> None:
    for messages in topics.values():
        titles = [message.scenario.title for message in messages]
        assert len(titles) == len(set(titles))


def test_every_site_is_shown_or_listed_with_a_reason(topics: dict[str, list[Message]]) -> None:
    listed = {key for keys in (*UNRENDERED.values(), *INTERNAL.values()) for key in keys}
    unshown = {site.key for site in unshown_sites(topics)}
    assert sorted(unshown - listed) == [], "write a scenario in tests/messages, or list the site with a reason"
    assert sorted(listed - unshown) == [], "remove these from tests/messages/unrendered.py: a scenario shows them"


def test_the_scan_finds_errors_and_warnings() -> None:
    created = {site.creates for site in find_sites()}
    assert {"StructureError", "MergeError", "StateError", "warn", "warn_caller", "Reason", "cannot_merge"} <= created
    assert len(find_sites()) > 200
