"""Pure: facts -> all findings, and whether all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.cli.display import count
from gradsync.cli.doctor import host_checks, job_checks
from gradsync.cli.doctor.facts import Job
from gradsync.cli.doctor.finding import Finding, Level
from gradsync.cli.doctor.host_checks import HostView


@dataclass(frozen=True)
class Diagnosis:
    job: Job
    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Warnings don't break training."""
        return not self.of(Level.WRONG)

    def of(self, level: Level) -> list[Finding]:
        return [one for one in self.findings if one.level is level]

    def verdict(self) -> str:
        counts = [(self.of(Level.WRONG), "problem"), (self.of(Level.WARNING), "warning")]
        said = [count(len(found), noun) for found, noun in counts if found]
        return " and ".join(said) if said else "all fine"

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.is_well,
            "verdict": self.verdict(),
            "findings": [one.to_dict() for one in self.findings],
            "ranks": self.job.size,
            "hosts": [{"name": facts.host, "ranks": ranks} for facts, ranks in self.job.first_facts()],
            "transport": next((one.transport for one in self.job.attempts.values() if one.transport), ""),
            "facts": {rank: asdict(one) for rank, one in sorted(self.job.facts.items())},
            "attempts": {rank: asdict(one) for rank, one in sorted(self.job.attempts.items())},
        }


def diagnose(job: Job) -> Diagnosis:
    """`job` has the facts of at least one rank."""
    return Diagnosis(job, tuple(_findings(job)))


def _findings(job: Job) -> Iterator[Finding]:
    for of_job in job_checks.BEFORE:
        yield of_job(job)
    for of_host in host_checks.CHECKS:
        yield from _together([(job.host_name(ranks[0]), of_host(view(job, ranks))) for ranks in job.hosts])
    for of_job in job_checks.AFTER:
        yield of_job(job)


def view(job: Job, ranks: list[int]) -> HostView:
    return HostView(
        job.facts[ranks[0]],
        [job.facts[rank] for rank in ranks],
        [job.attempts[rank] for rank in ranks if rank in job.attempts],
        several_hosts=len(job.hosts) > 1,
        is_launched=job.is_launched,
        is_complete=not job.missing,
    )


def _together(found: Sequence[tuple[str, Finding]]) -> Iterator[Finding]:
    """What is said of all hosts alike, or is fine on all, is said once."""
    by_finding: dict[Finding, list[str]] = {}
    for name, one in found:
        by_finding.setdefault(one, []).append(name)
    name, first = found[0]
    if len(by_finding) == 1:
        yield first
    elif all(one.level is Level.FINE for one in by_finding):
        yield replace(first, text=f"{name}, much as the others: {first.text}")
    else:
        for one, names in by_finding.items():
            if one.level is not Level.FINE:
                yield replace(one, text=f"{', '.join(names)}: {one.text}")
