"""Times of several hosts on one clock. Pure.

Ranks of one host read the same clock. Between hosts, whatever all ranks do together says something: nobody can leave
before everybody has come. If a rank of host A came at 5.000 by its clock, and one of host B had left at 7.001 by its
own, then B's clock is at most 2.001 ahead of A's, plus nothing. Each bucket of each round is such a meeting, and so is
each exchange at the end of a recording. Together they leave an interval; its middle is the offset, and half its length
the error. If they contradict each other, for clocks drift, the middle is still what contradicts them least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gradsync.observe.timeline.recording import Clock, RankRecord, Recording, shifted


class Meeting(NamedTuple):
    """What ranks do together, by one clock."""

    came_at: float
    """The last of its ranks came."""
    left_at: float
    """The first of them could leave."""


Meetings = Mapping[object, Meeting]
"""By what they have in common on all ranks."""


def align(recording: Recording, exchanges: Sequence[Sequence[Meeting]] = ()) -> Recording:
    """All times by rank 0's clock. `exchanges`: for each of the recording's ranks, those at its end, by its clock."""
    by_clock: dict[str, list[int]] = {}
    for place, record in enumerate(recording.ranks):
        by_clock.setdefault(record.clock, []).append(place)
    meetings = {
        clock: _meetings(
            [recording.ranks[place] for place in places], [exchanges[place] for place in places if exchanges]
        )
        for clock, places in by_clock.items()
    }
    reference = recording.ranks[0].clock
    clocks = {
        clock: compare(tuple(recording.ranks[place].rank for place in places), meetings[reference], meetings[clock])
        for clock, places in by_clock.items()
        if clock != reference
    }
    moved = [
        shifted(record, -clocks[record.clock].offset) if record.clock in clocks else record
        for record in recording.ranks
    ]
    return recording._replace(ranks=tuple(moved), clocks=tuple(clocks.values()))


def compare(ranks: tuple[int, ...], reference: Meetings, other: Meetings) -> Clock:
    """The clock of `ranks`, by what they did together with those of the reference."""
    common = [(reference[key], other[key]) for key in reference.keys() & other.keys()]
    if not common:
        return Clock(ranks, 0.0, float("inf"))
    most = min(theirs.left_at - ours.came_at for ours, theirs in common)
    least = max(theirs.came_at - ours.left_at for ours, theirs in common)
    return Clock(ranks, (least + most) / 2, abs(most - least) / 2)


def _meetings(records: Sequence[RankRecord], exchanges: Iterable[Sequence[Meeting]]) -> Meetings:
    """Of the ranks of one clock. A bucket may have left before that was noted: its rank came when it was ready."""
    found: dict[object, Meeting] = {}

    def add(key: object, came_at: float, left_at: float) -> None:
        before = found.get(key, Meeting(came_at, left_at))
        found[key] = Meeting(max(before.came_at, came_at), min(before.left_at, left_at))

    for record in records:
        for event in record.rounds:
            for bucket in event.buckets:
                add((event.module, event.round, bucket.number), bucket.ready_at, bucket.reduced_at)
    for met in exchanges:
        for number, meeting in enumerate(met):
            add(number, *meeting)
    return found
