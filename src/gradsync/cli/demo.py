"""`gradsync demo`: train a small GPT on this machine's cores, and prove that the replicas stayed equal."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import typer

from gradsync.cli import demo_rank, picture, text
from gradsync.cli.demo_run import METRICS, PICTURE, SUMMARY, DemoRun
from gradsync.cli.display import Display, count, make_display
from gradsync.cli.elastic_demo import rank as elastic_rank
from gradsync.cli.elastic_demo.run import ElasticDemo
from gradsync.cli.history import History
from gradsync.cli.launch import Ranks
from gradsync.cli.report import Record
from gradsync.cli.style import JSON_HELP, Output
from gradsync.cli.summary import Summary, summarize

ELASTIC_SHARDS = 6


def demo(
    ranks: int | None = typer.Option(
        None, min=1, help="Processes that train together; 2, or 3 with --elastic.", show_default=False
    ),
    steps: int | None = typer.Option(
        None,
        min=1,
        help="Steps of the optimizer; 800, or 300 with --elastic, take about 90 s on 2 cores.",
        show_default=False,
    ),
    elastic: bool = typer.Option(False, "--elastic", help="Kill a rank in the middle: the model stays the same."),
    out: Path = typer.Option(Path("demo-out"), help="Folder for loss.png, metrics.jsonl and summary.json."),
    seed: int = typer.Option(0, help="Seed of the parameters and the batches."),
    source: Path = typer.Option(
        text.stdlib(),
        "--text",
        show_default=False,
        help="Folder of .py files to read instead of Python's library.",
    ),
    summary: str = typer.Option("", "--json", metavar="[FILE]", help=JSON_HELP),
    batch: int | None = typer.Option(None, min=1, hidden=True),
    context: int = typer.Option(64, min=1, max=1024, hidden=True),
    layers: int = typer.Option(2, min=1, hidden=True),
    width: int = typer.Option(128, min=4, hidden=True),
    learning_rate: float = typer.Option(0.004, hidden=True),
    pause: float = typer.Option(0.0, min=0, hidden=True),
) -> None:
    """Train a small GPT on this machine, and see that the replicas stay identical.

    It learns the sources of Python's library. All files are written as training goes on: Ctrl-C keeps them.

    With --elastic a rank is killed in the middle. The others go on at once, another one comes in its place, and the
    model ends with the same bits as on one rank that nothing disturbs, which is trained too.
    """
    told: dict[str, Any] = {
        "seed": seed,
        "folder": str(check_source(source)),
        "context": context,
        "layers": layers,
        "heads": 4,
        "width": width,
        "learning_rate": learning_rate,
    }
    if elastic:
        elastic_job = make_elastic_job(ranks or 3, steps or 300, batch or 6, pause, told)
        check_shape(elastic_job)
        raise typer.Exit(ElasticDemo(elastic_job, prepare(out), Output(summary)).run())
    job = demo_rank.Job(ranks=ranks or 2, steps=steps or 800, batch=batch or 16, **told)
    check_shape(job)
    raise typer.Exit(Demo(job, prepare(out), Output(summary)).run())


def make_elastic_job(ranks: int, steps: int, batch: int, pause: float, told: dict[str, Any]) -> elastic_rank.Job:
    """Who is killed depends on the seed; it is after a third, so that there is time to come in its place."""
    if ranks < 2:
        raise typer.BadParameter("with --elastic there must be 2 or more, so that others go on", param_hint="--ranks")
    if steps < 3:
        raise typer.BadParameter("with --elastic there must be 3 or more: one is killed between", param_hint="--steps")
    return elastic_rank.Job(
        ranks=ranks,
        steps=steps,
        batch=batch,
        shards=max(ELASTIC_SHARDS, ranks),
        kills=random.Random(told["seed"]).randrange(ranks),
        kills_after=steps // 3,
        pause=pause,
        **told,
    )


def check_source(folder: Path) -> Path:
    try:
        text.choose(folder)
    except text.NoText as error:
        raise typer.BadParameter(str(error), param_hint="--text") from None
    return folder.resolve()


def check_shape(job: demo_rank.Job) -> None:
    try:
        _ = job.shape
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--width") from None


def prepare(out: Path) -> Path:
    """The folder, writable, without the results of an earlier run: a run that is stopped must not leave a
    mixture behind."""
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; name a folder", param_hint="--out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SUMMARY, PICTURE):
            (out / name).unlink(missing_ok=True)
        (out / METRICS).touch()
    except OSError as error:
        raise typer.BadParameter(f"can't write to {out}: {error.strerror}", param_hint="--out") from None
    return out


class Demo(DemoRun):
    """One run, seen from the process that started it."""

    def __init__(self, job: demo_rank.Job, out: Path, output: Output) -> None:
        history = History(ranks=job.ranks, steps=job.steps, tokens_per_step=job.tokens_per_step)
        super().__init__(history, out, output)
        self.job = job
        self.parameters = 0
        self.sample = ""
        self.fingerprints: dict[int, str] = {}

    def train(self) -> None:
        with (
            (self.out / METRICS).open("w", encoding="utf-8", buffering=1) as metrics,
            Ranks(demo_rank.MODULE, [self.job.to_json()], ranks=self.job.ranks) as ranks,
            make_display(self.console, ranks=self.job.ranks) as display,
        ):
            for rank, record in ranks.reports():
                self._take(rank, record, metrics, display)

    def _take(self, rank: int, record: Record, metrics: IO[str], display: Display) -> None:
        match record["event"]:
            case "ready" if rank == 0:
                self.parameters = record["parameters"]
                display.ready(self.parameters)
            case "fingerprint":
                self.fingerprints[rank] = record["value"]
            case "sample":
                self.sample = record["text"]
            case "step" | "validation" as event:
                if (whole := self.history.add(record)) is not None:
                    metrics.write(json.dumps({"event": event, **asdict(whole)}) + "\n")
                if event == "step" and whole is not None:
                    display.update(self.history)

    def finish(self) -> int:
        summary = summarize(
            self.history,
            parameters=self.parameters,
            fingerprints=[self.fingerprints[rank] for rank in range(self.job.ranks)],
            sample=self.sample,
            seconds=time.monotonic() - self.began,
        )
        picture.draw(self.history, parameters=self.parameters, path=self.out / PICTURE)
        summary.write(self.out / SUMMARY)
        self._show(summary)
        self.output.write(asdict(summary))
        return 0 if summary.identical else 1

    def _show(self, summary: Summary) -> None:
        self.show(summary.rows(), summary.sample)
        if summary.identical:
            self.say(f"replicas identical: {summary.fingerprints[0]}", style="bold green")
        else:
            self.say(describe_difference(summary.fingerprints), style="bold red")
        self.say_written()


def describe_difference(fingerprints: list[str]) -> str:
    """Which ranks agree with which; the largest camp comes first."""
    camps: defaultdict[str, list[str]] = defaultdict(list)
    for rank, fingerprint in enumerate(fingerprints):
        camps[fingerprint].append(str(rank))
    lines = [
        f"  {fingerprint}  rank {', '.join(ranks)}"
        for fingerprint, ranks in sorted(camps.items(), key=lambda camp: -len(camp[1]))
    ]
    return "\n".join([f"replicas DIFFER: {count(len(camps), 'version')} of the parameters", *lines])
