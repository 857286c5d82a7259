"""What it costs that each round is recorded."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine
from benchmarks.watch_result import figure


@dataclass(frozen=True, kw_only=True)
class RecordsCost:
    """On one transport; recorded to unrecorded, pair by pair."""

    transport: str
    ratios: list[float]  # of the GPT's times, on the slowest rank
    core_ratios: list[float]  # of the training thread's time on a core, on rank 0
    microseconds: list[float]  # more on a core, in each round of a model with few numbers in nine buckets

    @property
    def time(self) -> str:
        return figure(self.ratios)

    @property
    def core(self) -> str:
        return figure(self.core_ratios)

    @property
    def median_microseconds(self) -> float:
        return statistics.median(self.microseconds)


@dataclass(frozen=True, kw_only=True)
class RecordsResult:
    ranks: int
    costs: list[RecordsCost]
    machine: Machine = field(default_factory=Machine)

    def to_dict(self) -> dict[str, Any]:
        costs = [
            {**asdict(cost), "time": cost.time, "core": cost.core, "median_microseconds": cost.median_microseconds}
            for cost in self.costs
        ]
        return {**asdict(self), "costs": costs}
