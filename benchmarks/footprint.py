"""`python -m benchmarks footprint`: memory of a rank, and what the start costs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean

import typer

from benchmarks import footprint_table, memory_rank, start_rank
from benchmarks.contenders import IN_MEMORY, Contender
from benchmarks.footprint_result import FootprintResult, Making, Peak
from benchmarks.importing import import_seconds
from benchmarks.ratios import Spread, spread
from benchmarks.run import BenchRun, prepare
from gradsync.cli.launch import Ranks

MEMORY_LAYERS, MEMORY_STEPS = 8, 3
MAKINGS = 4  # in a process
First = tuple[str, bool]  # contender, whether it was its first in the process


def footprint(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    width: int = typer.Option(2048, min=0, help="Width of the 8-layer MLP whose memory is measured; 0 leaves it out."),
    repetitions: int = typer.Option(5, min=1, help="Processes in which importing and making replicas is measured."),
    json: Path = typer.Option(Path("bench-out/footprint.json"), help="Where the figures are written."),
) -> None:
    """Peak memory of a rank, the time to make replicas of a GPT, and that of `import gradsync`."""
    prepare(json)
    raise typer.Exit(FootprintBench(ranks, width, repetitions, json).run())


class FootprintBench(BenchRun):
    def __init__(self, ranks: int, width: int, repetitions: int, json: Path) -> None:
        super().__init__()
        self.ranks = ranks
        self.width = width
        self.repetitions = repetitions
        self.json = json
        self.absent: dict[str, str] = {}

    def measure(self) -> None:
        peaks = [self._weigh(contender) for contender in IN_MEMORY] if self.width else []
        result = FootprintResult(
            ranks=self.ranks,
            importing=self._import(),
            makings=self._make(),
            peaks=[peak for peak in peaks if peak is not None],
            absent=self.absent,
        )
        result.write(self.json)
        self.show(footprint_table.parts(result), [self.json])

    def _import(self) -> Spread:
        with self.progress.part("import", self.repetitions):
            return spread(import_seconds(self.repetitions, self.progress.step))

    def _make(self) -> list[Making]:
        found: dict[First, list[float]] = defaultdict(list)
        with self.progress.part("replicas of the GPT", self.repetitions):
            for _ in range(self.repetitions):
                for key, seconds in self._make_once().items():
                    found[key] += seconds
                self.progress.step()
        return [
            Making(
                contender=contender.key,
                first=spread(found[contender.key, True]),
                later=spread(found[contender.key, False]),
            )
            for contender in start_rank.MEASURED
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

    def _weigh(self, contender: Contender) -> Peak | None:
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
            self.absent[contender.key] = records[0]["reason"]
            return None
        return Peak(
            contender=contender.key,
            parameters=records[0]["parameters"],
            start_mib=fmean(record["start"] for record in records),
            steady_mib=fmean(record["steady"] for record in records),
            proportional_mib=fmean(record["proportional"] for record in records),
        )
