"""torchft's lighthouse, which its replicas ask who is there, as a process that tells its address."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.job import Told
from gradsync.cli import kernel
from gradsync.cli.report import reporting

MODULE = "benchmarks.torchft_lighthouse"
ADDRESS, ABSENT = "address", "absent"
TICK_MILLISECONDS, JOIN_MILLISECONDS = 100, 10_000  # as its own example has them


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    least: int
    """Replicas that must be there."""


def main() -> None:
    with reporting() as report:
        kernel.die_with(os.getppid())
        job = Job.from_json(sys.argv[1])
        try:
            coordination: Any = importlib.import_module("torchft.coordination")
        except Exception as error:  # whatever it raises beside a torch that it does not know
            report.send(ABSENT, why=str(error))
            return
        lighthouse = coordination.LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=job.least,
            join_timeout_ms=JOIN_MILLISECONDS,
            quorum_tick_ms=TICK_MILLISECONDS,
        )
        report.send(ADDRESS, value=lighthouse.address())
        signal.pause()


if __name__ == "__main__":
    main()
