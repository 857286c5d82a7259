"""A rank is killed, the others go on, another one comes in its place: seen in what ranks report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gradsync.cli.display import count
from gradsync.cli.report import Record


@dataclass(frozen=True, kw_only=True)
class Moment:
    event: str
    """ "killed", "went on", "ready" or "joined"."""
    at: float
    step: int
    line: str
    """What to tell people."""


class Incident:
    """Kills a rank, once, and watches the others."""

    def __init__(self, rank: int, after_step: int, ranks: int) -> None:
        self.rank, self.after_step, self.ranks = rank, after_step, ranks
        self.moments: list[Moment] = []
        self._at_first: set[int] = set()
        self._latest = 0

    def moment(self, event: str) -> Moment | None:
        return next((one for one in self.moments if one.event == event), None)

    def seconds(self, event: str, since: str = "killed") -> float | None:
        """None if one of them was not seen."""
        then, before = self.moment(event), self.moment(since)
        return None if then is None or before is None else then.at - before.at

    def take(self, record: Record) -> Iterator[Moment]:
        """What has happened with this record."""
        if (moment := self._seen(record)) is not None:
            self.moments.append(moment)
            yield moment

    def _seen(self, record: Record) -> Moment | None:
        killed = self.moment("killed")
        if record["event"] == "ready":
            return self._ready(record, killed)
        if record["event"] != "step":
            return None
        self._latest = max(self._latest, record["step"])
        if killed is None:
            self._at_first.add(record["pid"])
            if record["rank"] == self.rank and record["step"] >= self.after_step:
                return self._kill(record)
        elif record["pid"] not in self._at_first:
            if self.moment("joined") is None:
                line = f"it has taken over all that the others had: step {record['step']} has {record['ranks']} ranks"
                return Moment(event="joined", at=record["at"], step=record["step"], line=line)
        elif self.moment("went on") is None and record["at"] > killed.at and record["ranks"] < self.ranks:
            line = (
                f"{count(record['ranks'], 'rank')} went on: step {record['step']} was finished "
                f"{record['at'] - killed.at:.2f} s after the kill"
            )
            return Moment(event="went on", at=record["at"], step=record["step"], line=line)
        return None

    def _kill(self, record: Record) -> Moment:
        os.kill(record["pid"], signal.SIGKILL)
        line = f"killed rank {self.rank} (process {record['pid']}) with SIGKILL, after step {record['step']}"
        return Moment(event="killed", at=time.monotonic(), step=record["step"], line=line)

    def _ready(self, record: Record, killed: Moment | None) -> Moment | None:
        if killed is None:
            return None
        line = f"a rank that was started in its place is there, {record['at'] - killed.at:.1f} s after the kill"
        return Moment(event="ready", at=record["at"], step=self._latest, line=line)
