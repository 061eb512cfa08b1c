"""Writes `docs/messages.md`: every error and warning of instep on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.thread_pool import stop_all_threads

from . import (
    scenarios_collectives,
    scenarios_engines,
    scenarios_functional_api,
    scenarios_gradients,
    scenarios_loss,
    scenarios_merging,
    scenarios_randomness,
    scenarios_splitting,
    scenarios_state,
    scenarios_worker_processes,
    scenarios_wrapping,
)
from .harness import Message, Scenario, run
from .sites import Site, find_sites
from .unrendered import INTERNAL, UNRENDERED

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
TOPICS: Sequence[ModuleType] = (
    scenarios_wrapping,
    scenarios_splitting,
    scenarios_merging,
    scenarios_state,
    scenarios_gradients,
    scenarios_randomness,
    scenarios_collectives,
    scenarios_loss,
    scenarios_functional_api,
    scenarios_engines,
    scenarios_worker_processes,
)
INTRODUCTION = """\
# Messages

<!-- Written by `make messages` from the scenarios in tests/messages. Do not edit. -->

Every error and warning of instep, with a few lines of code that lead to it. `make messages` runs the code and writes
this page; a test fails if a message has changed and the page has not. Each block begins with these imports:

```py
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
```

Addresses, paths, times and the last digits of numbers are replaced by `...`, and so are the frames of a stack that are
not in the code shown.
"""


def run_scenarios() -> dict[str, list[Message]]:
    """The messages of all scenarios, by topic. They share one worker process."""
    pool = WorkerPool([torch.device("cpu")] * 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pool.get(1)
        pool.kill(1)  # one that other tests use may have printed something, which a message would show
        pool.get(1)
        return {
            topic.TOPIC: [run(value) for value in vars(topic).values() if isinstance(value, Scenario)]
            for topic in TOPICS
        }
    finally:
        pool.close()
        stop_all_threads()
        torch.set_num_threads(threads)


def render(topics: dict[str, list[Message]]) -> str:
    """The page."""
    parts = [INTRODUCTION]
    for topic, messages in topics.items():
        parts.append(f"## {topic}\n")
        parts += [_render(message) for message in messages]
    parts.append(_render_unrendered())
    return "\n".join(parts)


def _render(message: Message) -> str:
    one = message.scenario
    return f"### {one.title}\n\n```py\n{one.code.rstrip()}\n```\n\n```text\n{message.text}\n```\n"


def unshown_sites(topics: dict[str, list[Message]]) -> list[Site]:
    """The sites whose message no scenario shows."""
    messages = [message for found in topics.values() for message in found]
    return [site for site in find_sites() if not any(map(site.is_shown_by, messages))]


def _render_unrendered() -> str:
    lines = [
        "## Not shown by an example\n",
        "These need a GPU, or a state of the machine that an example cannot create. The texts are from the source.\n",
    ]
    for reason, keys in UNRENDERED.items():
        lines.append(f"### {reason}\n")
        for site in find_sites():
            if site.key in keys and site.text:
                text = site.text.replace("`", "'").split("\n")
                lines.append(f"- `{site.key}`\n\n  ```text\n" + "".join(f"  {line}\n" for line in text) + "  ```\n")
    return "\n".join(lines)


def main() -> None:
    PAGE.write_text(render(run_scenarios()), "utf-8")
    print(f"wrote {PAGE}")


__all__ = ["INTERNAL", "PAGE", "UNRENDERED", "main", "render", "run_scenarios", "unshown_sites"]
