"""One rank of `python -m benchmarks bandwidth`: an all-reduce of one buffer, carrier by carrier.

Beside them a copy of as many bytes within each rank, all ranks at the same time: the limit. An all-reduce through
shared memory moves for each rank what such a copy moves. Of N ranks each adds up its N-th share of the buffer: it
reads the share from all N slots and writes the sum into all N, the size of one buffer read and as much written.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import mpi
from benchmarks.job import Told
from benchmarks.orders import balanced_orders
from benchmarks.together import Refused, together
from gradsync.cli.report import reporting
from gradsync.transport.base import Request
from gradsync.transport.choice import choose

MODULE = "benchmarks.bandwidth_rank"
WARM_UP = 3
MIB = 1024 * 1024
LIMIT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    carriers: list[str]
    sizes_mb: list[int]
    repetitions: int


@dataclass(frozen=True)
class Load:
    """A buffer and what moves it."""

    buffer: Tensor
    move: Callable[[], object]


def copying(numel: int) -> Load:
    source, target = torch.ones(numel), torch.empty(numel)
    return Load(source, lambda: target.copy_(source))


def by_gloo(numel: int) -> Load:
    buffer = torch.empty(numel)
    return Load(buffer, lambda: dist.all_reduce(buffer))


def by_mpi(numel: int) -> Load:
    world = mpi.world(dist.get_world_size())
    buffer = torch.empty(numel)
    described = mpi.memory(buffer)
    return Load(buffer, lambda: world.Allreduce(mpi.library().IN_PLACE, described))


def by_transport(numel: int, *, wish: str) -> Load:
    group = dist.group.WORLD
    assert group is not None
    transport = choose(group, wish, [])
    with transport.starting():
        pass
    (buffer,) = transport.allocate([Request(numel, torch.float32, torch.device("cpu"))])
    return Load(buffer, lambda: transport.reduce(buffer, 1.0).wait())


def load(carrier: str, numel: int) -> Load:
    known = {"copy": copying, "gloo": by_gloo, "mpi": by_mpi}
    return known[carrier](numel) if carrier in known else by_transport(numel, wish=carrier)


class Lane:
    """A carrier with its load."""

    def __init__(self, key: str, numel: int) -> None:
        self.key = key
        self._load = load(key, numel)
        for _ in range(WARM_UP):
            self.measure()

    def measure(self) -> float:
        """Seconds. Raises if what came out is not the sum."""
        mine, ranks = dist.get_rank() + 1, dist.get_world_size()
        self._load.buffer.fill_(mine)
        dist.barrier()
        began = time.perf_counter()
        self._load.move()
        seconds = time.perf_counter() - began
        expected = mine if self.key == "copy" else ranks * (ranks + 1) // 2
        found = {bound.item() for bound in self._load.buffer.aminmax()}
        if found != {expected}:
            raise ArithmeticError(f"{self.key}: numbers from {min(found)} to {max(found)} instead of {expected}")
        return seconds


def lanes(carriers: Sequence[str], numel: int) -> tuple[list[Lane], dict[str, str]]:
    """Those that are there, and why the others are not."""
    there: list[Lane] = []
    absent: dict[str, str] = {}
    for key in carriers:
        try:
            there.append(together(lambda key=key: Lane(key, numel)))  # type: ignore[misc]
        except Refused as refused:
            absent[key] = str(refused)
    return there, absent


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        gc.disable()
        for size in job.sizes_mb:
            there, absent = lanes(job.carriers, size * MIB // 4)
            report.send("field", absent=absent)
            orders = balanced_orders(len(there))
            for number in range(job.repetitions):
                turns = [there[place] for place in orders[number % len(orders)]]
                report.send("repetition", size=size, times={lane.key: lane.measure() for lane in turns})
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
