"""What the demo claims, it would also notice if it were not so."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import instep
from instep.cli.demo import corpus as corpora
from instep.cli.demo.corpus import Corpus, Snippet, collate, decode, encode, load, snippets
from instep.cli.demo.model import Reader, ReaderOutput, write_line
from instep.cli.demo.run import DemoOptions, run
from instep.cli.demo.train import Learner, difference, evaluate, prove


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load(seed=0)


def small() -> Corpus:
    samples = [Snippet("a.py", line, "x = 1\n" * line) for line in range(1, 8)]
    return Corpus(samples, samples)


def test_the_same_seed_gives_the_same_corpus(corpus: Corpus) -> None:
    assert load(seed=0) == corpus
    assert load(seed=1) != corpus


def test_samples_differ_in_length_and_are_all_distinct(corpus: Corpus) -> None:
    everything = corpus.train + corpus.held_out
    assert len({sample.location for sample in everything}) == len(everything)
    assert len({len(sample.text) for sample in everything}) > 50
    assert all(corpora.SHORTEST <= len(sample.text) <= corpora.LONGEST for sample in everything)
    assert len(corpus.held_out) == corpora.HELD_OUT_SAMPLES


def test_nothing_held_out_is_trained_on(corpus: Corpus) -> None:
    assert not {sample.file for sample in corpus.train} & {sample.file for sample in corpus.held_out}


def test_snippets_are_where_they_say(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("\n\n# the first of two paragraphs\nx = 1\n\nshort\n\n" + "long = 'é'  # a line\n" * 20)
    found = list(snippets(path))
    lines = path.read_text().split("\n")
    assert [sample.line for sample in found] == [3, 8, 14, 20, 26]
    for sample in found:
        count = sample.text.count("\n")
        assert sample.text == "\n".join(lines[sample.line - 1 : sample.line - 1 + count]) + "\n"


def test_no_sources_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="there are none in"):
        load(seed=0)


def test_text_goes_to_ids_and_back() -> None:
    assert decode(encode(corpora.ALPHABET)) == corpora.ALPHABET
    assert decode(encode("naïve")) == "na?ve"


def test_padding_does_not_change_a_sample() -> None:
    model, samples = Reader().eval(), small().train
    together: ReaderOutput = model(collate(samples))
    alone = torch.cat([model(collate([sample])).loss_sum for sample in samples])
    torch.testing.assert_close(together.loss_sum, alone)
    assert together.tokens.tolist() == [len(sample.text) for sample in samples]


def test_the_same_seed_writes_the_same_line() -> None:
    model = Reader()
    line = write_line(model, "def ", seed=1)
    assert line.startswith("def ")
    assert line == write_line(model, "def ", seed=1)


class Halving(nn.Module):
    """Gives right outputs and half of every gradient, which Adam alone would not show."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def forward(self, batch: Any) -> Any:
        return self.module(batch)

    def explain(self, batch: Any) -> str:
        return "nothing to see"

    def __enter__(self) -> Halving:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("wrap", "holds"), [(lambda module: module, True), (Halving, False)])
def test_the_proof_notices_a_wrong_gradient(wrap: Any, holds: bool) -> None:
    plain, data = Reader(), small()
    wrapped = wrap(copy.deepcopy(plain))
    proof = prove(Learner(plain, 3), Learner(wrapped, 3), [data.batch(step, 3) for step in range(3)])
    assert [step.holds for step in proof] == [holds] * 3
    assert all(step.loss < 1e-5 for step in proof)


def test_what_is_not_a_number_does_not_pass_for_equal() -> None:
    plain, data = Reader(), small()
    [step] = prove(Learner(plain, 3), Learner(copy.deepcopy(plain), 3), [data.batch(0, 3)])
    assert step.holds
    assert not replace(step, instep=math.nan).holds
    assert not replace(step, gradients=math.nan).holds
    assert not replace(step, gradients=difference({"w": torch.ones(2)}, {"v": torch.ones(2)})).holds
    ones, broken = torch.ones(2), torch.tensor([1.0, math.nan])
    assert math.isnan(difference({"a": ones, "b": broken, "c": ones}, {"a": ones, "b": ones, "c": ones}))


def test_a_failed_proof_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instep, "DataParallel", Halving)
    console = Console(file=io.StringIO())
    assert run(DemoOptions(steps=2, replicas=2, out=tmp_path / "demo.pt"), console) == 1
    assert "NOT the same" in console.file.getvalue()
    assert not (tmp_path / "demo.pt").exists()


class Dropping(Halving):
    """Loses the last sample of a batch."""

    def forward(self, batch: Any) -> Any:
        return self.module({key: value[:-1] for key, value in batch.items()})


def test_the_evaluation_notices_a_lost_sample() -> None:
    data = small()
    assert evaluate(Reader(), data).is_exact(data.held_out)
    assert not evaluate(Dropping(Reader()), data).is_exact(data.held_out)
