"""The code blocks of the README and of the documentation run, on CPU replicas."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import instep

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.joinpath("docs").glob("*.md"))]
# A setup block is an HTML comment: it runs like the others and is not shown.
BLOCK = re.compile(r"^(?:```(python|pycon)\n(.*?)^```|<!-- setup\n(.*?)^-->)$", re.MULTILINE | re.DOTALL)
REPLICAS = ["cpu"] * 2


class Net(nn.Module):
    """The network of the examples: it returns one row of logits for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(x)))


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """The line, language and source of each code block of a page."""
    text = page.read_text("utf-8")
    return [
        (text.count("\n", 0, found.start()) + 2, found[1] or "python", found[2] or found[3])
        for found in BLOCK.finditer(text)
    ]


def names() -> dict[str, Any]:
    """The names that every page may use without defining them."""
    x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))
    return {
        "__name__": "documentation",
        "torch": torch,
        "nn": nn,
        "F": functional,
        "instep": instep,
        "Net": Net,
        "net": Net(),
        "x": x,
        "y": y,
        "loader": [(x, y)] * 2,
        "criterion": nn.CrossEntropyLoss(),
    }


@pytest.fixture
def two_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Examples that name no devices run on two CPU replicas."""
    wrappers, wrap = [], instep.DataParallel

    class Replicated(wrap):  # type: ignore[misc, valid-type]
        def __init__(self, module: nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, device_ids or REPLICAS, *args, **kwargs)
            wrappers.append(self)

    Replicated.__name__ = Replicated.__qualname__ = "DataParallel"
    monkeypatch.setattr(instep, "DataParallel", Replicated)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    for model in wrappers:
        model.close()
    instep.shutdown()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_replicas")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_code_blocks_of_a_page_run(page: Path) -> None:
    namespace = names()
    for line, language, source in blocks(page):
        if language == "pycon":
            _doctest(page, line, source, namespace)
            continue
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


def _doctest(page: Path, line: int, source: str, namespace: dict[str, Any]) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(source, namespace, page.name, str(page), line - 1)
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append, clear_globs=False)
    assert not failed, "".join(report)
    namespace.update(test.globs)


def test_every_page_with_code_is_tested() -> None:
    assert sum(len(blocks(page)) for page in PAGES) > 20
