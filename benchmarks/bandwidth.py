"""`python -m benchmarks bandwidth`: one large all-reduce, beside gloo, MPI and what the memory allows."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import typer

from benchmarks import bandwidth_rank, bandwidth_table, mpi_ranks
from benchmarks.bandwidth_result import CARRIERS, BandwidthResult, Track
from benchmarks.names import read_numbers
from benchmarks.ratios import slowest
from benchmarks.run import BenchRun, prepare
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks

Key = tuple[int, int]  # size, rank


def bandwidth(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    sizes: list[str] = typer.Option(["1,4,32"], help="Sizes of the buffer in MB."),
    repetitions: int = typer.Option(60, min=1, help="All-reduces by each carrier of each size."),
    json: Path = typer.Option(Path("bench-out/bandwidth.json"), help="Where all times and figures are written."),
) -> None:
    """An all-reduce of one buffer: gloo, MPI (if installed), gradsync's transports, and a plain copy as the limit.

    Carriers take turns in the same processes; each result is checked.
    """
    job = bandwidth_rank.Job(carriers=list(CARRIERS), sizes_mb=read_numbers(sizes, "--sizes"), repetitions=repetitions)
    prepare(json)
    raise typer.Exit(BandwidthBench(job, ranks, json).run())


class BandwidthBench(BenchRun):
    def __init__(self, job: bandwidth_rank.Job, ranks: int, json: Path) -> None:
        super().__init__()
        self.job = job
        self.ranks = ranks
        self.json = json

    def measure(self) -> None:
        times: dict[Key, list[dict[str, float]]] = defaultdict(list)
        absent: dict[str, str] = {}
        start = Ranks if mpi_ranks.missing() else mpi_ranks.MpiRanks
        with (
            self.progress.part(
                f"bandwidth, {count(self.ranks, 'rank')}", self.job.repetitions * len(self.job.sizes_mb)
            ),
            start(bandwidth_rank.MODULE, [self.job.to_json()], ranks=self.ranks) as started,
        ):
            for rank, record in started.reports():
                if record["event"] == "field":
                    absent |= record["absent"]
                    continue
                times[record["size"], rank].append(record["times"])
                if rank == 0:
                    self.progress.step()
        result = BandwidthResult(
            ranks=self.ranks, tracks=[self._track(size, times) for size in self.job.sizes_mb], absent=absent
        )
        result.write(self.json)
        self.show(bandwidth_table.parts(result), [self.json])

    def _track(self, size: int, times: dict[Key, list[dict[str, float]]]) -> Track:
        by_rank = [times[size, rank] for rank in range(self.ranks)]
        return Track(size_mb=size, repetitions=[slowest(one) for one in zip(*by_rank, strict=True)])
