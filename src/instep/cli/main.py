"""The command line: `instep demo`, `instep run`. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import instep
from instep.cli import launch
from instep.engines.select import engine_names
from instep.errors import InstepError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors of instep and of the system are printed without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["run"]:  # its options are those of torchrun
            return launch.run(arguments[1:])
        return demo(parser().parse_args(arguments))
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except (InstepError, OSError) as error:
        print_error(str(error))
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="instep", description="Run a PyTorch module on several devices with the results of one."
    )
    top.add_argument("--version", action="version", version=f"instep {instep.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    command = commands.add_parser(
        "demo",
        help="train a small model on all devices and compare its steps with one device",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--steps", type=positive, default=400, help="training steps")
    command.add_argument("--replicas", type=positive, help="number of replicas (default: one per device, at least 2)")
    command.add_argument("--engine", choices=engine_names(), default="auto", help="how replicas run")
    command.add_argument("--out", type=Path, default=Path("instep-demo.pt"), help="where to save the weights")
    command.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the samples")
    commands.add_parser("run", help=f"run a script on one rank per GPU: {launch.USAGE}", add_help=False)
    return top


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def demo(options: argparse.Namespace) -> int:
    """Run `instep demo`."""
    from instep.cli.demo.run import DemoOptions, run

    demo_options = DemoOptions(options.steps, options.replicas, options.engine, options.out, options.seed)
    return run(demo_options, Console(highlight=False))


def print_error(message: str) -> None:
    """Print a message to standard error."""
    Console(stderr=True, highlight=False).print(Text("instep: ", style="bold red").append(message, style="default"))
