"""`python -m benchmarks shards`: what it costs that a step does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import RenderableType
from rich.table import Table

from benchmarks import shards_rank
from benchmarks.models import MODELS
from benchmarks.pairs import Pair, PairBench
from benchmarks.shards_result import ShardsCost, ShardsResult
from benchmarks.tables import make_table, target_table
from gradsync.cli.display import count
from gradsync.cli.style import JSON_HELP


def shards(
    ranks: int = typer.Option(2, min=1, help="Processes, each with one thread."),
    shards_a_rank: int = typer.Option(4, min=1, help="Shards that each rank computes, or batches that it accumulates."),
    repetitions: int = typer.Option(20, min=2, help="Pairs of steps of each model."),
    json: Path = typer.Option(Path("bench-out/shards.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Steps by shards, and steps that accumulate as many batches on the same engine.

    In turns, with AdamW: the median ratio for each of five models.
    """
    raise typer.Exit(ShardsBench(ranks, shards_a_rank, repetitions, json).run())


class ShardsBench(PairBench[ShardsCost]):
    module = shards_rank.MODULE

    def __init__(self, ranks: int, shards_a_rank: int, repetitions: int, json: Path) -> None:
        super().__init__(ranks, repetitions * len(MODELS), json)
        self._shards_a_rank = shards_a_rank

    def job(self, transport: str) -> str:
        repetitions = self.repetitions // len(MODELS)
        job = shards_rank.Job(transport=transport, repetitions=repetitions, shards_a_rank=self._shards_a_rank)
        return job.to_json()

    def cost(self, transport: str, pairs: list[Pair]) -> ShardsCost:
        by_model: dict[str, list[float]] = {}
        for pair in pairs:
            with_it, without = (max(one["times"][which] for one in pair) for which in (0, 1))
            by_model.setdefault(pair[0]["model"], []).append(with_it / without)
        return ShardsCost(transport=transport, by_model=by_model)

    def so_far(self) -> ShardsResult | None:
        costs = self.costs()
        return ShardsResult(ranks=self.ranks, shards_a_rank=self._shards_a_rank, costs=costs) if costs else None

    def parts(self, result: ShardsResult) -> Iterable[RenderableType]:
        yield table(result)
        yield target_table(result.targets())


def table(result: ShardsResult) -> Table:
    each = count(result.shards_a_rank, "shard")
    title = f"{count(result.ranks, 'rank')} with {each} each: a step by shards, to one that accumulates"
    made = make_table(title, *(model.name for model in MODELS))
    for cost in result.costs:
        found = cost.spreads()
        made.add_row(f"  {cost.transport}", *(str(found.get(model.key, "")) for model in MODELS))
    return made
