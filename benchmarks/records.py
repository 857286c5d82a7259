"""`python -m benchmarks records`: what it costs that each round is recorded, of which statistics are made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import RenderableType
from rich.table import Table

from benchmarks import records_rank
from benchmarks.pairs import Pair, PairBench, core_ratios, time_ratios
from benchmarks.records_result import RecordsCost, RecordsResult
from benchmarks.tables import make_table
from gradsync.cli.display import count
from gradsync.cli.style import JSON_HELP


def records(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    repetitions: int = typer.Option(200, min=2, help="Pairs of steps."),
    json: Path = typer.Option(Path("bench-out/records.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Steps with all records and without any.

    In turns: of the GPT as a ratio, of a small model in microseconds.
    """
    raise typer.Exit(RecordsBench(ranks, repetitions, json).run())


class RecordsBench(PairBench[RecordsCost]):
    module = records_rank.MODULE

    def job(self, transport: str) -> str:
        return records_rank.Job(transport=transport, repetitions=self.repetitions).to_json()

    def cost(self, transport: str, pairs: list[Pair]) -> RecordsCost:
        return RecordsCost(
            transport=transport,
            ratios=time_ratios(pairs),
            core_ratios=core_ratios(pairs),
            microseconds=[one for pair in pairs for one in pair[0]["microseconds"]],
        )

    def so_far(self) -> RecordsResult | None:
        return RecordsResult(ranks=self.ranks, costs=costs) if (costs := self.costs()) else None

    def parts(self, result: RecordsResult) -> Iterable[RenderableType]:
        yield table(result)


def table(result: RecordsResult) -> Table:
    title = f"{count(result.ranks, 'rank')}: a step with all records, to one without any"
    made = make_table(title, "pairs", "GPT: time", "GPT: training\nthread on a core", "a round of\n9 buckets")
    for cost in result.costs:
        cells = (str(len(cost.ratios)), cost.time, cost.core, f"{cost.median_microseconds:.0f} µs")
        made.add_row(f"  {cost.transport}", *cells)
    return made
