"""One trial of a module: a few samples in two parts and together, and what is noted of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from instep.errors import MergeError
from instep.known import Known, both, has_mean, is_close, is_doubtful, is_proven, is_unclear, joined, stands
from instep.precision import is_short, tolerances
from instep.replicas.carry import Slot
from instep.replicas.equal import equal
from instep.replicas.probing import probing
from instep.replicas.sandbox import Sandbox, copied, finer, is_row
from instep.replicas.settle import refuse_writes
from instep.structure.company import changed, companies, out_of_order, scaled
from instep.structure.judge import Findings, Named, Trial, judge
from instep.structure.merge_messages import across_samples
from instep.structure.outline import outline
from instep.structure.plan import SplitPlan
from instep.structure.roles import Ready, has_role
from instep.structure.split import apply_plan, uncut
from instep.structure.telling import Trait, telling_window, told_by, traits_in
from instep.structure.tree import map_tensors
from instep.structure.trial_sizes import WIDE, even_sizes, sizes_for, wider
from instep.structure.verdicts import Constant, Joined, Listed, Reduced, Unclear, Verdicts
from instep.structure.weights import best_window, counts_in, criteria_in

T = TypeVar("T")
Place = Callable[[Sequence[Any]], Sequence[Any]]
"""Brings one replica's arguments to the first device."""
Check = Callable[[Sequence[Any], bool, float], MergeError | None]
"""What is wrong with the outputs of both parts and the whole, given whether their numbers can be compared, and how
exactly; it may take out of them what only it needs."""
Run = tuple[Any, dict[str, Any], dict[str, Any]]
"""What `forward` gave, the attributes that it set, and what else it left on the module."""


