"""A process that has torch loaded, and forks the ranks of one fault after the other: a fork takes milliseconds."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

from gradsync.cli import kernel
from gradsync.cli.chaos.fault import Fault
from gradsync.cli.chaos.hosts import Host
from gradsync.cli.chaos.plan import Choices, faults
from gradsync.cli.chaos.run import run
from gradsync.cli.report import Reporter, reporting

MODULE = "gradsync.cli.chaos.worker"
# The first optimizer of a process imports dynamo, which takes longer than a fault.
_PRELOADED = ("torch.optim", "torch._dynamo")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers are told. Each draws the same plan, and takes every so many'th fault of it."""

    seed: int
    workers: int
    choices: Choices
    hosts: tuple[Host, ...]
    """Two for each worker, or none."""
    single: Fault | None = None
    """Instead of a plan."""
    most: int | None = None
    """Faults, of all workers."""
    seconds: float | None = None
    """From when a worker is ready; a fault that has begun is brought to its end."""

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "single": None if self.single is None else self.single.to_json()})

    @classmethod
    def from_json(cls, line: str) -> Job:
        record = json.loads(line)
        choices = {**record["choices"], "transports": tuple(record["choices"]["transports"])}
        single = record["single"]
        return cls(
            **{
                **record,
                "choices": Choices(**choices),
                "hosts": tuple(Host(**one) for one in record["hosts"]),
                "single": None if single is None else Fault.from_json(single),
            }
        )

    def part(self, worker: int) -> Iterator[tuple[int, Fault]]:
        """The faults of one worker, numbered."""
        plan = faults(self.seed, self.choices) if self.single is None else iter([self.single])
        return islice(enumerate(plan), worker, self.most, self.workers)

    def hosts_of(self, worker: int) -> tuple[Host, ...]:
        return self.hosts[2 * worker : 2 * worker + 2]


def work(job: Job, worker: int, report: Reporter) -> None:
    until = math.inf if job.seconds is None else time.monotonic() + job.seconds
    for number, fault in job.part(worker):
        if time.monotonic() > until:
            break
        report.send("began", number=number, fault=fault.to_json())
        seen = run(fault, job.hosts_of(worker), number)
        report.send("seen", number=number, fault=fault.to_json(), seen=seen.to_json())


def main() -> None:
    with reporting() as report:
        kernel.adopt_orphans()
        for name in _PRELOADED:
            importlib.import_module(name)
        if kernel.thread_count() != 1:
            raise RuntimeError("an import started a thread; a rank forked from here could deadlock")
        gc.collect()
        gc.freeze()  # spares the ranks from copying every page when the collector marks objects
        work(Job.from_json(sys.argv[1]), int(os.environ["RANK"]), report)


if __name__ == "__main__":
    main()
