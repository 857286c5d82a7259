"""A run of `gradsync demo --elastic`: disturbed first, then on one rank that nothing disturbs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from gradsync.cli.demo_run import METRICS, PICTURE, SUMMARY, DemoRun
from gradsync.cli.display import Display, make_display
from gradsync.cli.elastic_demo import picture, rank
from gradsync.cli.elastic_demo.history import ShardHistory
from gradsync.cli.elastic_demo.incident import Incident
from gradsync.cli.elastic_demo.summary import Summary, summarize
from gradsync.cli.launch import RankFailed, Ranks, describe_status
from gradsync.cli.launched import LaunchedRanks, Launcher
from gradsync.cli.report import Record
from gradsync.cli.style import Output, write_json


@dataclasses.dataclass
class Told:
    """By the ranks of one of the two runs."""

    history: ShardHistory
    parameters: int = 0
    sample: str = ""
    fingerprints: dict[int, str] = dataclasses.field(default_factory=dict)

    def take(self, record: Record, display: Display) -> Iterator[dict[str, Any]]:
        """What is whole with it, as it is kept."""
        history = self.history
        match record["event"]:
            case "ready" if not self.parameters:
                self.parameters = record["parameters"]
                display.ready(self.parameters)
            case "fingerprint":
                self.fingerprints[record["rank"]] = record["value"]
            case "sample":
                self.sample = record["text"]
            case "validation":
                history.validate(record["step"], record["loss"])
                yield record
            case "step":
                for step in history.take(record):
                    display.update(history)
                    yield {"event": "step", **asdict(step), "ranks": history.sizes[-1], "at": history.times[-1]}


class ElasticDemo(DemoRun):
    def __init__(self, job: rank.Job, out: Path, output: Output) -> None:
        self.job = job
        self.disturbed, self.undisturbed = Told(self._history(job.ranks)), Told(self._history(1))
        self.incident = Incident(job.kills, job.kills_after, job.ranks)
        super().__init__(self.disturbed.history, out, output)

    def _history(self, ranks: int) -> ShardHistory:
        job = self.job
        return ShardHistory(ranks=ranks, steps=job.steps, shards=job.shards, tokens_per_step=job.tokens_per_step)

    def train(self) -> None:
        with (self.out / METRICS).open("w", encoding="utf-8", buffering=1) as metrics:
            self._disturb(metrics)
        self.say(f"the same {self.job.steps} steps once more, on one rank that nothing disturbs")
        self.history = self.undisturbed.history
        alone = dataclasses.replace(self.job, pause=0.0)
        with (
            Ranks(rank.MODULE, [alone.to_json()], ranks=1) as ranks,
            make_display(self.console, ranks=1) as display,
        ):
            for _, record in ranks.reports():
                list(self.undisturbed.take(record, display))

    def _disturb(self, metrics: IO[str]) -> None:
        launcher = Launcher(["--ranks", f"{self.job.ranks - 1}:{self.job.ranks}"])
        with (
            LaunchedRanks(rank.MODULE, self.job.to_json(), [launcher]) as ranks,
            make_display(self.console, ranks=self.job.ranks) as display,
        ):
            for _, record in ranks.reports():
                for kept in self.disturbed.take(record, display):
                    metrics.write(json.dumps(kept) + "\n")
                for moment in self.incident.take(record):
                    metrics.write(json.dumps(asdict(moment)) + "\n")
                    display.note(moment.line)
            list(self.disturbed.history.rest())
            if self.incident.moment("joined") is None:
                display.note("training was over before another rank could come in its place: give it more --steps")

    def how_far(self) -> str:
        which = "" if self.history is self.disturbed.history else " of the undisturbed run"
        return super().how_far() + which

    def what_failed(self, failed: RankFailed) -> str:
        if self.history is self.disturbed.history:
            return f"gradsync run --elastic {describe_status(failed.status)}"
        return f"the undisturbed run {describe_status(failed.status)}"

    def finish(self) -> int:
        summary = summarize(
            self.disturbed.history,
            self.undisturbed.history,
            self.incident,
            parameters=self.disturbed.parameters,
            fingerprints=[value for _, value in sorted(self.disturbed.fingerprints.items())],
            undisturbed_fingerprint=self.undisturbed.fingerprints[0],
            sample=self.disturbed.sample,
            seconds=time.monotonic() - self.began,
        )
        picture.draw(self.disturbed.history, self.undisturbed.history, self.incident, self.out / PICTURE)
        write_json(self.out / SUMMARY, asdict(summary))
        self.show(summary.rows(), summary.sample)
        if summary.identical:
            self.say(f"bitwise the same model as undisturbed: {summary.undisturbed_fingerprint}", style="bold green")
        else:
            self.say(describe_difference(summary), style="bold red")
        self.say_written()
        self.output.write(asdict(summary))
        return 0 if summary.identical else 1


def describe_difference(summary: Summary) -> str:
    """Which ranks have which model, and since when."""
    since = summary.differs_from_step
    where = f"the loss differs from step {since} on" if since is not None else "the loss was the same in all steps"
    return "\n".join(
        [
            f"the models DIFFER: {where}",
            f"  {summary.undisturbed_fingerprint}  undisturbed",
            *(f"  {found}  rank {number}" for number, found in enumerate(summary.fingerprints)),
        ]
    )
