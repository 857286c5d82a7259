"""`python -m benchmarks footprint`: memory of a rank, and what the start costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import typer
from rich.console import RenderableType

from benchmarks import footprint_table, memory_rank, start_rank
from benchmarks.contenders import IN_MEMORY, Contender
from benchmarks.footprint_result import FootprintResult, Making, Peak
from benchmarks.importing import import_seconds
from benchmarks.ratios import spread
from benchmarks.run import BenchRun
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP

MEMORY_LAYERS, MEMORY_STEPS = 8, 3
MAKINGS = 4  # in a process
First = tuple[str, bool]  # contender, whether it was its first in the process


def footprint(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    width: int = typer.Option(2048, min=0, help="Width of the 8-layer MLP whose memory is measured; 0 leaves it out."),
    repetitions: int = typer.Option(5, min=1, help="Processes in which importing and making replicas is measured."),
    json: Path = typer.Option(Path("bench-out/footprint.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Peak memory of a rank, the time to make replicas of a GPT, and that of `import gradsync`."""
    raise typer.Exit(FootprintBench(ranks, width, repetitions, json).run())


class FootprintBench(BenchRun):
    def __init__(self, ranks: int, width: int, repetitions: int, json: Path) -> None:
        super().__init__(json)
        self.ranks = ranks
        self.width = width
        self.repetitions = repetitions
        self._absent: dict[str, str] = {}
        self._peaks: list[Peak] = []
        self._importing: list[float] = []
        self._makings: dict[First, list[float]] = defaultdict(list)

    def measure(self) -> None:
        for contender in IN_MEMORY if self.width else ():
            self._weigh(contender)
            self.keep()
        with self.progress.part("import", self.repetitions):
            for seconds in import_seconds(self.repetitions):
                self._importing.append(seconds)
                self.progress.step()
                self.keep()
        with self.progress.part("replicas of the GPT", self.repetitions):
            for _ in range(self.repetitions):
                for key, made in self._make_once().items():
                    self._makings[key] += made
                self.progress.step()
                self.keep()

    def so_far(self) -> FootprintResult | None:
        if not (self._peaks or self._importing):
            return None
        return FootprintResult(
            ranks=self.ranks,
            importing=spread(self._importing) if self._importing else None,
            makings=self._made(),
            peaks=self._peaks,
            absent=self._absent,
        )

    def parts(self, result: FootprintResult) -> Iterable[RenderableType]:
        return footprint_table.parts(result)

    def _made(self) -> list[Making]:
        return [
            Making(
                contender=contender.key,
                first=spread(self._makings[contender.key, True]),
                later=spread(self._makings[contender.key, False]),
            )
            for contender in start_rank.MEASURED
            if self._makings[contender.key, True]
        ]

    def _make_once(self) -> dict[First, list[float]]:
        by_rank: dict[int, dict[First, list[float]]] = defaultdict(lambda: defaultdict(list))
        with Ranks(start_rank.MODULE, [str(MAKINGS)], ranks=self.ranks) as started:
            for rank, record in started.reports():
                by_rank[rank][record["contender"], record["first"]].append(record["seconds"])
        return {
            key: [max(seconds) for seconds in zip(*(by_rank[rank][key] for rank in by_rank), strict=True)]
            for key in by_rank[0]
        }

    def _weigh(self, contender: Contender) -> None:
        job = memory_rank.Job(contender=contender.key, width=self.width, layers=MEMORY_LAYERS, steps=MEMORY_STEPS)
        records = []
        with (
            self.progress.part(f"memory, {contender.name}", self.ranks),
            Ranks(memory_rank.MODULE, [job.to_json()], ranks=self.ranks) as started,
        ):
            for _, record in started.reports():
                records.append(record)
                self.progress.step()
        if records[0]["event"] == "absent":
            self._absent[contender.key] = records[0]["reason"]
            return
        peak = Peak(
            contender=contender.key,
            parameters=records[0]["parameters"],
            start_mib=fmean(record["start"] for record in records),
            steady_mib=fmean(record["steady"] for record in records),
            proportional_mib=fmean(record["proportional"] for record in records),
        )
        self._peaks.append(peak)
