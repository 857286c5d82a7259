"""What was measured, and what follows from it: frozen, shown as tables and kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.contenders import PLAIN, TORCH_BEST
from benchmarks.machine import Machine

LINEAR = 1.1  # an exponent up to here counts as linear growth: timings are never exact

Times = dict[str, tuple[float, float]]  # contender -> seconds of one round: by the clock, of processor time


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One contender with one number of parameters. Medians over the rounds; overheads are medians of differences
    to the round without communication next to it."""

    ranks: int
    parameters: int
    contender: str
    rounds: int
    clock_ms: float
    host_ms: float
    clock_overhead_ms: float
    host_overhead_ms: float
    clock_ratio_to_best: float  # of overheads, to torch's DDP at its best
    host_ratio_to_best: float

    @property
    def us_per_parameter(self) -> float:
        return self.host_overhead_ms * 1e3 / self.parameters


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the host's overhead grows with the number of parameters: as its power `exponent`, where it is steepest."""

    ranks: int
    contender: str
    exponent: float

    @property
    def linear(self) -> bool:
        return self.exponent <= LINEAR


@dataclass(frozen=True, kw_only=True)
class Result:
    costs: list[Cost]
    growths: list[Growth]
    seconds: float
    machine: Machine = field(default_factory=Machine)

    def of(self, ranks: int, parameters: int) -> list[Cost]:
        return [c for c in self.costs if c.ranks == ranks and c.parameters == parameters]

    def to_dict(self) -> dict[str, Any]:
        costs = [{**asdict(cost), "us_per_parameter": cost.us_per_parameter} for cost in self.costs]
        growths = [{**asdict(growth), "linear": growth.linear} for growth in self.growths]
        return {**asdict(self), "costs": costs, "growths": growths}


def costs_of(ranks: int, parameters: int, rounds: Sequence[Times]) -> list[Cost]:
    """One cost for each contender."""
    return [_cost(ranks, parameters, contender, rounds) for contender in rounds[0]]


def _cost(ranks: int, parameters: int, contender: str, rounds: Sequence[Times]) -> Cost:
    clock, host = (1e3 * median(times[contender][i] for times in rounds) for i in (0, 1))
    over_clock, over_host = _overhead(contender, rounds)
    best_clock, best_host = _overhead(TORCH_BEST.key, rounds)
    return Cost(
        ranks=ranks,
        parameters=parameters,
        contender=contender,
        rounds=len(rounds),
        clock_ms=clock,
        host_ms=host,
        clock_overhead_ms=over_clock,
        host_overhead_ms=over_host,
        clock_ratio_to_best=_ratio(over_clock, best_clock),
        host_ratio_to_best=_ratio(over_host, best_host),
    )


def _ratio(value: float, to: float) -> float:
    return value / to if to else math.nan


def _overhead(contender: str, rounds: Sequence[Times]) -> tuple[float, float]:
    """Milliseconds above the plain round, by the clock and of processor time."""
    clock, host = (1e3 * median(times[contender][i] - times[PLAIN.key][i] for times in rounds) for i in (0, 1))
    return clock, host


def growths_of(costs: Sequence[Cost]) -> list[Growth]:
    """One for each number of ranks and contender that was measured with several numbers of parameters."""
    rows: dict[tuple[int, str], list[Cost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.parameters):
        if cost.contender != PLAIN.key:
            rows.setdefault((cost.ranks, cost.contender), []).append(cost)
    return [
        Growth(ranks=ranks, contender=contender, exponent=max(_exponent(a, b) for a, b in pairwise(row)))
        for (ranks, contender), row in rows.items()
        if len(row) > 1
    ]


def _exponent(fewer: Cost, more: Cost) -> float:
    """From noise of nothing, as tiny runs may measure it, nothing follows."""
    if fewer.host_overhead_ms <= 0 or more.host_overhead_ms <= 0:
        return math.nan
    return math.log(more.host_overhead_ms / fewer.host_overhead_ms) / math.log(more.parameters / fewer.parameters)
