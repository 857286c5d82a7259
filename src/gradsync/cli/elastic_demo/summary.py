"""The result of an elastic run in figures: what was disturbed, and that it made no difference."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from statistics import fmean

import torch

from gradsync._version import __version__
from gradsync.cli.display import duration
from gradsync.cli.elastic_demo.history import ShardHistory
from gradsync.cli.elastic_demo.incident import Incident


@dataclass(frozen=True, kw_only=True)
class Summary:
    ranks: int
    shards: int
    parameters: int
    steps: int
    tokens: int
    first_loss: float
    last_loss: float  # mean of the last steps: a single one is noise
    validation_loss: float
    killed_rank: int
    killed_after_step: int | None  # None: it was over before
    went_on_seconds: float | None  # from the kill to the next step that the others finished
    ready_seconds: float | None  # from the kill to the moment when the one in its place had imported all
    joined_seconds: float | None  # from then to the end of its first step
    joined_in_step: int | None
    seconds: float  # of the whole command, from start to summary
    identical: bool
    fingerprints: list[str]  # by rank
    undisturbed_fingerprint: str
    differs_from_step: int | None  # the first one with another loss than in the undisturbed run
    sample: str
    gradsync: str = __version__
    torch: str = torch.__version__
    python: str = platform.python_version()

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("ranks", f"{self.ranks}, of which one was killed; then 1, undisturbed"),
            ("parameters", f"{self.parameters:,}"),
            ("steps", f"{self.steps:,}, each of {self.shards} shards"),
            ("training loss", f"{self.first_loss:.3f} → {self.last_loss:.3f}"),
            ("validation loss", f"{self.validation_loss:.3f}"),
            ("killed", f"rank {self.killed_rank} after step {self.killed_after_step}"),
            ("the others", _seconds(self.went_on_seconds, "s from the kill to their next finished step")),
            ("the new rank", _seconds(self.joined_seconds, "s from its imports to its first finished step")),
            ("time", duration(self.seconds)),
        ]


def _seconds(value: float | None, rest: str) -> str:
    return "not seen" if value is None else f"{value:.2f} {rest}"


def summarize(
    history: ShardHistory,
    undisturbed: ShardHistory,
    incident: Incident,
    *,
    parameters: int,
    fingerprints: list[str],
    undisturbed_fingerprint: str,
    sample: str,
    seconds: float,
) -> Summary:
    killed, joined = incident.moment("killed"), incident.moment("joined")
    differ = (a.step for a, b in zip(history.steps, undisturbed.steps, strict=False) if a.loss != b.loss)
    return Summary(
        ranks=history.ranks,
        shards=history.shards,
        parameters=parameters,
        steps=len(history.steps),
        tokens=history.tokens,
        first_loss=history.steps[0].loss,
        last_loss=fmean(s.loss for s in history.recent),
        validation_loss=history.validations[-1].loss,
        killed_rank=incident.rank,
        killed_after_step=killed.step if killed else None,
        went_on_seconds=incident.seconds("went on"),
        ready_seconds=incident.seconds("ready"),
        joined_seconds=incident.seconds("joined", since="ready"),
        joined_in_step=joined.step if joined else None,
        seconds=seconds,
        identical={*fingerprints} == {undisturbed_fingerprint},
        fingerprints=fingerprints,
        undisturbed_fingerprint=undisturbed_fingerprint,
        differs_from_step=next(differ, None),
        sample=sample,
    )
