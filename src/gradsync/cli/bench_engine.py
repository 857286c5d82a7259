"""`gradsync bench engine`: what the engine itself costs, in time of the host and in memory, beside torch's DDP."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from io import TextIOWrapper
from pathlib import Path
from statistics import fmean

import typer
from rich.text import Text

from gradsync.cli import bench_engine_rank, bench_memory_rank, bench_picture, bench_table, launch
from gradsync.cli.bench_contenders import IN_MEMORY, Contender
from gradsync.cli.bench_models import PER_BLOCK
from gradsync.cli.bench_progress import BenchProgress
from gradsync.cli.bench_result import Cost, Peak, Result, Times, costs_of, growths_of, processor
from gradsync.cli.display import count, make_console
from gradsync.cli.launch import RankFailed, Ranks

RESULT, PICTURE = "engine.json", "engine.png"
INTERRUPTED = 130  # what a shell reports for Ctrl-C
MEMORY_LAYERS, MEMORY_STEPS = 8, 3


def engine(
    ranks: int = typer.Option(2, min=1, help="Processes that keep in step; one alone is measured as well."),
    rounds: int = typer.Option(30, min=1, help="Rounds: ten times as many with few parameters, a third with many."),
    parameters: str = typer.Option("100,1000,10000", help="Numbers of parameters, each a multiple of 10."),
    out: Path = typer.Option(Path("bench-out"), help="Folder for engine.json and engine.png."),
    memory_width: int = typer.Option(
        2048, min=0, help="Width of the 8-layer MLP for the memory part; 0 leaves it out."
    ),
) -> None:
    """What the engine costs the host for each parameter and in memory, beside torch's DistributedDataParallel."""
    job = bench_engine_rank.Job(rounds=rounds, parameters=read_numbers(parameters))
    raise typer.Exit(EngineBench(job, ranks, memory_width, prepare(out)).run())


def read_numbers(line: str) -> list[int]:
    try:
        numbers = sorted({int(word.replace("_", "")) for word in line.split(",")})
    except ValueError:
        numbers = []
    if not numbers or any(number < PER_BLOCK or number % PER_BLOCK for number in numbers):
        raise typer.BadParameter(
            f"{line!r} is not a list of multiples of {PER_BLOCK} with commas between", param_hint="--parameters"
        )
    return numbers


def prepare(out: Path) -> Path:
    """The folder, writable, without the results of an earlier run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, PICTURE):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"can't write to {out}: {error.strerror}", param_hint="--out") from None
    return out


class EngineBench:
    """One run, seen from the process that started it."""

    def __init__(self, job: bench_engine_rank.Job, ranks: int, memory_width: int, out: Path) -> None:
        self.job = job
        self.ranks = ranks
        self.memory_width = memory_width
        self.out = out
        self.console = make_console()
        self.progress = BenchProgress(self.console)

    def run(self) -> int:
        """Returns the exit code."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # where there is no UTF-8, ? is better than a traceback
        try:
            with launch.interruptible():
                self._show(self._measure())
                return 0
        except KeyboardInterrupt:
            self._say("Stopped; all ranks have ended, nothing was written.")
            return INTERRUPTED
        except RankFailed as failed:
            self._say(f"{failed}; the others were stopped.", style="bold red")
            self._say(failed.words)
            return 1

    def _measure(self) -> Result:
        began = time.monotonic()
        costs = [cost for ranks in sorted({1, self.ranks}) for cost in self._time(ranks)]
        peaks = [self._weigh(contender) for contender in IN_MEMORY] if self.memory_width else []
        return Result(
            costs=costs,
            growths=growths_of(costs),
            peaks=peaks,
            seconds=time.monotonic() - began,
            processor=processor(),
        )

    def _time(self, ranks: int) -> list[Cost]:
        rounds: dict[int, list[Times]] = defaultdict(list)
        with (
            self.progress.part(f"rounds of {count(ranks, 'rank')}", self.job.total),
            Ranks(bench_engine_rank.MODULE, [self.job.to_json()], ranks=ranks) as started,
        ):
            for _, record in started.reports():
                rounds[record["parameters"]].append(record["times"])
                self.progress.step()
        return [cost for parameters, times in rounds.items() for cost in costs_of(ranks, parameters, times)]

    def _weigh(self, contender: Contender) -> Peak:
        job = bench_memory_rank.Job(
            contender=contender.key, width=self.memory_width, layers=MEMORY_LAYERS, steps=MEMORY_STEPS
        )
        records = []
        with (
            self.progress.part(f"memory, {contender.name}", self.ranks),
            Ranks(bench_memory_rank.MODULE, [job.to_json()], ranks=self.ranks) as started,
        ):
            for _, record in started.reports():
                records.append(record)
                self.progress.step()
        return Peak(
            contender=contender.key,
            parameters=records[0]["parameters"],
            start_mib=fmean(record["start"] for record in records),
            steady_mib=fmean(record["steady"] for record in records),
        )

    def _show(self, result: Result) -> None:
        result.write(self.out / RESULT)
        bench_picture.draw(result, self.out / PICTURE)
        for table in bench_table.tables(result):
            self._say("")
            self.console.print(table)
        self._say("")
        for name in (PICTURE, RESULT):
            self._say(f"wrote {self.out / name}")

    def _say(self, line: str, style: str = "") -> None:
        """`Text`, not a string: brackets in what ranks say are not markup."""
        self.console.print(Text(line, style=style), soft_wrap=True)
