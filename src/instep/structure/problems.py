"""Problems of a call: arguments that cannot be split, outputs and attributes that cannot be merged, their errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from instep.errors import MergeError, StateError, StructureError

ErrorT = TypeVar("ErrorT", bound=MergeError | StateError)


class SplitLine(NamedTuple):
    """An entry of `in_dims` that may solve a problem."""

    path: str
    """The dotted path of an argument; empty for a structure without names."""
    spec: Any
    condition: str
    """When it is right, in words."""

    def render(self) -> str:
        """The option as source code, with a comment."""
        return f"in_dims={{{self.path!r}: {self.spec!r}}}   # {self.condition}"


@dataclass(frozen=True)
class SplitProblem:
    """Arguments whose sizes alone do not say how to split them."""

    headline: str
    """What happened, where and why."""
    lines: tuple[SplitLine, ...]
    """What may be written, likely ones first. Only lines that were tried are shown as source code."""

    def render_choice(self, excluded: Collection[SplitLine] = ()) -> str:
        """What the user has to decide, in words. Lines that a trial refuted are left out."""
        lines = [line for line in self.lines if line not in excluded]
        paths = list(dict.fromkeys(line.path for line in lines))
        if len(paths) == 1:
            choices = ", ".join(f"{line.spec!r} if {line.condition}" for line in lines)
            return f"Say with in_dims what {repr(paths[0]) if paths[0] else 'the structure'} is: {choices}."
        choices = ", ".join(f"{line.spec!r} for {line.path!r} if {line.condition}" for line in lines)
        return f"Say with in_dims which it is: {choices}."


def split_error(headline: str, *lines: SplitLine) -> StructureError:
    """An error for arguments that cannot be split. What to write is in words: no line has been tried."""
    problem = SplitProblem(headline, tuple(dict.fromkeys(lines)))
    error = StructureError(f"{headline}\n{problem.render_choice()}")
    error.problem = problem
    return error


def tried_heading(count: int, value: str) -> str:
    """The sentence before lines that a trial confirmed."""
    what, gives = ("Write", "it gives") if count == 1 else ("Write one of", "each gives")
    return f"{what} (tried on samples of this batch: {gives} {value} of one device):"


class Line(NamedTuple):
    """A line that solves a problem, as source code."""

    keyword: str
    """`merge`, `state` or `dim`."""
    rule: str
    comment: str = ""
    method: str = ""
    """The method whose output it merges, if that is not `forward`."""


@dataclass(frozen=True)
class Problem:
    """An output or attribute that cannot be merged."""

    name: str
    """Its dotted path; empty for an output that is a single value."""
    headline: str
    """What happened, where and why, in one sentence."""
    advice: tuple[str, ...] = ()
    """What to write, for a problem whose rules were not tried."""
    hints: tuple[str, ...] = ()
    """Advice that holds whether rules were tried or not."""
    can_try: bool = True
    """Whether rules can be tried: they merge values, not the keys and the extra attributes of containers."""
    keyword: str = "merge"
    """The option that sets its rule: `merge`, or `state` for an attribute."""
    lines: tuple[Line, ...] = ()
    """Lines that gave the value of the whole batch on all samples tried, best first."""
    note: tuple[str, ...] = ()
    """What the trials of the rules have shown, and what to do if no line is right. Replaces the advice."""

    def render_advice(self) -> list[str]:
        """What to write, as text lines."""
        if not self.lines:
            return [*(self.note or self.advice), *self.hints]
        choices = [f"  {keyword_argument([(self.name, line)])}{_comment(line)}" for line in self.lines]
        return [tried_heading(len(choices), "the value"), *choices, *self.hints]


def _comment(line: Line) -> str:
    return f"   # {line.comment}" if line.comment else ""


def keyword_argument(rules: Sequence[tuple[str, Line]]) -> str:
    """One keyword argument as source code, from names or patterns with a line each.

    >>> keyword_argument([("loss", Line("merge", "'mean'")), ("n", Line("merge", "'sum'"))])
    "merge={'loss': 'mean', 'n': 'sum'}"
    """
    _, first = rules[0]
    table = f"{{{', '.join(f'{name!r}: {line.rule}' for name, line in rules)}}}"
    if first.keyword == "dim" or (len(rules) == 1 and not rules[0][0]):
        table = first.rule
    if first.method:
        return f"methods={{{first.method!r}: {{{first.keyword!r}: {table}}}}}"
    return f"{first.keyword}={table}"


def keyword_arguments(rules: Sequence[tuple[str, Line]]) -> list[str]:
    """Keyword arguments as source code, one for each option and method."""
    return [
        keyword_argument([(name, line) for name, line in rules if (line.keyword, line.method) == option])
        for option in dict.fromkeys((line.keyword, line.method) for _, line in rules)
    ]


def set_problems(error: ErrorT, problems: Iterable[Problem], names: Collection[str] = ()) -> ErrorT:
    """Give an error its problems, and the message that lists them.

    `names` are those of all outputs and attributes of the call: a pattern in the message matches no other one.
    """
    error.problems = tuple({(problem.keyword, problem.name): problem for problem in problems}.values())
    error.args = ("\n".join([_message(error.problems, names), *error.footer]),)
    return error


def add_footer(error: ErrorT, text: str) -> ErrorT:
    """The error with a sentence at the end of its message, also after its problems change."""
    error.footer = (*error.footer, text)
    error.args = (f"{error}\n{text}",)
    return error


def _message(problems: Sequence[Problem], names: Collection[str]) -> str:
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for problem in problems:  # problems without lines and with the same advice, apart from their names, share it
        advice = problem.render_advice()
        if not problem.lines:
            advice = [line.replace(repr(problem.name), "") for line in advice]
        groups.setdefault(tuple(advice), []).append(problem)
    blocks = ["\n".join([*(p.headline for p in group), *group[0].render_advice()]) for group in groups.values()]
    if len(problems) == 1:
        return blocks[0]
    text = f"{len(problems)} outputs or attributes cannot be merged.\n\n" + "\n\n".join(blocks)
    solved = [(problem.name, problem.lines[0]) for problem in problems if problem.lines]
    if len(solved) < 2:
        return text
    arguments = keyword_arguments(shorten(solved, names))
    unsolved = [repr(problem.name) for problem in problems if not problem.lines]
    without = f" (without {', '.join(unsolved)})" if unsolved else ""
    return f"{text}\n\nAll together{without}:\n  {', '.join(arguments)}"


def shorten(rules: Sequence[tuple[str, Line]], names: Collection[str]) -> list[tuple[str, Line]]:
    """Replace names that have one rule in common by a pattern, if it matches no other name of the call.

    >>> mean, total = Line("merge", "'mean'"), Line("merge", "'sum'")
    >>> [name for name, _ in shorten([("acc.a", mean), ("acc.b", mean), ("n", total)], ["acc.a", "acc.b", "n"])]
    ['acc.*', 'n']
    >>> [name for name, _ in shorten([("acc.a", mean), ("acc.b", mean)], ["acc.a", "acc.b", "acc.calls"])]
    ['acc.a', 'acc.b']
    """
    remaining, shortened = dict(rules), []
    for name, line in rules:
        if name not in remaining:
            continue
        parent, _, last = name.rpartition(".")
        for pattern in (f"{parent}.*", f"*.{last}") if parent else ():
            matches = {other for other in (*remaining, *names) if fnmatchcase(other, pattern)}
            if len(matches) > 1 and all(_same_rule(remaining.get(other), line) for other in matches):
                remaining = {other: rule for other, rule in remaining.items() if other not in matches}
                shortened.append((pattern, line))
                break
        else:
            del remaining[name]
            shortened.append((name, line))
    return shortened


def _same_rule(left: Line | None, right: Line) -> bool:
    return left is not None and left[:2] == right[:2]
