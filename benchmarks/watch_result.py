"""What the watch costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine


@dataclass(frozen=True, kw_only=True)
class WatchCost:
    """On one transport; with the watch to without, pair by pair."""

    transport: str
    ratios: list[float]  # of times, on the slowest rank
    core_ratios: list[float]  # of the training thread's time on a core, on rank 0
    thread_share: float  # of the time, that the watch's thread is on a core

    @property
    def time(self) -> str:
        return figure(self.ratios)

    @property
    def core(self) -> str:
        return figure(self.core_ratios)


@dataclass(frozen=True, kw_only=True)
class WatchResult:
    ranks: int
    costs: list[WatchCost]
    machine: Machine = field(default_factory=Machine)

    def to_dict(self) -> dict[str, Any]:
        costs = [{**asdict(cost), "time": cost.time, "core": cost.core} for cost in self.costs]
        return {**asdict(self), "costs": costs}


def figure(ratios: Sequence[float]) -> str:
    """The median, and how far it may be off, if they were normal."""
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.4f} ± {1.25 * (upper - lower) / 1.35 / len(ratios) ** 0.5:.4f}"
