"""The demo's data: snippets of the Python standard library's own sources, each of its own length.

The same interpreter and the same seed give the same samples in the same order.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

UNKNOWN = 0  # also the padding, which the lengths keep out of the loss
ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY = len(ALPHABET) + 1
IDS = {character: number for number, character in enumerate(ALPHABET, start=1)}

SHORTEST, LONGEST = 24, 128
HELD_OUT_FILES = 10  # every tenth file is never trained on
HELD_OUT_SAMPLES = 403  # odd, so that the last batch is short and its shards are unequal


@dataclass(frozen=True)
class Snippet:
    """One sample: some lines of a file, and where they begin."""

    file: str
    line: int
    text: str

    @property
    def place(self) -> tuple[str, int]:
        """The file and the line, which no two snippets share."""
        return self.file, self.line


@dataclass(frozen=True)
class Corpus:
    """The samples to train on, shuffled, and those held out, from other files, in order."""

    train: list[Snippet]
    held_out: list[Snippet]

    def batch(self, step: int, size: int) -> dict[str, Any]:
        """The batch of a step; after the last sample the first comes again."""
        start = step * size
        return collate([self.train[index % len(self.train)] for index in range(start, start + size)])

    def held_out_batches(self, size: int) -> Iterator[dict[str, Any]]:
        """Every held-out sample once, in order; the last batch may be short."""
        for start in range(0, len(self.held_out), size):
            yield collate(self.held_out[start : start + size])


def load(seed: int) -> Corpus:
    """Reads the corpus. Raises `FileNotFoundError` where Python came without its sources."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("[!_]*.py"), key=lambda path: path.name)
    train: list[Snippet] = []
    held_out: list[Snippet] = []
    for number, path in enumerate(files):
        (train if number % HELD_OUT_FILES else held_out).extend(snippets(path))
    if not train or not held_out:
        raise FileNotFoundError(f"the demo reads the standard library's sources, and there are none in {folder}")
    shuffle = random.Random(seed)
    shuffle.shuffle(train)
    shuffle.shuffle(held_out)
    chosen = held_out[:HELD_OUT_SAMPLES]
    return Corpus(train, sorted(chosen, key=lambda snippet: snippet.place))


def snippets(path: Path) -> Iterator[Snippet]:
    """The paragraphs of a file, cut between lines where they are long."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").expandtabs(4).split("\n")
    except OSError:  # a file that cannot be read is one sample source less, no more
        return
    text, start = "", 1
    for number, line in enumerate([*lines, ""], start=1):
        ends = not line.strip() or len(text) + len(line) + 1 > LONGEST
        if ends and len(text) >= SHORTEST:
            yield Snippet(path.name, start, text)
        if ends:
            text, start = "", number
        if line.strip():
            start = start if text else number
            text += line[: LONGEST - 1] + "\n"


def encode(text: str) -> list[int]:
    """The ids of the characters."""
    return [IDS.get(character, UNKNOWN) for character in text]


def decode(ids: Sequence[int]) -> str:
    """The inverse of `encode`, with `?` for what the alphabet lacks."""
    return "".join("?" if number == UNKNOWN else ALPHABET[number - 1] for number in ids)


def collate(samples: Sequence[Snippet]) -> dict[str, Any]:
    """One batch: ids and targets padded to the longest sample, the true lengths, and where each sample is from."""
    texts = [torch.tensor(encode("\n" + sample.text)) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=UNKNOWN)
    return {
        "ids": padded[:, :-1],
        "targets": padded[:, 1:],
        "lengths": torch.tensor([len(sample.text) for sample in samples]),
        "files": [sample.file for sample in samples],
        "lines": [sample.line for sample in samples],
    }
