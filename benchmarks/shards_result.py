"""What it costs that a step does not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine
from benchmarks.models import MODELS
from benchmarks.ratios import Spread, geometric_mean, spread
from benchmarks.targets import Target

JUDGED = (2, 4)  # ranks, and shards of each


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

    def targets(self) -> list[Target]:
        """The mean over all models, if all were measured, and with as many shards as it is meant for."""
        judged = (self.ranks, self.shards_a_rank) == JUDGED
        made = []
        for cost in self.costs:
            medians = [found.median for found in cost.spreads().values()]
            mean = geometric_mean(medians) if judged and len(medians) == len(MODELS) else None
            made.append(Target(name=f"to accumulating, {cost.transport.replace('_', ' ')}", value=mean, limit=1.05))
        return made

    def to_dict(self) -> dict[str, Any]:
        costs = [{**asdict(cost), "spreads": {k: str(s) for k, s in cost.spreads().items()}} for cost in self.costs]
        return {**asdict(self), "costs": costs, "targets": [target.to_dict() for target in self.targets()]}
