"""When which rank is killed, while a training goes on: decided by what ranks report."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass

from benchmarks.recovery import Kill, Lost, Ready, Step
from gradsync.cli.report import Record

CALM = 8
"""Steps of all ranks before a kill."""


@dataclass(frozen=True)
class Seen:
    """What ranks have reported, and what was done to them, in its order."""

    steps: list[Step]
    ready: list[Ready]
    lost: list[Lost]
    kills: list[Kill]

    @classmethod
    def nothing(cls) -> Seen:
        return cls([], [], [], [])


class Killer:
    """Kills `kills` ranks, one after the other, each when all are in step, somewhere within a step."""

    def __init__(self, ranks: int, kills: int, seed: int) -> None:
        self.seen = Seen.nothing()
        self._ranks, self._left = ranks, kills
        self._random = random.Random(seed)
        self._calm: set[int] = set()  # steps that all ranks have finished, since the last one came
        self._pids: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        """All have come back, and a few steps were made."""
        return not self._left and len(self._calm) >= CALM

    def take(self, record: Record) -> bool:
        """Whether a rank was killed."""
        match record["event"]:
            case "ready":
                self.seen.ready.append(Ready(at=record["at"], pid=record["pid"]))
            case "lost":
                self.seen.lost.append(Lost(at=record["at"], pid=record["pid"]))
            case "step":
                return self._step(record)
        return False

    def _step(self, record: Record) -> bool:
        step = Step(**{name: record[name] for name in ("began", "at", "pid", "rank", "ranks", "step", "loss")})
        self.seen.steps.append(step)
        if step.ranks < self._ranks:
            self._calm.clear()
            self._pids.clear()
            return False
        self._calm.add(step.step)
        self._pids[step.rank] = step.pid
        if not self._left or len(self._calm) < CALM or len(self._pids) < self._ranks:
            return False
        self._kill(step)
        return True

    def _kill(self, latest: Step) -> None:
        victim = self._random.randrange(self._ranks)
        a_step = (max(s.at for s in self.seen.steps if s.step == latest.step) - self._began()) / (CALM - 1)
        time.sleep(self._random.random() * a_step)
        self.seen.kills.append(Kill(at=time.monotonic(), pid=self._pids[victim], rank=victim))
        os.kill(self._pids[victim], signal.SIGKILL)
        self._left -= 1
        self._calm.clear()
        self._pids.clear()

    def _began(self) -> float:
        first = min(self._calm)
        return min(s.at for s in self.seen.steps if s.step == first)
