"""The engine interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.call.one_device import BATCH_TOO_SMALL
from instep.call.verdict import ACCEPTED, ForwardVerdict
from instep.engines.select import EngineChoice, create_engine
from instep.engines.threads import ThreadsEngine


@pytest.mark.parametrize("name", ["serial", "threads", "processes"])
def test_one_process_decides_alone(name: str) -> None:
    engine = create_engine(EngineChoice(name, "test"), [torch.device("cpu")] * 3)
    verdict = ForwardVerdict(retry=True)
    assert engine.agree(verdict, None) is verdict
    with pytest.raises(KeyError, match="lost"):
        engine.agree(verdict, KeyError("lost"))
    engine.close()


def test_the_runner_follows_the_agreed_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[Any] = []

    def agree(_: ThreadsEngine, verdict: ForwardVerdict, failure: Exception | None) -> ForwardVerdict:
        assert failure is None
        verdicts.append(verdict)
        return ForwardVerdict(one_device=BATCH_TOO_SMALL)

    monkeypatch.setattr(ThreadsEngine, "agree", agree)
    net, sizes = nn.Linear(4, 3), []
    net.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    x = torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", probe=False, hooks="per_replica") as model:
        torch.testing.assert_close(model(x), net(x))
    assert verdicts == [ACCEPTED]
    assert sorted(sizes) == [3, 3, 6, 6]
