"""Programs of the kinds that tutorials teach: the wrapped program gives the losses of the plain one.

A program is a script with a function `run(wrap)`, which passes its modules to `wrap` and returns losses and counts.
Where instep refuses a program or warns about it, the first option that the message offers has to be enough.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.call.one_device import BATCH_TOO_SMALL, NOT_BATCHED, OneDevice

from .offered_lines import offered_options

PROGRAMS = Path(__file__).parent / "programs"
MARK = "  # the one line"


@dataclass
class Program:
    """A program, and what its wrapped form needs."""

    name: str
    option: str = ""
    """How the option that the message offers first begins."""
    line: str = ""
    """What the message offers as the line to write in `forward`. The program has it, with `# the one line`."""
    draws: bool = False
    """Whether `forward` draws random numbers: losses are then compared by their means."""


ALL = [
    Program("image_classifier"),
    Program("char_rnn_argument"),
    Program("char_rnn_attribute", option="state={'hidden': 'cat'}"),
    Program("translation"),
    Program("language_model"),
    Program("gan"),
    Program("gradient_penalty", option="engine='serial'"),
    Program("vae", draws=True),
    Program("vae_loss_inside", draws=True),
    Program("diffusion", draws=True),
    Program("segmentation", option="merge=instep.weighted_by(lambda target"),
    Program("detection", option="merge={'box': instep.weighted_by(lambda targets"),
    Program("reinforce"),
    Program("q_learning"),
    Program("simclr"),
    Program("simclr_loss_inside", line="z = instep.all_gather(z)"),
    Program("graphs"),
    Program("graphs_as_tensors"),
    Program("bert"),
    Program("sentiment"),
    Program("bag_of_words"),
    Program("mixture_of_experts", line="instep.all_reduce("),
    Program("triplets"),
    Program("distillation"),
    Program("time_series"),
    Program("recommender"),
]
IN_PROCESSES = {"image_classifier", "vae"}
SLOW_IN_PROCESSES = {"gan", "bert", "graphs", "distillation"}


def test_every_program_is_run() -> None:
    assert {program.name for program in ALL} == {path.stem for path in PROGRAMS.glob("*.py")}


def load(name: str, *, plain: bool = False) -> ModuleType:
    """The program, as a module that no worker process can import; `plain` without the line that instep asks for."""
    path = PROGRAMS / f"{name}.py"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    if plain:
        lines = ["\n" if line.endswith(f"{MARK}\n") else line for line in lines]
    module = ModuleType(f"first_hour_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile("".join(lines), str(path), "exec"), module.__dict__)
    return module


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why calls ran on one device."""
    found: list[str] = []
    record = OneDevice.record

    def recording(self: OneDevice, reason: Any, method: str) -> None:
        found.append(reason.name)
        record(self, reason, method)

    monkeypatch.setattr(OneDevice, "record", recording)
    return found


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="float32", marks=pytest.mark.slow),
        pytest.param(torch.float64, id="float64"),
    ]
)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def run_wrapped(run: Any, engine: str, options: dict[type, Any]) -> tuple[list[float], str, type | None]:
    """The results; or the message of an error or warning, and the class of the module whose call gave it."""
    wrappers: list[Any] = []

    def wrap(module: nn.Module) -> Any:
        wrappers.append(instep.DataParallel(module, ["cpu"] * 2, **{"engine": engine, **options.get(type(module), {})}))
        return wrappers[-1]

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = run(wrap)
    except instep.InstepError as error:
        return [], str(error), _failed_module(error.__traceback__) or type(wrappers[-1].module)
    finally:
        for model in wrappers:
            model.close()
    messages = [str(warning.message) for warning in caught if "calls run on one device" in str(warning.message)]
    return results, *((messages[0], type(wrappers[0].module)) if messages else ("", None))


def _failed_module(traceback: TracebackType | None) -> type | None:
    """The class of the wrapped module in whose call an error was raised."""
    while traceback is not None:
        caller = traceback.tb_frame.f_locals.get("self")
        if isinstance(caller, instep.DataParallel):
            return type(caller.module)
        traceback = traceback.tb_next
    return None


def compare(program: Program, engine: str, reasons: list[str], tolerance: float) -> None:
    plain = load(program.name, plain=True)
    expected = plain.run(lambda module: module)
    results, message, failed = run_wrapped(plain.run, engine, {})
    if program.line:
        assert program.line in message
        results, message, failed = run_wrapped(load(program.name).run, engine, {})
        assert not message, message
    elif program.option:
        option = first_option(message)
        assert option[0].startswith(program.option), message
        reasons.clear()
        results, message, _ = run_wrapped(plain.run, engine, {failed: option[1]})
        assert not message, f"{program.option} is not enough:\n{message}"
    else:
        assert not message, message
    assert not set(reasons) - {BATCH_TOO_SMALL.name, NOT_BATCHED.name}
    assert len(results) == len(expected)
    if program.draws:
        assert_similar(results, expected)
        assert run_wrapped(plain.run, engine, {})[0] == results  # the seed decides
    else:
        assert results == pytest.approx(expected, rel=tolerance, abs=tolerance)


def first_option(message: str) -> tuple[str, dict[str, Any]]:
    options = list(offered_options(message))
    assert options, f"the message offers no complete option:\n{message}"
    return options[0]


def assert_similar(actual: list[float], expected: list[float]) -> None:
    """Losses of other random numbers: their means are close at the beginning and at the end, and they fall."""
    count = len(expected) // 4
    for part in (slice(count), slice(-count, None)):
        assert sum(actual[part]) / count == pytest.approx(sum(expected[part]) / count, rel=0.1)
    assert sum(actual[-count:]) < sum(actual[:count])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("program", [pytest.param(p, id=p.name) for p in ALL])
def test_losses_are_those_of_the_plain_program(program: Program, dtype: torch.dtype, reasons: list[str]) -> None:
    compare(program, "threads", reasons, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("engine", ["processes"])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(p, id=p.name, marks=pytest.mark.slow if p.name in SLOW_IN_PROCESSES else ())
        for p in ALL
        if p.name in IN_PROCESSES | SLOW_IN_PROCESSES
    ],
)
def test_losses_in_worker_processes(program: Program, engine: str, reasons: list[str]) -> None:
    compare(program, engine, reasons, 1e-5)


def test_tokens_of_all_texts_beside_their_offsets_are_refused() -> None:
    """No option splits them. `bag_of_words` shows what to write: a list of texts, joined in `forward`."""

    class BagOfWords(nn.EmbeddingBag):
        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return super().forward(text, offsets)

    with instep.DataParallel(BagOfWords(30, 4), ["cpu"] * 2, engine="threads") as model:
        text, offsets = torch.randint(0, 30, (20,)), torch.tensor([0, 3, 9, 12])
        with pytest.raises(instep.StructureError, match="'offsets'"):
            model(text, offsets)
