"""What it costs that a rank dies and another one comes: pure, from when which rank has finished which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.ratios import spread


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank has finished it, `at` a time of the clock that all processes of a machine have in common."""

    began: float
    at: float
    pid: int
    rank: int
    ranks: int
    """How many had a part in it."""
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank has imported all, has made its model, and comes to where ranks meet."""

    at: float
    pid: int


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank has taken a step back, as another one is lost."""

    at: float
    pid: int


@dataclass(frozen=True, kw_only=True)
class Kill:
    at: float
    pid: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From one kill."""

    at: float
    rank: int
    noticed: float | None
    """Seconds from the kill until the last one who was in the same step has taken it back; None: nobody had to."""
    began: float
    """Seconds from the kill until the last of the others has begun the step that they all finish next."""
    went_on: float
    """Seconds from the kill until the others have all finished their next step."""
    beyond: float
    """The same, less such a step."""
    ready: float
    """Seconds from the kill until the one in its place was ready."""
    joined: float
    """From then until it has finished its first step."""
    lost: float
    """What the others have lost from then until that step, in steps' time."""


def finishes(steps: Sequence[Step]) -> dict[int, float]:
    """When the last rank had finished each step."""
    found: dict[int, float] = {}
    for one in steps:
        found[one.step] = max(one.at, found.get(one.step, one.at))
    return dict(sorted(found.items()))


def durations(finished: dict[int, float]) -> list[float]:
    """Of steps that come after another one."""
    return [b_at - a_at for (a, a_at), (b, b_at) in pairwise(finished.items()) if b == a + 1]


def step_seconds(steps: Sequence[Step], kills: Sequence[Kill], ranks: int) -> list[float]:
    """Of each step of all ranks that nobody disturbed."""
    found: list[float] = []
    bounds = [float("-inf"), *(kill.at for kill in kills), float("inf")]
    for begin, end in pairwise(bounds):
        found += durations(finishes([one for one in steps if begin < one.at <= end and one.ranks == ranks]))
    return found


def recovery(
    steps: Sequence[Step], ready: Sequence[Ready], lost: Sequence[Lost], kill: Kill, until: float, usual: float
) -> Recovery | None:
    """`until`: the next kill. `usual`: seconds of a step of all ranks. None if it was not seen to its end."""
    came = {one.pid: one.at for one in ready if kill.at < one.at < until}
    mine = [one for one in steps if kill.at < one.at < until]
    first = next((one for one in mine if one.pid in came), None)
    if first is None:
        return None
    all_ranks = max(one.ranks for one in mine)
    short = finishes([one for one in mine if one.ranks < all_ranks and one.step < first.step and one.pid not in came])
    if not short:
        return None
    next_step, next_at = next(iter(short.items()))
    theirs = durations(short) or [usual]
    came_at = came[first.pid]
    joined_at = finishes([one for one in mine if one.step == first.step])[first.step]
    # The last step before it came; each one since could have been as fast as the faster ones of theirs were.
    last, last_at = max(((step, at) for step, at in short.items() if at <= came_at), default=(min(short), next_at))
    expected = (first.step - 1 - last) * spread(theirs).low + usual
    return Recovery(
        at=kill.at,
        rank=kill.rank,
        noticed=max((one.at - kill.at for one in lost if kill.at < one.at < next_at), default=None),
        began=max(one.began for one in mine if one.step == next_step and one.ranks < all_ranks) - kill.at,
        went_on=next_at - kill.at,
        beyond=next_at - kill.at - median(theirs),
        ready=came_at - kill.at,
        joined=first.at - came_at,
        lost=(joined_at - last_at - expected) / usual,
    )


def recoveries(
    steps: Sequence[Step], ready: Sequence[Ready], lost: Sequence[Lost], kills: Sequence[Kill], ranks: int
) -> list[Recovery]:
    usual = step_seconds(steps, kills, ranks)
    if not usual:
        return []
    ends = [kill.at for kill in kills[1:]] + [float("inf")]
    found = [recovery(steps, ready, lost, kill, end, median(usual)) for kill, end in zip(kills, ends, strict=False)]
    return [one for one in found if one is not None]
