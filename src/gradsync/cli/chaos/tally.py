"""What came of the faults so far, by kind and phase."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from gradsync.cli.chaos.fault import Fault, Kind, Phase
from gradsync.cli.chaos.judge import Judgment, Verdict, judge
from gradsync.cli.chaos.outcome import Observation


class Case(NamedTuple):
    """One fault that is over."""

    number: int
    fault: Fault
    seen: Observation
    verdict: Verdict

    @property
    def is_bad(self) -> bool:
        return self.verdict.judgment is Judgment.BAD

    def to_json(self) -> str:
        """A line of the file that keeps all of them."""
        return json.dumps(
            {
                "number": self.number,
                "line": str(self.fault),
                "fault": self.fault.to_json(),
                "verdict": self.verdict.judgment.value,
                "reason": self.verdict.reason,
                "seconds": round(self.verdict.seconds, 4),
                "crowding": round(self.seen.crowding, 2),
                "took": round(self.seen.seconds, 3),
                "output": [one.output for one in self.seen.outcomes] if self.is_bad else [],
            }
        )


class Row(NamedTuple):
    """Of the table: one kind of fault in one phase."""

    kind: str
    phase: str
    faults: int
    went_on: int
    named: int
    bad: int
    median: float | None
    slowest: float | None

    def cells(self) -> list[str]:
        times = [f"{seconds:.3f}" if seconds is not None else "" for seconds in (self.median, self.slowest)]
        return [self.kind, self.phase, *map(str, (self.faults, self.went_on, self.named, self.bad)), *times]


COLUMNS = ("kind", "phase", "faults", "went on", "named", "bad", "median s", "slowest s")


@dataclass
class Tally:
    cases: list[Case] = field(default_factory=list)
    _undisturbed: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, number: int, fault: Fault, seen: Observation) -> Case:
        """Judges it. Trainings that went on must all have come to the same parameters."""
        alike = fault.transport, fault.ranks, fault.hosts, fault.steps
        verdict = judge(fault, seen, self._undisturbed.get(alike, ""))
        if verdict.judgment is Judgment.WENT_ON:
            self._undisturbed.setdefault(alike, seen.outcomes[0].finished)
        case = Case(number, fault, seen, verdict)
        self.cases.append(case)
        return case

    def count(self, judgment: Judgment) -> int:
        return sum(case.verdict.judgment is judgment for case in self.cases)

    @property
    def bad(self) -> list[Case]:
        return [case for case in self.cases if case.is_bad]

    def rows(self) -> Iterator[Row]:
        cases: defaultdict[tuple[Kind, Phase], list[Case]] = defaultdict(list)
        for case in self.cases:
            cases[case.fault.kind, case.fault.phase].append(case)
        for kind in Kind:
            for phase in Phase:
                if cases[kind, phase]:
                    yield _row(kind.value, phase.value, cases[kind, phase])
        if self.cases:
            yield _row("all", "", self.cases)

    def by_transport(self) -> str:
        """In one line."""
        found = Counter(f"{case.fault.transport}{' between hosts' * (case.fault.hosts > 1)}" for case in self.cases)
        return ", ".join(f"{name} {number}" for name, number in sorted(found.items()))


def _row(kind: str, phase: str, cases: list[Case]) -> Row:
    judged = Counter(case.verdict.judgment for case in cases)
    times = [case.verdict.seconds for case in cases if case.verdict.judgment is Judgment.NAMED]
    return Row(
        kind,
        phase,
        len(cases),
        judged[Judgment.WENT_ON],
        judged[Judgment.NAMED],
        judged[Judgment.BAD],
        median(times) if times else None,
        max(times, default=None),
    )
