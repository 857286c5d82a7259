"""`python -m benchmarks records`: what it costs that each round is recorded, of which statistics are made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType
from rich.table import Table

from benchmarks import records_rank
from benchmarks.records_result import RecordsCost, RecordsResult
from benchmarks.run import BenchRun
from benchmarks.tables import make_table
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP

TRANSPORTS = ("shared_memory", "process_group")


def records(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    repetitions: int = typer.Option(200, min=2, help="Pairs of steps."),
    json: Path = typer.Option(Path("bench-out/records.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Steps with all records and without any.

    In turns: of the GPT as a ratio, of a small model in microseconds.
    """
    raise typer.Exit(RecordsBench(ranks, repetitions, json).run())


class RecordsBench(BenchRun):
    def __init__(self, ranks: int, repetitions: int, json: Path) -> None:
        super().__init__(json)
        self.ranks = ranks
        self.repetitions = repetitions
        self._told: dict[str, dict[int, list[dict[str, Any]]]] = {}

    def measure(self) -> None:
        for transport in TRANSPORTS:
            told = self._told[transport] = {rank: [] for rank in range(self.ranks)}
            job = records_rank.Job(transport=transport, repetitions=self.repetitions)
            with (
                self.progress.part(f"{transport}, {count(self.ranks, 'rank')}", self.repetitions),
                Ranks(records_rank.MODULE, [job.to_json()], ranks=self.ranks) as started,
            ):
                for rank, record in started.reports():
                    told[rank].append(record)
                    if rank == 0:
                        self.progress.step()
                    self.keep()

    def so_far(self) -> RecordsResult | None:
        costs = [self._cost(transport) for transport in self._told]
        known = [cost for cost in costs if len(cost.ratios) > 1]
        return RecordsResult(ranks=self.ranks, costs=known) if known else None

    def _cost(self, transport: str) -> RecordsCost:
        """From the pairs of steps that all ranks have told of. A step takes as long as on the slowest."""
        pairs = list(zip(*self._told[transport].values(), strict=False))
        slowest = [[max(one["times"][which] for one in pair) for which in (0, 1)] for pair in pairs]
        return RecordsCost(
            transport=transport,
            ratios=[with_it / without for with_it, without in slowest],
            core_ratios=[pair[0]["cores"][0] / pair[0]["cores"][1] for pair in pairs],
            microseconds=[one for pair in pairs for one in pair[0]["microseconds"]],
        )

    def parts(self, result: RecordsResult) -> Iterable[RenderableType]:
        yield table(result)


def table(result: RecordsResult) -> Table:
    title = f"{count(result.ranks, 'rank')}: a step with all records, to one without any"
    made = make_table(title, "pairs", "GPT: time", "GPT: training\nthread on a core", "a round of\n9 buckets")
    for cost in result.costs:
        cells = (str(len(cost.ratios)), cost.time, cost.core, f"{cost.median_microseconds:.0f} µs")
        made.add_row(f"  {cost.transport}", *cells)
    return made
