"""`gradsync demo`: train a small GPT on this machine's cores, and prove that the replicas stayed equal."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import IO

import typer
from rich.text import Text

from gradsync.cli import demo_rank, launch, picture, text
from gradsync.cli.display import Display, count, make_display
from gradsync.cli.history import History
from gradsync.cli.launch import RankFailed, Ranks
from gradsync.cli.report import Record
from gradsync.cli.style import INTERRUPTED, JSON_HELP, Output
from gradsync.cli.summary import Summary, summarize

METRICS, SUMMARY, PICTURE = "metrics.jsonl", "summary.json", "loss.png"


def demo(
    ranks: int = typer.Option(2, min=1, help="Processes that train together."),
    steps: int = typer.Option(800, min=1, help="Steps of the optimizer; the default takes about 90 s on 2 cores."),
    out: Path = typer.Option(Path("demo-out"), help="Folder for loss.png, metrics.jsonl and summary.json."),
    seed: int = typer.Option(0, help="Seed of the parameters and the batches."),
    source: Path = typer.Option(
        text.stdlib(),
        "--text",
        show_default=False,
        help="Folder of .py files to read instead of Python's library.",
    ),
    summary: str = typer.Option("", "--json", metavar="[FILE]", help=JSON_HELP),
    batch: int = typer.Option(16, min=1, hidden=True),
    context: int = typer.Option(64, min=1, max=1024, hidden=True),
    layers: int = typer.Option(2, min=1, hidden=True),
    width: int = typer.Option(128, min=4, hidden=True),
    learning_rate: float = typer.Option(0.004, hidden=True),
) -> None:
    """Train a small GPT on this machine, and see that the replicas stay identical.

    It learns the sources of Python's library. All files are written as training goes on: Ctrl-C keeps them.
    """
    job = demo_rank.Job(
        ranks=ranks,
        steps=steps,
        seed=seed,
        folder=str(check_source(source)),
        batch=batch,
        context=context,
        layers=layers,
        heads=4,
        width=width,
        learning_rate=learning_rate,
    )
    check_shape(job)
    raise typer.Exit(Demo(job, prepare(out), Output(summary)).run())


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


class Demo:
    """One run, seen from the process that started it."""

    def __init__(self, job: demo_rank.Job, out: Path, output: Output) -> None:
        self.job = job
        self.out = out
        self.output = output
        self.history = History(ranks=job.ranks, steps=job.steps, tokens_per_step=job.tokens_per_step)
        self.parameters = 0
        self.sample = ""
        self.fingerprints: dict[int, str] = {}
        self.console = output.console
        self.began = time.monotonic()

    def run(self) -> int:
        """Returns the exit code."""
        try:
            with launch.interruptible():
                self._train()
                return self._finish()
        except KeyboardInterrupt:
            self._say(f"Stopped after step {len(self.history.steps)} of {self.job.steps}; all ranks have ended.")
            self._say_written()
            return INTERRUPTED
        except RankFailed as failed:
            self._say_failed(failed)
            self._say_written()
            return 1

    def _train(self) -> None:
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

    def _finish(self) -> int:
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
        self._say("")
        for name, value in summary.rows():
            self.console.print(Text.assemble((f"   {name:<18}", "dim"), value))
        self._say("\n   and this is what the model writes by now:\n")
        for line in summary.sample.rstrip().splitlines():
            self.console.print(Text(f"   {line}".rstrip(), style="cyan"), no_wrap=True, overflow="ellipsis")
        self._say("")
        if summary.identical:
            self._say(f"replicas identical: {summary.fingerprints[0]}", style="bold green")
        else:
            self._say(describe_difference(summary.fingerprints), style="bold red")
        self._say_written()

    def _say_failed(self, failed: RankFailed) -> None:
        self._say(f"{failed}; the others were stopped.", style="bold red")
        if failed.words:
            self._say(f"Its last lines:\n{failed.words}")

    def _say_written(self) -> None:
        for name in (PICTURE, METRICS, SUMMARY):
            if (self.out / name).exists():
                self._say(f"wrote {self.out / name}")

    def _say(self, line: str, style: str = "") -> None:
        self.output.say(line, style)


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
