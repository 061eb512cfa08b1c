"""The demo: compares the first steps with one device, trains, evaluates, saves, and prints each result."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import instep
from instep.cli.demo.corpus import Corpus, load
from instep.cli.demo.model import Reader, write_line
from instep.cli.demo.train import BATCH, Evaluation, Learner, Step, evaluate, predicts_the_same, prove

PROVED_STEPS = 5
PROMPT = "def "


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line."""

    steps: int = 400
    replicas: int | None = None
    engine: str = "auto"
    out: Path = Path("instep-demo.pt")
    seed: int = 0


def run(options: DemoOptions, console: Console) -> int:
    """Run the demo. Returns the exit code: 0 if all checks pass, else 1."""
    started = time.perf_counter()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    corpus = load(options.seed)
    devices = choose_devices(options.replicas)
    module = Reader().to(to_device(devices[0]))
    plain = copy.deepcopy(module)
    introduce(console, corpus, module, devices)

    with instep.DataParallel(module, device_ids=devices, engine=options.engine) as model:
        learner = Learner(model, options.steps)
        proved = min(PROVED_STEPS, options.steps)
        first = [corpus.batch(step, BATCH) for step in range(proved)]
        proof = prove(Learner(plain, options.steps), learner, first)
        show_proof(console, proof, len(devices))
        if not all(step.holds for step in proof):
            return 1
        console.print(Panel(Text(str(model.explain(first[0]))), title="model.explain(batch)", expand=False))
        rate = train(console, learner, corpus, range(proved, options.steps))
        evaluation = evaluate(model, corpus)
        exact = evaluation.is_exact(corpus.held_out)
        show_evaluation(console, evaluation, corpus, exact)
        console.print(Text("it writes     ").append(write_line(module, PROMPT, options.seed), style="cyan"))
        torch.save(model.state_dict(), options.out)
        same = predicts_the_same(module, options.out, first[0])
        show_saved(console, options.out, same)
    summarize(console, rate, time.perf_counter() - started)
    return 0 if exact and same else 1


def choose_devices(replicas: int | None) -> list[int | str]:
    """All accelerators, or the CPU; by default at least two replicas."""
    # current_accelerator() returns "cuda" for a CUDA build even without a GPU.
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or kind.type not in {"cuda", "xpu"}:
        return ["cpu"] * (replicas or 2)
    count = torch.accelerator.device_count()
    wanted = range(replicas or max(2, count))
    return [number % count if kind.type == "cuda" else f"{kind.type}:{number % count}" for number in wanted]


def to_device(device: int | str) -> torch.device:
    """The torch device of an entry of `device_ids`."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def introduce(console: Console, corpus: Corpus, module: Reader, devices: list[int | str]) -> None:
    """Print the versions, the data, the model and the devices."""
    size = sum(parameter.numel() for parameter in module.parameters())
    console.print(f"[bold]instep {instep.__version__}[/], torch {torch.__version__}")
    console.print(f"data          {len(corpus.train):,} snippets of the standard library, of many lengths")
    console.print(f"model         a character transformer of {size:,} parameters")
    console.print(f"replicas      {', '.join(str(to_device(device)) for device in devices)}")


def show_proof(console: Console, proof: list[Step], replicas: int) -> None:
    """Print the losses of both runs, and the differences of losses, gradients and weights."""
    table = Table(title="losses of the first steps, and differences between the two runs")
    for name in (
        "step",
        "one device",
        f"{replicas} replica{'s' * (replicas > 1)}",
        "loss diff",
        "grad diff",
        "weight diff",
    ):
        table.add_column(name, justify="right")
    for number, step in enumerate(proof, start=1):
        differences = (f"{value:.0e}" for value in (step.loss, step.gradients, step.weights))
        table.add_row(
            str(number), f"{step.plain:.6f}", f"{step.instep:.6f}", *differences, style="" if step.holds else "red"
        )
    console.print(table)
    same = all(step.holds for step in proof)
    verdict = "[green]the same up to float32 rounding[/]" if same else "[bold red]NOT the same[/]"
    console.print(f"proof         losses, gradients and weights are {verdict}")


def train(console: Console, learner: Learner, corpus: Corpus, steps: range) -> float:
    """Run the remaining steps with a progress bar. Returns the samples per second."""
    columns = (
        TextColumn("training     "),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.0f} samples/s"),
        TimeRemainingColumn(),
    )
    if not steps:
        return 0.0
    rate, started = 0.0, time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=len(steps), loss=float("nan"), rate=0.0)
        for done, step in enumerate(steps, start=1):
            loss = learner.step(corpus.batch(step, BATCH))
            rate = done * BATCH / (time.perf_counter() - started)
            progress.update(task, advance=1, loss=loss, rate=rate)
    return rate


def show_evaluation(console: Console, evaluation: Evaluation, corpus: Corpus, exact: bool) -> None:
    """Print the held-out result and whether every sample was counted once."""
    seen, total = len(evaluation.locations), len(corpus.held_out)
    verdict = "[green]each once, in order[/]" if exact else "[bold red]NOT each once, in order[/]"
    console.print(f"held out      {evaluation.bits:.3f} bits per character; {seen} of {total} samples, {verdict}")


def show_saved(console: Console, path: Path, same: bool) -> None:
    """Print where the weights are, and whether a plain module that loads them predicts the same."""
    verdict = (
        "[green]a plain module loads it and predicts the same[/]"
        if same
        else "[bold red]a plain module predicts something else[/]"
    )
    console.print(Text("saved         ").append(str(path)).append("; ").append(Text.from_markup(verdict)))


def summarize(console: Console, rate: float, seconds: float) -> None:
    """Print the throughput and the total time."""
    console.print(f"done          {rate:.0f} samples/s, {seconds:.0f} s in all")
