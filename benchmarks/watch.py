"""`python -m benchmarks watch`: what the watch between ranks costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import RenderableType
from rich.table import Table

from benchmarks import watch_rank
from benchmarks.pairs import Pair, PairBench, core_ratios, time_ratios
from benchmarks.tables import make_table
from benchmarks.watch_result import WatchCost, WatchResult
from gradsync.cli.display import count
from gradsync.cli.style import JSON_HELP


def watch(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    repetitions: int = typer.Option(200, min=2, help="Pairs of steps."),
    json: Path = typer.Option(Path("bench-out/watch.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Steps of the GPT with the watch between ranks, and without it.

    In turns: the median ratio, and what the watch's thread takes.
    """
    raise typer.Exit(WatchBench(ranks, repetitions, json).run())


class WatchBench(PairBench[WatchCost]):
    module = watch_rank.MODULE

    def job(self, transport: str) -> str:
        return watch_rank.Job(transport=transport, repetitions=self.repetitions).to_json()

    def cost(self, transport: str, pairs: list[Pair]) -> WatchCost:
        return WatchCost(
            transport=transport,
            ratios=time_ratios(pairs),
            core_ratios=core_ratios(pairs),
            thread_share=pairs[-1][0]["share"] if pairs else 0.0,
        )

    def so_far(self) -> WatchResult | None:
        return WatchResult(ranks=self.ranks, costs=costs) if (costs := self.costs()) else None

    def parts(self, result: WatchResult) -> Iterable[RenderableType]:
        yield table(result)


def table(result: WatchResult) -> Table:
    title = f"{count(result.ranks, 'rank')}: a step of the GPT with the watch, to one without"
    made = make_table(title, "pairs", "time", "training thread\non a core", "watch's thread\non a core")
    for cost in result.costs:
        cells = (str(len(cost.ratios)), cost.time, cost.core, f"{cost.thread_share:.4%}")
        made.add_row(f"  {cost.transport}", *cells)
    return made
