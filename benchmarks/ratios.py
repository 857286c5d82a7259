"""From times to figures: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

Times = Mapping[str, float]  # contender -> seconds


@dataclass(frozen=True)
class Spread:
    """A median, and between what the middle half of the values lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def slowest(by_rank: Sequence[Times]) -> dict[str, float]:
    """One repetition as all ranks saw it: a step takes as long as on the rank on which it takes longest."""
    return {key: max(times[key] for times in by_rank) for key in by_rank[0]}


def ratio(repetitions: Sequence[Times], of: str, to: str) -> Spread:
    """Both from the same repetition: what slows down the machine for a while slows down both."""
    return spread([times[of] / times[to] for times in repetitions])


def fastest(repetitions: Sequence[Times], among: Iterable[str], to: str) -> str | None:
    """The contender with the lowest median ratio to `to`; None if none of them was measured."""
    measured = [key for key in among if key in repetitions[0]]
    return min(measured, key=lambda key: ratio(repetitions, key, to).median, default=None)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios: twice as fast on one model and twice as slow on another is 1."""
    return math.exp(sum(map(math.log, values)) / len(values))
