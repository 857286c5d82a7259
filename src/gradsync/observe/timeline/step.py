"""Which part of a rank's time is one step, and what it was spent on. Pure.

A step is a round and what belongs to it: it begins where the step before has ended, and ends with the optimizer.

    data | forward | loss | backward ............ | wait, deliver | optimizer |
                                  bucket 0 ------>|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradsync.events import BACKWARD, FORWARD, OPTIMIZER, BucketTimes, RoundClosed
from gradsync.observe.timeline.intervals import Interval, clip, length, union, without
from gradsync.observe.timeline.recording import PhaseSpan, RankRecord, Recording

# In the order in which they come in a step. "loss": what lies between forward and backward; "other": the rest.
PHASES = ("data", "forward", "loss", "backward", "ranks", "transfer", "deliver", "optimizer", "other")


class Step(NamedTuple):
    """One step of one rank."""

    rank: int
    round: RoundClosed
    began_at: float
    ended_at: float
    spans: tuple[PhaseSpan, ...]
    """Forwards, backwards that are no rounds, and steps of optimizers, of all modules."""
    others: tuple[RoundClosed, ...]
    """Rounds of other modules that closed in it."""

    @property
    def rounds(self) -> tuple[RoundClosed, ...]:
        return (self.round, *self.others)

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


def steps_of(record: RankRecord, module: int) -> list[Step]:
    """The steps of a rank that its rounds of a module make, in order."""
    rounds = [event for event in record.rounds if event.module == module]
    own = [span for span in record.spans if span.module == module]
    found: list[Step] = []
    for place, event in enumerate(rounds):
        opens_next = rounds[place + 1].opened_at if place + 1 < len(rounds) else float("inf")
        follows = bool(found) and found[-1].round.round == event.round - 1
        began_at = found[-1].ended_at if follows else _first_sign(own, event)
        ended_at = _last_optimizer(own, event.closed_at, opens_next)
        spans = tuple(one for one in record.spans if began_at <= one.began_at < ended_at)
        others = tuple(
            one
            for one in record.rounds
            if one.module != module and began_at <= one.closed_at and one.opened_at < ended_at
        )
        found.append(Step(record.rank, event, began_at, ended_at, spans, others))
    return found


def _first_sign(spans: Sequence[PhaseSpan], event: RoundClosed) -> float:
    """Of a step of which nobody knows where the one before has ended."""
    before = [span for span in spans if span.ended_at <= event.opened_at]
    stepped_at = max((span.ended_at for span in before if span.phase == OPTIMIZER), default=0.0)
    since = [span.began_at for span in before if span.began_at >= stepped_at]
    return stepped_at or min(since, default=event.opened_at)


def _last_optimizer(spans: Sequence[PhaseSpan], closed_at: float, opens_next: float) -> float:
    """Where the step ends whose round closed then: before the next forward."""
    later = [span for span in spans if closed_at <= span.began_at < opens_next]
    forward_at = min((span.began_at for span in later if span.phase == FORWARD), default=opens_next)
    steps = [span.ended_at for span in later if span.phase == OPTIMIZER and span.began_at < forward_at]
    return max(steps, default=closed_at)


# --- what it was spent on ---------------------------------------------------------------------------------


class Journey(NamedTuple):
    """One bucket of one round, over all ranks."""

    launched_at: float
    """By the last rank."""
    rank: int
    """That one."""
    arrived_at: float
    """As the first rank noticed: then the sum was complete."""


Journeys = Mapping[tuple[int, int, int], Journey]
"""By module, round and bucket."""


def journeys_of(recording: Recording) -> Journeys:
    found: dict[tuple[int, int, int], Journey] = {}
    for record in recording.ranks:
        for event in record.rounds:
            for bucket in event.buckets:
                key, own = (event.module, event.round, bucket.number), (bucket.launched_at, record.rank)
                before = found.get(key, Journey(*own, bucket.reduced_at))
                launched_at, rank = max(before[:2], own)
                found[key] = Journey(launched_at, rank, min(before.arrived_at, bucket.reduced_at))
    return found


class Wait(NamedTuple):
    """A rank does nothing but wait for a bucket: first until other ranks have launched what it needs, then for the
    transfer."""

    bucket: int
    began_at: float
    complete_at: float
    """The last rank has launched what is needed."""
    ended_at: float
    rank: int
    """That one."""


def waits_of(rank: int, event: RoundClosed, journeys: Journeys) -> list[Wait]:
    """Of one rank in one round, in order.

    A rank whose backward is over needs all buckets: while another one has yet to launch its last, that is whom it waits
    for, whatever travels meanwhile. In its own backward, with an optimizer in it, it needs this bucket only.
    """
    found = []
    of_round = [journeys[event.module, event.round, bucket.number] for bucket in event.buckets]
    for bucket, own in zip(event.buckets, of_round, strict=True):
        if not bucket.awaited_at or bucket.reduced_at <= bucket.awaited_at:
            continue
        last = max(of_round) if bucket.awaited_at >= event.backward_ended_at else own
        launched_at = last.launched_at if last.rank != rank else bucket.awaited_at
        complete_at = min(max(launched_at, bucket.awaited_at), bucket.reduced_at)
        found.append(Wait(bucket.number, bucket.awaited_at, complete_at, bucket.reduced_at, last.rank))
    return sorted(found, key=lambda wait: wait.began_at)


def delivery_of(event: RoundClosed, bucket: BucketTimes) -> Interval:
    """Buckets are delivered one after the other: it began when whatever was before it had ended."""
    marks = [at for one in event.buckets for at in (one.launched_at, one.reduced_at, one.delivered_at)]
    marks.append(event.backward_ended_at)
    began_at = max((at for at in marks if at < bucket.delivered_at), default=bucket.reduced_at)
    return max(began_at, bucket.reduced_at), bucket.delivered_at


class Spent(NamedTuple):
    """For what the seconds of a step went: no second is in two of them, and together they are the step."""

    data: float = 0.0
    """Before the first forward."""
    forward: float = 0.0
    loss: float = 0.0
    """Between forward and backward."""
    backward: float = 0.0
    ranks: float = 0.0
    """Waits for ranks that had yet to launch something."""
    transfer: float = 0.0
    """Waits for sums, when all had launched all."""
    deliver: float = 0.0
    """The rest of the end of backward: scaling, handing out, buffers, an optimizer in backward."""
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def exposed(self) -> float:
        """What data parallelism has added to the step."""
        return self.ranks + self.transfer + self.deliver

    @property
    def total(self) -> float:
        return sum(self)


def parts_of(step: Step, journeys: Journeys) -> dict[str, list[Interval]]:
    """The step in pieces, by phase; no two of them overlap."""
    began_at, ended_at = step.began_at, step.ended_at
    waits = [wait for event in step.rounds for wait in waits_of(step.rank, event, journeys)]
    by_phase = {
        "ranks": [(wait.began_at, wait.complete_at) for wait in waits],
        "transfer": [(wait.complete_at, wait.ended_at) for wait in waits],
        "deliver": [(event.backward_ended_at, event.closed_at) for event in step.rounds],
        "backward": [(event.opened_at, event.backward_ended_at) for event in step.rounds],
        "optimizer": _spans(step, OPTIMIZER),
        "forward": _spans(step, FORWARD),
    }
    by_phase["backward"] += _spans(step, BACKWARD)
    found: dict[str, list[Interval]] = {}
    taken: list[Interval] = []
    for phase, intervals in by_phase.items():  # what is named first counts
        found[phase] = without(clip(intervals, began_at, ended_at), taken)
        taken = union([*taken, *found[phase]])
    free = without([(began_at, ended_at)], taken)
    busy = min((one[0] for one in taken), default=ended_at)
    backwards = [one[0] for one in found["backward"]]
    forwards = [one[1] for one in found["forward"]]
    found["data"] = clip(free, began_at, busy)
    found["loss"] = [one for one in free if one[1] in backwards and one[0] in forwards]
    found["other"] = without(free, [*found["data"], *found["loss"]])
    return found


def _spans(step: Step, phase: str) -> list[Interval]:
    return [(span.began_at, span.ended_at) for span in step.spans if span.phase == phase]


def spent_in(step: Step, journeys: Journeys) -> Spent:
    return Spent(**{phase: length(intervals) for phase, intervals in parts_of(step, journeys).items()})
