"""The numbers of a recording. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median_low
from typing import NamedTuple

from gradsync.events import RoundClosed
from gradsync.observe.timeline.intervals import length
from gradsync.observe.timeline.recording import BucketContents, ModuleRecord, RankRecord, Recording
from gradsync.observe.timeline.step import Journeys, Spent, Step, journeys_of, spent_in, steps_of, waits_of


class RankMeans(NamedTuple):
    """One rank, in the mean over the steps."""

    rank: int
    host: str
    spent: Spent
    caused: float
    """Seconds a step that the others waited for it, in the mean over them."""


class BucketMeans(NamedTuple):
    """One bucket, in the mean over ranks and steps. Seconds."""

    number: int
    contents: BucketContents | None
    ready: float
    """After backward began."""
    backward: float
    """How long that took."""
    queued: float
    """From ready to launched: its turn had not come."""
    skew: float
    """From here to the last rank's launch."""
    transfer: float
    """From the last rank's launch to its arrival, as the first rank noticed."""
    awaited: float
    """In which the rank did nothing else."""
    overlapped: float
    """Share of journeys while backward still computed."""
    last_rank: int
    """That launched it last most often."""
    sent: float
    crossed: float


class Measures(NamedTuple):
    """What there is to say of the steps that all ranks have recorded."""

    recording: Recording
    module: ModuleRecord | None
    """Whose rounds count as steps; None: there were none."""
    steps: Mapping[int, tuple[Step, ...]]
    """By the round's number: one for each rank."""
    journeys: Journeys
    seconds: float
    """Of a step: the median."""
    spent: Spent
    """In the mean over ranks and steps."""
    by_rank: tuple[RankMeans, ...]
    buckets: tuple[BucketMeans, ...]
    transferring: float
    """Seconds a step in which a bucket traveled, from the last rank's launch on, in the mean over ranks."""
    corrected: int
    """Steps that needed a second pass."""

    @property
    def hidden(self) -> float | None:
        """The share of that in which backward went on. None: nothing was transferred."""
        return max(0.0, 1 - self.spent.transfer / self.transferring) if self.transferring > 0 else None

    @property
    def exposed_share(self) -> float:
        """Of the step, that went into waiting and delivering."""
        return self.spent.exposed / self.spent.total if self.spent.total > 0 else 0.0

    def round_at(self, share: float) -> int | None:
        """The round at that place among all, by their seconds: 0.5 is a typical one, 1 the slowest."""
        numbers = sorted(self.steps, key=lambda number: fmean(step.seconds for step in self.steps[number]))
        return numbers[round((len(numbers) - 1) * share)] if numbers else None


def measure(recording: Recording) -> Measures:
    """`recording`: by one clock."""
    serial, journeys = recording.main_module, journeys_of(recording)
    if serial is None:
        return Measures(recording, None, {}, journeys, 0.0, Spent(), (), (), 0.0, 0)
    steps = _warm_steps(recording, serial)
    each = [(step, spent_in(step, journeys)) for number in steps for step in steps[number]]
    if not each:
        return Measures(recording, recording.modules.get(serial), {}, journeys, 0.0, Spent(), (), (), 0.0, 0)
    caused = _caused(steps, journeys)
    by_rank = [
        RankMeans(one.rank, one.host, _mean(spent for step, spent in each if step.rank == one.rank), caused[one.rank])
        for one in recording.ranks
    ]
    return Measures(
        recording=recording,
        module=recording.modules.get(serial),
        steps=steps,
        journeys=journeys,
        seconds=median_low(step.seconds for step, _ in each),
        spent=_mean(spent for _, spent in each),
        by_rank=tuple(by_rank),
        buckets=_buckets(recording, serial, [step for step, _ in each], journeys),
        transferring=fmean(_transferring(step, journeys) for step, _ in each),
        corrected=sum(any(step.round.corrected for step in steps[number]) for number in steps),
    )


