"""`python -m benchmarks engine`: what the engine itself costs the host, beside torch's DDP."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import RenderableType

from benchmarks import engine_picture, engine_rank, engine_table
from benchmarks.chain import PER_BLOCK
from benchmarks.engine_result import Result, Times, costs_of, growths_of
from benchmarks.names import read_numbers
from benchmarks.run import BenchRun
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP


def engine(
    ranks: int = typer.Option(2, min=1, help="Processes that keep in step; one alone is measured as well."),
    rounds: int = typer.Option(30, min=1, help="Rounds: ten times as many with few parameters, a third with many."),
    parameters: str = typer.Option("100,1000,10000", help="Numbers of parameters, each a multiple of 10."),
    json: Path = typer.Option(Path("bench-out/engine.json"), metavar="[FILE]", help=JSON_HELP),
    picture: Path = typer.Option(Path("bench-out/engine.png"), help="Where the picture is written."),
) -> None:
    """What the engine costs the host for each parameter, beside torch's."""
    numbers = read_numbers([parameters], "--parameters", least=PER_BLOCK, multiple_of=PER_BLOCK)
    job = engine_rank.Job(rounds=rounds, parameters=numbers)
    raise typer.Exit(EngineBench(job, ranks, json, picture).run())


class EngineBench(BenchRun):
    def __init__(self, job: engine_rank.Job, ranks: int, json: Path, picture: Path) -> None:
        super().__init__(json, picture)
        self.job = job
        self.ranks = ranks
        self._began = time.monotonic()
        self._rounds: dict[tuple[int, int], list[Times]] = defaultdict(list)  # by ranks and parameters

    def measure(self) -> None:
        for ranks in sorted({1, self.ranks}):
            with (
                self.progress.part(f"rounds of {count(ranks, 'rank')}", self.job.total),
                Ranks(engine_rank.MODULE, [self.job.to_json()], ranks=ranks) as started,
            ):
                for _, record in started.reports():
                    self._rounds[ranks, record["parameters"]].append(record["times"])
                    self.progress.step()
                    self.keep()

    def so_far(self) -> Result | None:
        costs = [cost for (ranks, many), times in self._rounds.items() for cost in costs_of(ranks, many, times)]
        seconds = time.monotonic() - self._began
        return Result(costs=costs, growths=growths_of(costs), seconds=seconds) if costs else None

    def parts(self, result: Result) -> Iterable[RenderableType]:
        return engine_table.tables(result)

    def draw(self, result: Result, path: Path) -> None:
        engine_picture.draw(result, path)
