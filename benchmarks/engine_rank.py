"""One rank of `python -m benchmarks engine`: what a round costs the host, contender by contender.

All contenders live in the same process and take turns round by round, each time in another order: whatever
else the machine does hits all of them alike, and differences are taken within a round.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.chain import chain_input, make_chain
from benchmarks.contenders import IN_ENGINE, Contender
from benchmarks.job import Told
from gradsync.cli.report import Reporter, reporting

MODULE = "benchmarks.engine_rank"
WARM_UP = 4  # torch arranges its buckets anew after the first round, gradsync learns in it


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    rounds: int
    parameters: list[int]

    def rounds_of(self, parameters: int) -> int:
        """Short rounds are noisy and cheap: there are up to ten times more of them; of long ones, a third."""
        return max(self.rounds // 3, self.rounds * min(10, 2000 // parameters), 1)

    @property
    def total(self) -> int:
        return sum(map(self.rounds_of, self.parameters))


class Entrant:
    """A contender with its module, ready to run rounds."""

    def __init__(self, contender: Contender, parameters: int) -> None:
        self.key = contender.key
        module = make_chain(parameters)
        self._parameters = list(module.parameters())
        self._module: nn.Module = contender.wrap(module).module

    def round(self, x: Tensor) -> None:
        for parameter in self._parameters:  # zero_grad without the search for parameters
            parameter.grad = None
        self._module(x).sum().backward()

    def measure(self, x: Tensor) -> tuple[float, float]:
        """Seconds of one round by the clock, and of this thread's processor time, without waiting."""
        dist.barrier()
        wall, busy = time.perf_counter(), time.thread_time()
        self.round(x)
        return time.perf_counter() - wall, time.thread_time() - busy


def compete(parameters: int, rounds: int, report: Reporter | None) -> None:
    x = chain_input()
    entrants = [Entrant(contender, parameters) for contender in IN_ENGINE]
    for _ in range(WARM_UP):
        for entrant in entrants:
            entrant.round(x)
    gc.collect()
    gc.freeze()  # else each contender pays for looking through the modules of all others
    for number in range(rounds):
        start = number % len(entrants)
        times = {e.key: e.measure(x) for e in (*entrants[start:], *entrants[:start])}
        if report is not None:
            report.send("round", parameters=parameters, times=times)
    gc.unfreeze()


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        speaker = report if dist.get_rank() == 0 else None
        for parameters in job.parameters:
            compete(parameters, job.rounds_of(parameters), speaker)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
