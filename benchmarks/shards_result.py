"""What it costs that a step does not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine
from benchmarks.ratios import Spread, spread


@dataclass(frozen=True, kw_only=True)
class ShardsCost:
    """On one transport: by shards to accumulating, pair by pair, by the models' keys."""

    transport: str
    by_model: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        """Of all models."""
        return [ratio for ratios in self.by_model.values() for ratio in ratios]

    def spreads(self) -> dict[str, Spread]:
        return {key: spread(ratios) for key, ratios in self.by_model.items() if len(ratios) > 1}


@dataclass(frozen=True, kw_only=True)
class ShardsResult:
    ranks: int
    shards_a_rank: int
    costs: list[ShardsCost]
    machine: Machine = field(default_factory=Machine)

    def to_dict(self) -> dict[str, Any]:
        costs = [{**asdict(cost), "spreads": {k: str(s) for k, s in cost.spreads().items()}} for cost in self.costs]
        return {**asdict(self), "costs": costs}