class Attempt:
    """One trial, or several, for one call."""

    def __init__(
        self,
        method: str,
        named: Named,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        place: Place,
        least: int,
        carried: Sequence[Slot],
        check: Check | None = None,
    ) -> None:
        self.check = check
        self.refusal: MergeError | None = None
        """What the check said."""
        self.doubted: set[str] = set()
        self.varied: set[str] = set()
        self.constant: set[str] = set()
        self.carried = [slot for slot in carried if slot.module is not None]
        self.method, self.named, self.plan, self.values = method, named, plan, values
        self.positional, self.place = positional, place
        self.batch, self.least = plan.batch or 0, least
        self.inputs = dict(zip(plan.names, values, strict=True))
        self._traits: dict[Trait, Tensor] | None = None
        self.told: set[Trait] = set()
        self.wide = False
        """Whether as many samples are tried as there may be, at once."""
        self.even = False
        """Whether the module takes only even numbers of samples."""
        self.criteria: list[tuple[str, nn.Module]] = []

    @property
    def traits(self) -> dict[Trait, Tensor]:
        """The integers of this call that may decide what samples weigh."""
        if self._traits is None:
            self._traits = traits_in(self.inputs, self.batch)
        return self._traits

    def is_telling(self, known: Known) -> bool:
        """Whether this call has integers that means were not tried on."""
        return self.batch >= 2 and telling_window(self.traits, known.told, self._sizes()) is not None

    def make(self, source: nn.Module, device: torch.device, known: Known, rivals: Sequence[Any]) -> None:
        """Try, and note what was seen."""
        if self.batch < 2 or any(has_role(Ready, role) for role in self.plan.roles):
            known.words = "not tried: the batch came already split"
            known.ask_again(worth=False)
            return
        self.told, self.criteria = set(known.told), criteria_in(source)
        try:
            with probing() as excuses, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sandbox = _refusing(Sandbox, source, device)
                first, (findings, attributes) = self._first(sandbox, rivals, excuses)
                wide = self._sizes(many=True)
                if is_unclear(findings) and not findings.errors and wide != first:
                    more, attributes = self._closely(sandbox, wide, rivals, excuses)
                    findings = both(findings, more)
                if self._is_in_doubt(findings):
                    findings = both(findings, self._from_the_end(sandbox, first, excuses))
                if self._is_coarse(sandbox, findings) and not excuses:
                    findings, attributes = self._finely(sandbox, findings, attributes, excuses)
                if has_mean(findings.found, *attributes.values()) and not findings.errors:
                    findings, attributes = self._confirmed(sandbox, findings, attributes, excuses)
        except _Refused as refused:
            known.words = f"not tried: {refused}"
            known.ask_again(worth=known.trials < 2)
            return
        refuse_writes(source, sandbox.written)
        found, clashes = joined(known.found, findings)
        unexplained = [e for path, e in findings.errors.items() if not stands(known.found.get(path))]
        for error in (*unexplained, *clashes.values()):
            if self.check is None and not findings.errors.keys() & known.found.keys():
                known.refused = str(error)
            raise error
        known.found, known.told = found, self.told
        self.doubted |= known.doubted
        attributes = self._kept(known.attributes, attributes)
        known.attributes, known.doubted = attributes, frozenset(self.doubted)
        known.varied |= self.varied
        known.constant = (known.constant | self.constant) - known.varied - known.doubted
        why = f"; only shapes count: {', '.join(dict.fromkeys(excuses))}" if excuses else ""
        known.words = f"tried on {first[0]} and {first[1]} samples, and on them together{why}"
        left = [path for path in findings.open if not is_proven(known.found.get(path))]
        known.ask_again(worth=bool(left) or (bool(attributes) and known.trials < 1))

    def _first(
        self, sandbox: Sandbox, rivals: Sequence[Any], excuses: list[str]
    ) -> tuple[tuple[int, int], tuple[Findings, dict[str, Verdicts]]]:
        """The first trial, and the sizes of its parts; even ones where the module does not take odd ones."""
        try:
            return self._sizes(), self._closely(sandbox, self._sizes(), rivals, excuses)
        except _Refused:
            self.even = even_sizes(self.batch, self.least) is not None
            if not self.even:
                raise
            return self._sizes(), self._closely(sandbox, self._sizes(), rivals, excuses)

    def _sizes(self, *, many: bool = False) -> tuple[int, int]:
        """The samples of the two parts, a few or many."""
        many = many or self.wide
        if self.even:
            half = min(WIDE, (self.batch - 2) // 4 * 2) if many else 0
            sizes = even_sizes(self.batch, max(half, self.least))
            assert sizes is not None
            return sizes
        return wider(self.batch, self.least) if many else sizes_for(self.batch, self.least)

    def _closely(
        self, sandbox: Sandbox, sizes: tuple[int, int], rivals: Sequence[Any], excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        """A trial, and what it takes to see that rows do not follow one another, nor integers differ, by chance."""
        start = self._window(sizes, rivals)
        findings, attributes = self._try(sandbox, sizes, start, excuses)
        if any(isinstance(verdict, Listed) for verdict in findings.found.values()) and sizes[0] != sizes[1]:
            # Every second row follows on, too, after a part of an even number of samples.
            findings = both(findings, self._try(sandbox, (sizes[1], sizes[0]), start, excuses)[0])
        if (findings.turned or findings.ordered) and not findings.errors and not self.carried:
            self._in_other_company(sandbox, sizes, start, findings)
        return findings, attributes

    def _is_in_doubt(self, findings: Findings) -> bool:
        """Whether the last samples may say what the first ones did not."""
        found = findings.found.values()
        zeros = self.wide and any(isinstance(verdict, Unclear) for verdict in found)
        return not findings.errors and (zeros or any(map(is_doubtful, found)))

    def _from_the_end(self, sandbox: Sandbox, sizes: tuple[int, int], excuses: list[str]) -> Findings:
        """Another trial, on the last samples, with the parts exchanged.

        Where a part of the first ones gave nothing, these may give something; and numbers of labels that happen to
        be in the ratio of other weights are so once, not twice.
        """
        return self._try(sandbox, (sizes[1], sizes[0]), self.batch - sum(sizes), excuses)[0]

    def _is_coarse(self, sandbox: Sandbox, findings: Findings) -> bool:
        """Whether rounding may be what keeps values from being explained."""
        if any(is_close(verdict) for verdict in findings.found.values()):
            return True
        return bool(findings.errors) and is_short(sandbox, self.inputs)

    def _finely(
        self, sandbox: Sandbox, findings: Findings, attributes: dict[str, Verdicts], excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        """The trial in double precision, in which a mean is told from anything else by far smaller differences.

        What an output means has nothing to do with its precision. Where `forward` does not run in it, nothing changes.
        """
        seen = self.varied, self.constant  # every number is another one in double precision
        self.varied, self.constant = set(), set()
        try:
            with sandbox.finely():
                more, later = self._closely(sandbox, self._sizes(), (), excuses)
        except _Refused:
            return findings, attributes
        finally:
            self.varied, self.constant = seen
        errors = {path: error for path, error in findings.errors.items() if path not in more.found}
        kept = {path: verdict for path, verdict in findings.found.items() if path not in more.found}
        found = {**kept, **more.found}
        still = {path for path in findings.open | more.open if not is_proven(found.get(path))}
        return Findings(found, still, {**errors, **more.errors}), later

    def _confirmed(
        self, sandbox: Sandbox, findings: Findings, attributes: dict[str, Verdicts], excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        """Means are tried on other samples too, a few and then more, while there are integers not tried yet."""
        for sizes in (self._sizes(), self._sizes(many=True)):
            start = telling_window(self.traits, self.told, sizes)
            if start is None or findings.errors:
                break
            more, later = self._try(sandbox, sizes, start, excuses)
            findings, attributes = both(findings, more), self._kept(attributes, later)
        return findings, attributes

    def _try(
        self, sandbox: Sandbox, sizes: tuple[int, int], start: int, excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        inputs, runs = self._run(sandbox, sizes, start)
        if sandbox.excuse is not None:
            excuses.append(sandbox.excuse)
        if sandbox.drew and not excuses:
            noisy = runs
            sandbox.drew = False
            sandbox.quieten()
            inputs, runs = self._run(sandbox, sizes, start)
            if sandbox.drew or [outline(r[0]) for r in runs] != [outline(r[0]) for r in noisy]:
                excuses.append("forward draws random numbers")
                runs = noisy
        outputs = [output for output, _, _ in runs]
        tolerance, fine = tolerances(sandbox, inputs[2], outputs)
        sure = not excuses
        if self.check is not None:
            self.refusal = self.check(outputs, sure, tolerance)
            if self.refusal is not None:
                raise self.refusal

        def trial(outputs: Sequence[Any]) -> Trial:
            return Trial(sizes, (outputs[0], outputs[1]), outputs[2], inputs, tolerance, fine, sure, self.criteria)

        findings = judge(trial(outputs), self.named)
        tables = [table for _, table, _ in runs]
        left = [table for _, _, table in runs] if sure else []
        for place in dict.fromkeys(place for table in left for place in table):
            same = all(place in table and equal(table[place], left[0][place]) for table in left)
            (self.constant if same else self.varied).add(place)
        attributes: dict[str, Verdicts] = {}
        for name in dict.fromkeys(name for table in tables for name in table) if sure else ():
            held = sandbox.held(name)
            rows = [table.get(name) for table in tables]
            if any(map(is_row, rows)):
                (self.doubted if any(row != rows[0] for row in rows) else self.constant).add(name)
                continue
            said = judge(trial([table.get(name, held) for table in tables]), Named())
            said.found = {path: v for path, v in said.found.items() if not isinstance(v, Unclear)}
            if said.errors or _adds_up(held, said):
                self.doubted.add(name)
            elif said.found:
                attributes[name] = {path: v for path, v in said.found.items() if not isinstance(v, Constant)}
                self.constant |= set() if attributes[name] or said.open - said.found.keys() else {name}
        attributes = {name: found for name, found in attributes.items() if found}
        if has_mean(findings.found, *attributes.values()):
            self.told |= told_by(self.traits, start, sizes)
        return findings, attributes

    def _kept(self, before: Mapping[str, Verdicts], later: Mapping[str, Verdicts]) -> dict[str, Verdicts]:
        """What is known of attributes after another trial; doubt stays."""
        known = {**before, **later}
        for name in before.keys() & later.keys():
            known[name], clashes = joined(before[name], Findings(dict(later[name])))
            self.doubted |= {name} if clashes else set()
        return {name: found for name, found in known.items() if name not in self.doubted}

    def _in_other_company(self, sandbox: Sandbox, sizes: tuple[int, int], start: int, findings: Findings) -> None:
        """The same samples in another order, and with others: what is theirs alone does not change with that.

        Asked of rows, which may have been in the order that `forward` brings them into, and of integers that rounding
        may have turned over.
        """
        n = sum(sizes)
        singles = self._cut([start, *[1] * n, self.batch - start - n], n)

        def run(who: Sequence[int], kept: Sequence[int], factor: float = 1.0) -> Any:
            values = []
            for at, role in enumerate(self.plan.roles):
                column = [singles[index][at] for index in who]
                loud = [v if place in kept else scaled(role, v, factor) for place, v in enumerate(column)]
                values.append(uncut(role, column if factor == 1.0 else loud))
            return self._call(sandbox, values)[0]

        try:
            usual = _refusing(run, range(n), range(n))
        except _Refused:
            return  # samples that were put together one by one are not what it takes
        if findings.ordered:
            self._in_reverse(usual, lambda: _refusing(run, range(n)[::-1], range(n)), sizes, findings)
        for who, kept, factor in companies(sizes) if findings.turned and not findings.errors else ():
            try:
                output = _refusing(run, who, kept, factor)
            except _Refused:
                continue  # it does not like such company
            path = changed(findings.found, findings.turned, usual, output, kept)
            if path is not None:
                why = "its entries depend on other samples of the batch: they change with their company"
                findings.errors[path] = across_samples(path, why, sizes)
                return

    def _in_reverse(
        self, usual: Any, turned_round: Callable[[], Any], sizes: tuple[int, int], findings: Findings
    ) -> None:
        """See whether samples in reverse order give the same in reverse; then rows in order are nothing but that."""
        try:
            output = turned_round()
        except _Refused:
            return
        for path in findings.ordered:
            verdict = findings.found.get(path)
            if out_of_order(path, verdict, usual, output):
                why = "its entries depend on other samples of the batch: they change with the order of the samples"
                findings.errors[path] = across_samples(path, why, sizes)
            elif isinstance(verdict, Joined):
                findings.found[path] = Joined(verdict.rank, verdict.dim)
                findings.open.discard(path)

    def _window(self, sizes: tuple[int, int], rivals: Sequence[Any]) -> int:
        """The first sample of a trial: where rivals differ, or else labels and masks, or any integers there are."""
        named = rivals or (not self.told and counts_in(self.inputs, self.batch))
        telling = None if named else telling_window(self.traits, self.told, sizes)
        return best_window(self.inputs, self.batch, sizes, rivals) if telling is None else telling

    def _call(self, sandbox: Sandbox, values: Sequence[Any]) -> Run:
        mine = _refusing(copied, values)
        if sandbox.fine:
            mine = [map_tensors(finer, value) for value in mine]
        named = dict(zip(self.plan.names[self.positional :], mine[self.positional :], strict=True))
        return _refusing(sandbox.run, self.method, mine[: self.positional], named)

    def _run(
        self, sandbox: Sandbox, sizes: tuple[int, int], start: int
    ) -> tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], list[Run]]:
        """The arguments of both parts and of the whole, and what each gave."""
        apart = self._cut([start, *sizes, self.batch - start - sum(sizes)], 2)
        together = self._cut([start, sum(sizes), self.batch - start - sum(sizes)], 1)
        inputs, runs = [], []
        places = [(start, sizes[0]), (start + sizes[0], sizes[1]), (start, sum(sizes))]
        for shard, (first, count) in zip((*apart, *together), places, strict=True):
            for slot in self.carried:
                sandbox.lend(slot, slot.cut([first, count, self.batch - first - count])[1])
            inputs.append(dict(zip(self.plan.names, shard, strict=True)))
            runs.append(self._call(sandbox, shard))
        return (inputs[0], inputs[1], inputs[2]), runs

    def arguments(self, sandbox: Sandbox, sizes: tuple[int, int]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """The arguments of both parts and of the whole; each is to be used before the next is asked for."""
        total, rest = sum(sizes), self.batch - sum(sizes)
        shards = [*self._cut([0, *sizes, rest], 2), *self._cut([0, total, rest], 1)]
        for shard, (first, count) in zip(shards, [(0, sizes[0]), sizes, (0, total)], strict=True):
            for slot in self.carried:
                sandbox.lend(slot, slot.cut([first, count, self.batch - first - count])[1])
            mine = copied(shard)
            named = dict(zip(self.plan.names[self.positional :], mine[self.positional :], strict=True))
            yield mine[: self.positional], named

    def _cut(self, sizes: Sequence[int], wanted: int) -> list[list[Any]]:
        """The first `wanted` parts after the samples that are skipped."""
        present = [size for size in sizes if size]
        skipped = 1 if sizes[0] else 0
        plan = SplitPlan(self.batch, tuple(present), self.plan.names, self.plan.roles)
        with torch.no_grad():
            shards = apply_plan(plan, self.values)[skipped : skipped + wanted]
            return [list(self.place(shard)) for shard in shards]


class _Refused(Exception):
    """The module, or an argument, has something against a trial; the call itself may be fine."""


def _refusing(work: Callable[..., T], *args: Any) -> T:
    """What some work gives that runs code of the user's."""
    try:
        return work(*args)
    except Exception as error:
        raise _Refused(f"{type(error).__name__}: {error}".strip().splitlines()[0]) from error


def _adds_up(old: Any, said: Findings) -> bool:
    """Whether an attribute may be a running total, which looks like a sum only as long as it starts from zero."""
    verdict = said.found.get(())
    if not isinstance(verdict, Reduced) or verdict.rules != ("sum",):
        return False
    return old == 0 if isinstance(old, (int, float)) else isinstance(old, Tensor) and not bool(old.any())
