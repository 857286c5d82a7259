"""`python -m benchmarks bandwidth`: one large all-reduce, beside gloo, MPI and what the memory allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import RenderableType

from benchmarks import bandwidth_rank, bandwidth_table, mpi_ranks
from benchmarks.bandwidth_result import CARRIERS, BandwidthResult, Track
from benchmarks.names import read_numbers
from benchmarks.ratios import slowest
from benchmarks.run import BenchRun
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP

Key = tuple[int, int]  # size, rank


def bandwidth(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    sizes: list[str] = typer.Option(["1,4,32"], help="Sizes of the buffer in MB."),
    repetitions: int = typer.Option(60, min=1, help="All-reduces by each carrier of each size."),
    json: Path = typer.Option(Path("bench-out/bandwidth.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """An all-reduce of one buffer, beside gloo, MPI and a plain copy.

    By gloo, MPI (if installed) and gradsync's transports; a plain copy is the limit. Carriers take turns in the same
    processes; each result is checked.
    """
    job = bandwidth_rank.Job(carriers=list(CARRIERS), sizes_mb=read_numbers(sizes, "--sizes"), repetitions=repetitions)
    raise typer.Exit(BandwidthBench(job, ranks, json).run())


class BandwidthBench(BenchRun):
    def __init__(self, job: bandwidth_rank.Job, ranks: int, json: Path) -> None:
        super().__init__(json)
        self.job = job
        self.ranks = ranks
        self._times: dict[Key, list[dict[str, float]]] = defaultdict(list)
        self._absent: dict[str, str] = {}

    def measure(self) -> None:
        start = Ranks if mpi_ranks.missing() else mpi_ranks.MpiRanks
        with (
            self.progress.part(
                f"bandwidth, {count(self.ranks, 'rank')}", self.job.repetitions * len(self.job.sizes_mb)
            ),
            start(bandwidth_rank.MODULE, [self.job.to_json()], ranks=self.ranks) as started,
        ):
            for rank, record in started.reports():
                if record["event"] == "field":
                    self._absent |= record["absent"]
                    continue
                self._times[record["size"], rank].append(record["times"])
                if rank == 0:
                    self.progress.step()
                self.keep()

    def so_far(self) -> BandwidthResult | None:
        tracks = [track for size in self.job.sizes_mb if (track := self._track(size)).repetitions]
        return BandwidthResult(ranks=self.ranks, tracks=tracks, absent=self._absent) if tracks else None

    def parts(self, result: BandwidthResult) -> Iterable[RenderableType]:
        return bandwidth_table.parts(result)

    def _track(self, size: int) -> Track:
        by_rank = [self._times[size, rank] for rank in range(self.ranks)]
        return Track(size_mb=size, repetitions=[slowest(one) for one in zip(*by_rank, strict=False)])
