"""Benchmarks of something that costs little: steps with it and without it, in turns, on each transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.run import BenchRun
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks

TRANSPORTS = ("shared_memory", "process_group")
Pair = tuple[dict[str, Any], ...]
"""What each rank has told of one pair of steps."""


class Cost(Protocol):
    """On one transport."""

    @property
    def ratios(self) -> list[float]: ...


C = TypeVar("C", bound=Cost)


class PairBench(BenchRun, Generic[C]):
    """Starts ranks for each transport, and keeps what they tell. A subclass makes its result of it."""

    module: str
    """Of one rank, which is told the transport and the repetitions."""

    def __init__(self, ranks: int, repetitions: int, json: Path) -> None:
        super().__init__(json)
        self.ranks, self.repetitions = ranks, repetitions
        self._told: dict[str, dict[int, list[dict[str, Any]]]] = {}

    def job(self, transport: str) -> str:
        """What every rank is told, as JSON."""
        raise NotImplementedError

    def cost(self, transport: str, pairs: list[Pair]) -> C:
        """From the pairs of steps that all ranks have told of."""
        raise NotImplementedError

    def measure(self) -> None:
        for transport in TRANSPORTS:
            told = self._told[transport] = {rank: [] for rank in range(self.ranks)}
            with (
                self.progress.part(f"{transport}, {count(self.ranks, 'rank')}", self.repetitions),
                Ranks(self.module, [self.job(transport)], ranks=self.ranks) as started,
            ):
                for rank, record in started.reports():
                    told[rank].append(record)
                    if rank == 0:
                        self.progress.step()
                    self.keep()

    def costs(self) -> list[C]:
        """Of the transports of which enough is known."""
        found = [self.cost(name, list(zip(*told.values(), strict=False))) for name, told in self._told.items()]
        return [cost for cost in found if len(cost.ratios) > 1]


def time_ratios(pairs: list[Pair]) -> list[float]:
    """With it to without. A step takes as long as on the slowest rank."""
    slowest = [[max(one["times"][which] for one in pair) for which in (0, 1)] for pair in pairs]
    return [with_it / without for with_it, without in slowest]


def core_ratios(pairs: list[Pair]) -> list[float]:
    """Of rank 0's training thread's time on a core."""
    return [pair[0]["cores"][0] / pair[0]["cores"][1] for pair in pairs]
