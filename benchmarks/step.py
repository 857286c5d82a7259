"""`python -m benchmarks step`: whole training steps, beside torch's ways and MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

from benchmarks import mpi_ranks, step_picture, step_rank, step_table
from benchmarks.contenders import IN_STEP, PLAIN, TORCH, contender
from benchmarks.models import MODELS, model
from benchmarks.names import read_names, read_numbers
from benchmarks.ratios import slowest
from benchmarks.run import BenchRun
from benchmarks.step_result import Race, StepResult
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP

QUICK_REPETITIONS = 6
MODEL_KEYS = [one.key for one in MODELS]
CONTENDER_KEYS = [one.key for one in IN_STEP]


def step(
    ranks: list[str] = typer.Option(["2,4"], help="Numbers of processes, each with one thread."),
    models: list[str] = typer.Option([], help=f"Some of {', '.join(MODEL_KEYS)}; all if not given."),
    contenders: list[str] = typer.Option(
        [],
        help=f"Some of {', '.join(CONTENDER_KEYS)}; all if not given. {PLAIN.key} and {TORCH.key} always run: times "
        "are compared with the first, gradients with the second.",
    ),
    repetitions: int = typer.Option(25, min=1, help="Steps of each contender on each model."),
    quick: bool = typer.Option(False, "--quick", help=f"{QUICK_REPETITIONS} repetitions: to see that it works."),
    json: Path = typer.Option(Path("bench-out/step.json"), metavar="[FILE]", help=JSON_HELP),
    picture: Path = typer.Option(Path("bench-out/step.png"), help="Where the picture is written."),
) -> None:
    """Whole training steps, beside torch's ways and MPI.

    Five models: without communication, torch's ways, MPI (if installed), gradsync's fronts. Contenders take turns
    step by step in the same processes, in a balanced order; figures are medians of ratios within a repetition. One
    whose gradients are not those of torch's DDP is reported as wrong and not timed. Lists are written as a,b or by
    giving the option several times.
    """
    chosen = read_names(contenders, CONTENDER_KEYS, "--contenders")
    needed = (PLAIN.key, TORCH.key)
    job = StepBench(
        ranks=read_numbers(ranks, "--ranks"),
        models=read_names(models, MODEL_KEYS, "--models"),
        contenders=[key for key in CONTENDER_KEYS if key in chosen or key in needed],
        repetitions=min(repetitions, QUICK_REPETITIONS) if quick else repetitions,
        json=json,
        picture=picture,
    )
    raise typer.Exit(job.run())


class StepBench(BenchRun):
    def __init__(
        self,
        *,
        ranks: list[int],
        models: list[str],
        contenders: list[str],
        repetitions: int,
        json: Path,
        picture: Path | None,
    ) -> None:
        super().__init__(json, picture)
        self.ranks = ranks
        self.models = models
        self.contenders = contenders
        self.repetitions = repetitions
        self._races: list[Callable[[], Race | None]] = []
        self._began = time.monotonic()

    def measure(self) -> None:
        for ranks in self.ranks:
            for key in self.models:
                self._race(key, ranks)

    def so_far(self) -> StepResult | None:
        races = [race for get in self._races if (race := get()) is not None]
        return StepResult(races=races, seconds=time.monotonic() - self._began) if races else None

    def parts(self, result: StepResult) -> Iterable[RenderableType]:
        return step_table.parts(result)

    def draw(self, result: StepResult, path: Path) -> None:
        step_picture.draw(result, path)

    def _race(self, key: str, ranks: int) -> None:
        job = step_rank.Job(model=key, contenders=self.contenders, repetitions=self.repetitions)
        with (
            self.progress.part(f"{model(key).name}, ranks: {ranks}", self.repetitions),
            self._ranks()(step_rank.MODULE, [job.to_json()], ranks=ranks) as started,
        ):
            self._listen(started, key, ranks)

    def _listen(self, started: Ranks, key: str, ranks: int, where: str = "") -> None:
        times: dict[int, list[dict[str, float]]] = {rank: [] for rank in range(ranks)}
        field: dict[str, Any] = {}

        def race() -> Race | None:
            """Of the repetitions that all ranks have told of by now."""
            repetitions = [slowest(by_rank) for by_rank in zip(*times.values(), strict=False)]
            told: dict[str, Any] = {name: field.get(name) for name in ("parameters", "absent", "wrong")}
            return Race(ranks=ranks, model=key, repetitions=repetitions, where=where, **told) if repetitions else None

        self._races.append(race)
        for rank, record in started.reports():
            if record["event"] == "field":
                field.update(record)
                continue
            times[rank].append(record["times"])
            if rank == 0:
                self.progress.step()
            self.keep()

    def _ranks(self) -> type[Ranks]:
        """Those of an MPI world only where somebody needs it."""
        wanted = any(contender(key).family == "mpi" for key in self.contenders)
        return mpi_ranks.MpiRanks if wanted and mpi_ranks.missing() is None else Ranks
