"""`python -m benchmarks engine`: what the engine itself costs the host, beside torch's DDP."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import typer

from benchmarks import engine_picture, engine_rank, engine_table
from benchmarks.chain import PER_BLOCK
from benchmarks.engine_result import Cost, Result, Times, costs_of, growths_of
from benchmarks.names import read_numbers
from benchmarks.run import BenchRun, prepare
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks

RESULT, PICTURE = "engine.json", "engine.png"


def engine(
    ranks: int = typer.Option(2, min=1, help="Processes that keep in step; one alone is measured as well."),
    rounds: int = typer.Option(30, min=1, help="Rounds: ten times as many with few parameters, a third with many."),
    parameters: str = typer.Option("100,1000,10000", help="Numbers of parameters, each a multiple of 10."),
    out: Path = typer.Option(Path("bench-out"), help="Folder for engine.json and engine.png."),
) -> None:
    """What the engine costs the host for each parameter, beside torch's DistributedDataParallel."""
    numbers = read_numbers([parameters], "--parameters", least=PER_BLOCK, multiple_of=PER_BLOCK)
    job = engine_rank.Job(rounds=rounds, parameters=numbers)
    prepare(out / RESULT, out / PICTURE)
    raise typer.Exit(EngineBench(job, ranks, out).run())


class EngineBench(BenchRun):
    def __init__(self, job: engine_rank.Job, ranks: int, out: Path) -> None:
        super().__init__()
        self.job = job
        self.ranks = ranks
        self.out = out

    def measure(self) -> None:
        began = time.monotonic()
        costs = [cost for ranks in sorted({1, self.ranks}) for cost in self._time(ranks)]
        result = Result(costs=costs, growths=growths_of(costs), seconds=time.monotonic() - began)
        result.write(self.out / RESULT)
        engine_picture.draw(result, self.out / PICTURE)
        self.show(engine_table.tables(result), [self.out / PICTURE, self.out / RESULT])

    def _time(self, ranks: int) -> list[Cost]:
        rounds: dict[int, list[Times]] = defaultdict(list)
        with (
            self.progress.part(f"rounds of {count(ranks, 'rank')}", self.job.total),
            Ranks(engine_rank.MODULE, [self.job.to_json()], ranks=ranks) as started,
        ):
            for _, record in started.reports():
                rounds[record["parameters"]].append(record["times"])
                self.progress.step()
        return [cost for parameters, times in rounds.items() for cost in costs_of(ranks, parameters, times)]
