"""The demo's data: snippets of various lengths from the source files of the Python standard library.

The same interpreter and seed give the same samples in the same order.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

UNKNOWN = 0  # also the padding, which the loss ignores by the samples' lengths
ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY = len(ALPHABET) + 1
IDS = {character: number for number, character in enumerate(ALPHABET, start=1)}

SHORTEST, LONGEST = 24, 128
HELD_OUT_FILES = 10  # every tenth file is never trained on
HELD_OUT_SAMPLES = 403  # odd, so that the last batch is short and its shards are unequal


@dataclass(frozen=True)
class Snippet:
    """One sample: some lines of a file."""

    file: str
    line: int
    text: str

    @property
    def location(self) -> tuple[str, int]:
        """The file and first line, which identify a snippet."""
        return self.file, self.line


@dataclass(frozen=True)
class Corpus:
    """Shuffled training samples, and held-out samples of other files in order."""

    train: list[Snippet]
    held_out: list[Snippet]

    def batch(self, step: int, size: int) -> dict[str, Any]:
        """The batch of a step. Starts over after the last sample."""
        start = step * size
        return collate([self.train[index % len(self.train)] for index in range(start, start + size)])

    def held_out_batches(self, size: int) -> Iterator[dict[str, Any]]:
        """Every held-out sample once, in order; the last batch may be short."""
        for start in range(0, len(self.held_out), size):
            yield collate(self.held_out[start : start + size])


def load(seed: int) -> Corpus:
    """Read the corpus. `FileNotFoundError` if Python is installed without its sources."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("[!_]*.py"), key=lambda path: path.name)
    train: list[Snippet] = []
    held_out: list[Snippet] = []
    for number, path in enumerate(files):
        (train if number % HELD_OUT_FILES else held_out).extend(snippets(path))
    if not train or not held_out:
        raise FileNotFoundError(
            f"the demo trains on the sources of the standard library, and there are none in {folder}"
        )
    shuffle = random.Random(seed)
    shuffle.shuffle(train)
    shuffle.shuffle(held_out)
    return Corpus(train, sorted(held_out[:HELD_OUT_SAMPLES], key=lambda snippet: snippet.location))


def snippets(path: Path) -> Iterator[Snippet]:
    """The paragraphs of a file. Long ones are split between lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").expandtabs(4).split("\n")
    except OSError:  # skip files that cannot be read
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
    """The inverse of `encode`, with `?` for characters outside the alphabet."""
    return "".join("?" if number == UNKNOWN else ALPHABET[number - 1] for number in ids)


def collate(samples: Sequence[Snippet]) -> dict[str, Any]:
    """One batch: ids and targets padded to the longest sample, and each sample's length, file and line."""
    texts = [torch.tensor(encode("\n" + sample.text)) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=UNKNOWN)
    return {
        "ids": padded[:, :-1],
        "targets": padded[:, 1:],
        "lengths": torch.tensor([len(sample.text) for sample in samples]),
        "files": [sample.file for sample in samples],
        "lines": [sample.line for sample in samples],
    }
