"""One rank of the doctor's: meets the others, tries shared memory, measures, chooses a transport. Says how far it came.

A process of its own, which may hang: whoever has started it ends it. What it tries is what a training does, by the
same code.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsync import restarts
from gradsync.cli.doctor.facts import CHOSEN, CONNECTED, DONE, MEASURED, MET, SHARED, STARTED, Speed
from gradsync.cli.report import FD_VARIABLE, Reporter
from gradsync.errors import GradsyncError
from gradsync.transport.base import Request, Transport
from gradsync.transport.choice import choose
from gradsync.transport.handshake import location_or

MODULE = "gradsync.cli.doctor.trial"
SMALL, LARGE = 2**18, 2**22  # elements of float32: 1 and 16 MiB
SLOW = 0.25  # seconds that the small one may take before the large one is left out
REPETITIONS, QUESTIONS = 5, 8


class Trial:
    """This rank in it."""

    def __init__(self, report: Reporter, limit: float) -> None:
        self._report, self._limit = report, limit
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def run(self) -> None:
        self._reached(STARTED)
        store = self._meet()
        self._reached(MET)
        limit = timedelta(seconds=self._limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)
        self._reached(CONNECTED)
        hosts = self._hosts()
        self._share(hosts)
        world = _world()
        if self.size > 1:
            with _made(world, "process_group") as transport:
                self._tell(group_speed=asdict(measure(transport, list(range(self.size)))))
        self._reached(MEASURED)
        with _made(world, "auto") as transport:
            self._tell(transport=transport.name, reason=transport.reason)
        self._reached(CHOSEN)
        self._compare_clocks(hosts)
        self._tell(descriptors=len(list(Path("/proc/self/fd").iterdir())))
        dist.barrier()
        self._reached(DONE)

    def _reached(self, stage: str) -> None:
        self._tell(stage=stage)

    def _tell(self, **facts: object) -> None:
        self._report.send("facts", facts=facts)

    def _meet(self) -> Any:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=self._limit)
        store = dist.TCPStore(host, port, None, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        return dist.PrefixStore("gradsync/doctor/trial", restarts.apart(store))  # type: ignore[attr-defined]

    def _hosts(self) -> list[list[int]]:
        """The ranks by where they are."""
        places: list[str] = [""] * self.size
        dist.all_gather_object(places, location_or(f"rank {self.rank}"))
        return [[rank for rank in range(self.size) if places[rank] == place] for place in dict.fromkeys(places)]

    def _share(self, hosts: Sequence[Sequence[int]]) -> None:
        """Ranks of a host connect, and are told why if they can't."""
        groups = [dist.new_group(list(host)) for host in hosts]  # all ranks make all of them
        for host, group in zip(hosts, groups, strict=True):
            if self.rank in host and len(host) > 1 and group is not None:
                try:
                    with _made(group, "shared_memory") as transport:
                        self._tell(unshared="", shared_speed=asdict(measure(transport, list(host), group)))
                except GradsyncError as error:
                    self._tell(unshared=_shortened(error))
        self._reached(SHARED)

    def _compare_clocks(self, hosts: Sequence[Sequence[int]]) -> None:
        """Rank 0 is asked by the first rank of each other host what time it is."""
        for host in hosts[1:]:
            if self.rank == 0:
                for _ in range(QUESTIONS):
                    _receive(host[0])
                    _send(time.time(), host[0])
            elif self.rank == host[0]:
                skew, error = compare([self._ask() for _ in range(QUESTIONS)])
                self._tell(skew=skew, skew_error=error)

    def _ask(self) -> tuple[float, float, float]:
        """When it was asked and answered, by this clock, and what time it was there in between."""
        asked = time.time()
        _send(asked, 0)
        there = _receive(0)
        return asked, time.time(), there


def compare(answers: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds that this clock is ahead, and by how much that may be off, from the quickest answer."""
    asked, answered, there = min(answers, key=lambda one: one[1] - one[0])
    return (asked + answered) / 2 - there, (answered - asked) / 2


def _send(number: float, rank: int) -> None:
    dist.send(torch.tensor([number], dtype=torch.float64), rank)


def _receive(rank: int) -> float:
    number = torch.empty(1, dtype=torch.float64)
    dist.recv(number, rank)
    return float(number)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@contextmanager
def _made(group: dist.ProcessGroup, wanted: str) -> Iterator[Transport]:
    """As a replica makes it."""
    transport = choose(group, wanted, [])
    with transport.starting():
        pass
    yield transport


def measure(transport: Transport, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> Speed:
    """Of the slowest rank, in the median. Little is sent if that takes long already."""
    numel = SMALL
    seconds = _slowest(lambda: _reduce(transport, SMALL), group)
    if seconds < SLOW:
        numel = LARGE
        (buffer,) = transport.allocate([Request(numel, torch.float32, torch.device("cpu"))])
        buffer.fill_(0)
        transport.reduce(buffer, 1.0).wait()
        times = [_slowest(lambda: transport.reduce(buffer, 1.0).wait(), group) for _ in range(REPETITIONS)]
        seconds = statistics.median(times)
    return Speed(ranks=tuple(ranks), bytes_per_second=4 * numel / seconds)


def _reduce(transport: Transport, numel: int) -> None:
    (buffer,) = transport.allocate([Request(numel, torch.float32, torch.device("cpu"))])
    buffer.fill_(0)
    transport.reduce(buffer, 1.0).wait()


def _slowest(act: Callable[[], None], group: dist.ProcessGroup | None) -> float:
    """The same on all ranks, so that all go on alike."""
    dist.barrier(group)
    began = time.perf_counter()
    act()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, dist.ReduceOp.MAX, group)
    return float(taken)


def _shortened(error: BaseException) -> str:
    """On one line, without the places in torch's sources."""
    text = re.sub(r"\[enforce fail at [^]]*\] ", "", " ".join(str(error).split()))
    return text.partition(" Exception raised from ")[0][:500] or type(error).__name__


def main() -> None:
    report = Reporter(int(os.environ[FD_VARIABLE]))
    try:
        torch.set_num_threads(1)
        Trial(report, float(sys.argv[1])).run()
    except BaseException as error:  # told, with how far it came; tearing down a broken group can take long
        report.send("facts", facts={"error": f"{type(error).__name__}: {_shortened(error)}"})
        os._exit(0)
    os._exit(0)  # all is told


if __name__ == "__main__":
    main()