def _warm_steps(recording: Recording, serial: int) -> dict[int, tuple[Step, ...]]:
    """Of all ranks, by the round. The very first round makes the plan, and is left out if there are others; so is the
    first that was recorded if nobody knows where it began.
    """
    common = recording.common_rounds(serial)
    by_rank = [{step.round.round: step for step in steps_of(one, serial)} for one in recording.ranks]
    steps = {number: tuple(of_rank[number] for of_rank in by_rank) for number in common}
    for number in common[:2]:
        if len(steps) > 1 and (
            number == 0 or (number == common[0] and not _begins_alike(recording.ranks, steps[number]))
        ):
            del steps[number]
    return steps


def _begins_alike(records: Sequence[RankRecord], steps: Sequence[Step]) -> bool:
    """Whether each of these follows something that was recorded: an optimizer's step, or at least has a forward."""
    ends = [{span.ended_at for span in record.spans} for record in records]
    return all(step.began_at in ended for step, ended in zip(steps, ends, strict=True))


def _mean(all_spent: Iterable[Spent]) -> Spent:
    rows = list(all_spent)
    return Spent(*(fmean(column) for column in zip(*rows, strict=True))) if rows else Spent()


def _caused(steps: Mapping[int, Sequence[Step]], journeys: Journeys) -> dict[int, float]:
    """By rank: seconds a step that the others waited for it, in the mean over them."""
    caused: defaultdict[int, float] = defaultdict(float)
    ranks = 1
    for of_round in steps.values():
        ranks = len(of_round)
        for step in of_round:
            for event in step.rounds:
                for wait in waits_of(step.rank, event, journeys):
                    caused[wait.rank] += wait.complete_at - wait.began_at
    for rank in caused:
        caused[rank] /= len(steps) * max(ranks - 1, 1)
    return caused


def _transferring(step: Step, journeys: Journeys) -> float:
    """Until the first rank noticed that it had arrived, or as long as this one did nothing but wait for it."""
    travels, waits = [], []
    for event in step.rounds:
        found = [journeys[event.module, event.round, bucket.number] for bucket in event.buckets]
        travels += [(one.launched_at, one.arrived_at) for one in found]
        waits += [(wait.complete_at, wait.ended_at) for wait in waits_of(step.rank, event, journeys)]
    return length([*travels, *waits])


def _buckets(recording: Recording, serial: int, steps: Sequence[Step], journeys: Journeys) -> tuple[BucketMeans, ...]:
    contents = recording.modules[serial].buckets if serial in recording.modules else ()
    events = [step.round for step in steps]
    numbers = sorted({bucket.number for event in events for bucket in event.buckets})
    return tuple(
        _bucket(number, contents[number] if number < len(contents) else None, events, journeys) for number in numbers
    )


def _bucket(
    number: int, contents: BucketContents | None, events: Sequence[RoundClosed], journeys: Journeys
) -> BucketMeans:
    found = [(event, bucket) for event in events for bucket in event.buckets if bucket.number == number]
    all_ranks = [journeys[event.module, event.round, number] for event, _ in found]
    return BucketMeans(
        number=number,
        contents=contents,
        ready=fmean(bucket.ready_at - event.opened_at for event, bucket in found),
        backward=fmean(event.backward_ended_at - event.opened_at for event, _ in found),
        queued=fmean(bucket.launched_at - bucket.ready_at for _, bucket in found),
        skew=fmean(one.launched_at - bucket.launched_at for (_, bucket), one in zip(found, all_ranks, strict=True)),
        transfer=fmean(max(0.0, one.arrived_at - one.launched_at) for one in all_ranks),
        awaited=fmean(bucket.reduced_at - bucket.awaited_at if bucket.awaited_at else 0.0 for _, bucket in found),
        overlapped=fmean(_overlaps(event, bucket.launched_at) for event, bucket in found),
        last_rank=Counter(one.rank for one in all_ranks).most_common(1)[0][0],
        sent=fmean(bucket.traffic.sent for _, bucket in found),
        crossed=fmean(bucket.traffic.crossed for _, bucket in found),
    )


def _overlaps(event: RoundClosed, launched_at: float) -> bool:
    """Whether backward still computed: the engine says how many, and they are the first."""
    return launched_at in sorted(bucket.launched_at for bucket in event.buckets)[: event.overlapped_buckets]
