"""`python -m benchmarks sharing`: steps with their optimizer where the parameters of a host lie once, beside rivals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

from benchmarks import mpi_ranks, sharing_memory_rank, sharing_picture, sharing_rank, sharing_table
from benchmarks.models import MODELS, model
from benchmarks.names import read_names, read_numbers
from benchmarks.published_sharing import COLORS, TITLE, panels_of
from benchmarks.ratios import slowest
from benchmarks.run import BenchRun
from benchmarks.sharing_contenders import (
    ALL,
    BY_DEFAULT,
    IN_MEMORY,
    MPI_REDUCER,
    NO_COMMUNICATION,
    OPTIMIZERS,
    TORCH,
    Contender,
    optimizer_kind,
)
from benchmarks.sharing_result import Memory, SharingRace, SharingResult
from gradsync.cli.display import count
from gradsync.cli.launch import Ranks
from gradsync.cli.style import JSON_HELP

QUICK_REPETITIONS = 4
MEMORY_LAYERS, MEMORY_STEPS = 8, 3
MODEL_KEYS = [one.key for one in MODELS]
OPTIMIZER_KEYS = [one.key for one in OPTIMIZERS]
CONTENDER_KEYS = [one.key for one in ALL]
DEFAULT_KEYS = [one.key for one in BY_DEFAULT]


def sharing(
    ranks: list[str] = typer.Option(["2,4"], help="Numbers of processes, each with one thread."),
    optimizers: list[str] = typer.Option([], help=f"Some of {', '.join(OPTIMIZER_KEYS)}; all if not given."),
    models: list[str] = typer.Option([], help=f"Some of {', '.join(MODEL_KEYS)}; all if not given."),
    contenders: list[str] = typer.Option(
        [],
        help=f"Some of {', '.join(CONTENDER_KEYS)}; all but the last two if not given. {NO_COMMUNICATION.key} and "
        f"{TORCH.key} always run: times are compared with the first, parameters with the second.",
    ),
    repetitions: int = typer.Option(12, min=1, help="Steps of each contender on each model."),
    width: int = typer.Option(2048, min=0, help="Width of the 8-layer MLP whose memory is measured; 0 leaves it out."),
    quick: bool = typer.Option(False, "--quick", help=f"{QUICK_REPETITIONS} repetitions: to see that it works."),
    json: Path = typer.Option(Path("bench-out/sharing.json"), metavar="[FILE]", help=JSON_HELP),
    picture: Path = typer.Option(Path("bench-out/sharing.png"), help="Where the picture is written."),
) -> None:
    """Steps with their optimizer where the parameters of a host lie once, beside rivals.

    Three optimizers, five models. One model a host, stepped after backward or in it, beside a copy a rank, torch's DDP
    and ZeroRedundancyOptimizer, MPI (if installed), and one process that has a thread and a batch for each rank.
    Contenders take turns step by step, as in `step`. One that does not come to the parameters of torch's DDP is
    reported as wrong and not timed. With AdamW also the memory of the host.
    """
    chosen = read_names(contenders, CONTENDER_KEYS, "--contenders") if contenders else DEFAULT_KEYS
    needed = (NO_COMMUNICATION.key, TORCH.key)
    job = SharingBench(
        ranks=read_numbers(ranks, "--ranks"),
        optimizers=read_names(optimizers, OPTIMIZER_KEYS, "--optimizers"),
        models=read_names(models, MODEL_KEYS, "--models"),
        contenders=[key for key in CONTENDER_KEYS if key in chosen or key in needed],
        repetitions=min(repetitions, QUICK_REPETITIONS) if quick else repetitions,
        width=width,
        json=json,
        picture=picture,
    )
    raise typer.Exit(job.run())


class SharingBench(BenchRun):
    def __init__(
        self,
        *,
        ranks: list[int],
        optimizers: list[str],
        models: list[str],
        contenders: list[str],
        repetitions: int,
        width: int,
        json: Path,
        picture: Path,
    ) -> None:
        super().__init__(json, picture)
        self.ranks, self.optimizers, self.models = ranks, optimizers, models
        self.contenders, self.repetitions, self.width = contenders, repetitions, width
        self._races: list[Callable[[], SharingRace | None]] = []
        self._memories: list[Memory] = []
        self._began, self._load = time.monotonic(), os.getloadavg()[0]

    def measure(self) -> None:
        for ranks in self.ranks:
            for one in IN_MEMORY if self.width and "adamw" in self.optimizers else ():
                if one.key in self.contenders:
                    self._weigh(one, ranks)
                    self.keep()
        for ranks in self.ranks:
            for optimizer in self.optimizers:
                for key in self.models:
                    self._race(key, optimizer, ranks)

    def so_far(self) -> SharingResult | None:
        races = [race for get in self._races if (race := get()) is not None]
        if not (races or self._memories):
            return None
        return SharingResult(
            races=races,
            memories=self._memories,
            seconds=time.monotonic() - self._began,
            load=(self._load, os.getloadavg()[0]),
        )

    def parts(self, result: SharingResult) -> Iterable[RenderableType]:
        return sharing_table.parts(result)

    def draw(self, result: SharingResult, path: Path) -> None:
        if panels := panels_of(result):
            sharing_picture.draw(panels, COLORS, TITLE, path)

    def _weigh(self, one: Contender, ranks: int) -> None:
        job = sharing_memory_rank.Job(
            contender=one.key, width=self.width, layers=MEMORY_LAYERS, steps=MEMORY_STEPS
        ).to_json()
        found = 0
        with (
            self.progress.part(f"memory, {one.name}, ranks: {ranks}", ranks),
            Ranks(sharing_memory_rank.MODULE, [job], ranks=ranks) as started,
        ):
            for _, record in started.reports():
                if record["event"] == "absent":
                    return
                found += record["bytes"]
                self.progress.step()
        self._memories.append(Memory(ranks=ranks, contender=one.key, bytes=found))

    def _race(self, key: str, optimizer: str, ranks: int) -> None:
        job = sharing_rank.Job(
            model=key, optimizer=optimizer, contenders=self.contenders, repetitions=self.repetitions
        ).to_json()
        name = f"{model(key).name}, {optimizer_kind(optimizer).name}, {count(ranks, 'rank')}"
        with (
            self.progress.part(name, self.repetitions),
            self._ranks()(sharing_rank.MODULE, [job], ranks=ranks) as started,
        ):
            self._listen(started, key, optimizer, ranks)

    def _listen(self, started: Ranks, key: str, optimizer: str, ranks: int) -> None:
        times: dict[int, list[dict[str, float]]] = {rank: [] for rank in range(ranks)}
        field: dict[str, Any] = {}

        def race() -> SharingRace | None:
            """Of the repetitions that all ranks have told of by now."""
            repetitions = [slowest(by_rank) for by_rank in zip(*times.values(), strict=False)]
            if not repetitions:
                return None
            told: dict[str, Any] = {name: field.get(name) for name in ("parameters", "absent", "wrong")}
            return SharingRace(ranks=ranks, model=key, optimizer=optimizer, repetitions=repetitions, **told)

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
        wanted = MPI_REDUCER.key in self.contenders and mpi_ranks.missing() is None
        return mpi_ranks.MpiRanks if wanted else Ranks
