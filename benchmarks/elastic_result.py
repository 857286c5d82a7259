"""What it costs that ranks die and come, on each track."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.machine import Machine
from benchmarks.recovery import Kill, Recovery, Step, step_seconds
from benchmarks.targets import Target
from gradsync.cli.display import count


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column: what is taken from each recovery, and what it should be at most on a track."""

    name: str
    of: Callable[[Recovery], float]
    limits: dict[str, float]
    unit: str


FIGURES = (
    Figure(name="begun\nagain (s)", of=lambda one: one.began, limits={}, unit=" s"),
    Figure(
        name="next step,\nbeyond\none (s)",
        of=lambda one: one.beyond,
        limits={"shared_memory": 0.3, "process_group": 0.3, "hosts": 2.0},
        unit=" s",
    ),
    Figure(
        name="new rank\nin step\n(s)",
        of=lambda one: one.joined,
        limits={"shared_memory": 2.0, "process_group": 2.0, "hosts": 2.0},
        unit=" s",
    ),
    Figure(
        name="others\nlose\n(steps)",
        of=lambda one: one.lost,
        limits={"shared_memory": 2.0, "process_group": 2.0, "hosts": 2.0},
        unit="",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step, for the picture: seconds since the first one."""

    at: float
    step: int
    ranks: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ElasticTrack:
    key: str
    name: str
    ranks: int
    seconds: list[float]
    """Of steps that nobody disturbed."""
    recoveries: list[Recovery]
    kills: list[float]
    """On the points' clock."""
    points: list[Point]

    def values(self, figure: Figure) -> list[float]:
        return [figure.of(one) for one in self.recoveries]


@dataclass(frozen=True, kw_only=True)
class ElasticResult:
    shards: int
    tracks: list[ElasticTrack]
    absent: dict[str, str]
    """Tracks that could not be measured, and why."""
    machine: Machine = field(default_factory=Machine)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "targets": [target.to_dict() for target in targets_of(self)]}


def make_track(
    key: str, name: str, ranks: int, steps: Sequence[Step], kills: Sequence[Kill], found: list[Recovery]
) -> ElasticTrack:
    began = steps[0].at if steps else 0.0
    return ElasticTrack(
        key=key,
        name=f"{name}, {count(ranks, 'rank')}",
        ranks=ranks,
        seconds=step_seconds(steps, kills, ranks),
        recoveries=found,
        kills=[kill.at - began for kill in kills],
        points=points_of(steps, began),
    )


def points_of(steps: Sequence[Step], began: float) -> list[Point]:
    """In the order of time; a step's loss is the mean of what ranks had of it."""
    by_step: dict[int, list[Step]] = {}
    for one in steps:
        by_step.setdefault(one.step, []).append(one)
    return [
        Point(
            at=max(one.at for one in parts) - began,
            step=number,
            ranks=max(one.ranks for one in parts),
            loss=sum(one.loss for one in parts) / len(parts),
        )
        for number, parts in sorted(by_step.items())
    ]


def targets_of(result: ElasticResult) -> list[Target]:
    """For medians."""
    return [
        Target(
            name=f"{track.name}: {' '.join(figure.name.replace(' (s)', '').split())}",
            value=median(values) if (values := track.values(figure)) else None,
            limit=figure.limits[track.key],
            unit=figure.unit,
        )
        for track in result.tracks
        for figure in FIGURES
        if track.key in figure.limits
    ]
