"""What has happened in a run so far, put together from what each rank reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gradsync.cli.report import Record

SMOOTHING = 0.95
RECENT_STEPS = 20


@dataclass(frozen=True)
class Step:
    """One step of all ranks: means over the ranks."""

    step: int
    loss: float
    seconds: float
    waited: float


@dataclass(frozen=True)
class Validation:
    step: int
    loss: float


class History:
    """The parent averages, so that the ranks need no communication beyond the one which is shown."""

    def __init__(self, *, ranks: int, steps: int, tokens_per_step: int) -> None:
        self.ranks = ranks
        self.planned_steps = steps
        self.tokens_per_step = tokens_per_step
        self.steps: list[Step] = []
        self.smoothed: list[float] = []
        self.validations: list[Validation] = []
        self._parts: defaultdict[tuple[str, int], list[Record]] = defaultdict(list)

    def add(self, record: Record) -> Step | Validation | None:
        """The whole event, once the last rank's part of it has arrived."""
        key = (record["event"], record["step"])
        self._parts[key].append(record)
        if len(self._parts[key]) < self.ranks:
            return None
        return self._complete(self._parts.pop(key))

    def _complete(self, parts: list[Record]) -> Step | Validation:
        def mean(name: str) -> float:
            return fmean(part[name] for part in parts)

        number = parts[0]["step"]
        if parts[0]["event"] == "validation":
            return self.validate(number, mean("loss"))
        return self.append(Step(number, mean("loss"), mean("seconds"), mean("waited")))

    def validate(self, step: int, loss: float) -> Validation:
        self.validations.append(Validation(step, loss))
        return self.validations[-1]

    def append(self, step: Step) -> Step:
        self.steps.append(step)
        self.smoothed.append(self._smooth(step.loss))
        return step

    def _smooth(self, loss: float) -> float:
        """An exponential mean over about a fifth of the past, at most 20 steps: it follows the steep
        beginning and is calm later."""
        if not self.smoothed:
            return loss
        keep = min(SMOOTHING, 1 - 1 / (1 + len(self.steps) / 5))
        return keep * self.smoothed[-1] + (1 - keep) * loss

    @property
    def recent(self) -> Sequence[Step]:
        return self.steps[-RECENT_STEPS:]

    @property
    def tokens(self) -> int:
        return len(self.steps) * self.tokens_per_step

    def tokens_per_second(self, steps: Sequence[Step]) -> float:
        return len(steps) * self.tokens_per_step / sum(s.seconds for s in steps) if steps else 0.0


def waiting_share(steps: Sequence[Step]) -> float:
    """Of the time of `steps`, the part in which the end of backward was blocked on communication."""
    return sum(s.waited for s in steps) / sum(s.seconds for s in steps) if steps else 0.0
