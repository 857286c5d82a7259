"""`python -m benchmarks watch`: what the watch between ranks costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType
from rich.table import Table

from benchmarks import watch_rank
from benchmarks.run import BenchRun
from benchmarks.tables import make_table
from benchmarks.watch_result import WatchCost, WatchResult
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP

TRANSPORTS = ("shared_memory", "process_group")


def watch(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    repetitions: int = typer.Option(200, min=2, help="Pairs of steps."),
    json: Path = typer.Option(Path("bench-out/watch.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Steps of the GPT with the watch between ranks, and without it.

    In turns: the median ratio, and what the watch's thread takes.
    """
    raise typer.Exit(WatchBench(ranks, repetitions, json).run())


class WatchBench(BenchRun):
    def __init__(self, ranks: int, repetitions: int, json: Path) -> None:
        super().__init__(json)
        self.ranks = ranks
        self.repetitions = repetitions
        self._told: dict[str, dict[int, list[dict[str, Any]]]] = {}

    def measure(self) -> None:
        for transport in TRANSPORTS:
            told = self._told[transport] = {rank: [] for rank in range(self.ranks)}
            job = watch_rank.Job(transport=transport, repetitions=self.repetitions)
            with (
                self.progress.part(f"{transport}, {count(self.ranks, 'rank')}", self.repetitions),
                Ranks(watch_rank.MODULE, [job.to_json()], ranks=self.ranks) as started,
            ):
                for rank, record in started.reports():
                    told[rank].append(record)
                    if rank == 0:
                        self.progress.step()
                    self.keep()

    def so_far(self) -> WatchResult | None:
        costs = [self._cost(transport) for transport in self._told]
        known = [cost for cost in costs if len(cost.ratios) > 1]
        return WatchResult(ranks=self.ranks, costs=known) if known else None

    def _cost(self, transport: str) -> WatchCost:
        """From the pairs of steps that all ranks have told of. A step takes as long as on the slowest."""
        pairs = list(zip(*self._told[transport].values(), strict=False))
        slowest = [[max(one["times"][which] for one in pair) for which in (0, 1)] for pair in pairs]
        return WatchCost(
            transport=transport,
            ratios=[with_it / without for with_it, without in slowest],
            core_ratios=[pair[0]["cores"][0] / pair[0]["cores"][1] for pair in pairs],
            thread_share=pairs[-1][0]["share"] if pairs else 0.0,
        )

    def parts(self, result: WatchResult) -> Iterable[RenderableType]:
        yield table(result)


def table(result: WatchResult) -> Table:
    title = f"{count(result.ranks, 'rank')}: a step of the GPT with the watch, to one without"
    made = make_table(title, "pairs", "time", "training thread\non a core", "watch's thread\non a core")
    for cost in result.costs:
        cells = (str(len(cost.ratios)), cost.time, cost.core, f"{cost.thread_share:.4%}")
        made.add_row(f"  {cost.transport}", *cells)
    return made
