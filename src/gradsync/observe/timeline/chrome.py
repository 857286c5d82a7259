"""A recording as a trace that chrome://tracing and Perfetto show: one process a rank, lanes in it. Pure.

Both want that slices of one lane are apart or nested. So phases of each module have a lane, or more if they overlap, as
those of two threads do, and each bucket has its own. An arrow leads from the rank that launched a bucket last to each
wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from gradsync.events import RoundClosed
from gradsync.observe.timeline.intervals import Interval, nested_lanes
from gradsync.observe.timeline.recording import RankRecord, Recording
from gradsync.observe.timeline.step import Journeys, delivery_of, journeys_of, waits_of

Event = dict[str, Any]


class Slice(NamedTuple):
    """Something that a rank did for a while."""

    name: str
    category: str
    began_at: float
    ended_at: float
    details: Mapping[str, Any]

    @property
    def interval(self) -> Interval:
        return self.began_at, self.ended_at


class Lane(NamedTuple):
    process: int
    number: int


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """To be written as JSON. Times are microseconds since the first thing that was recorded."""
    journeys, origin = journeys_of(recording), first_time(recording)
    events: list[Event] = []
    for record in recording.ranks:
        events += _named_process(record)
        for number, (name, lane) in enumerate(_lanes(recording, record, journeys), 1):
            events += _named_lane(Lane(record.rank, number), name)
            events += [_complete(one, Lane(record.rank, number), origin) for one in lane]
    events += _arrows(recording, events, journeys, origin)
    clocks = [
        {"ranks": list(one.ranks), "ahead of rank 0's, s": one.offset, "error, s": one.error}
        for one in recording.clocks
    ]
    about = {"ranks": recording.size, "clocks": clocks}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def first_time(recording: Recording) -> float:
    spans = (span.began_at for record in recording.ranks for span in record.spans)
    rounds = (event.opened_at for record in recording.ranks for event in record.rounds)
    return min((*spans, *rounds), default=0.0)


def _lanes(recording: Recording, record: RankRecord, journeys: Journeys) -> Iterator[tuple[str, Sequence[Slice]]]:
    """Names and slices of a rank's lanes."""
    modules = recording.modules
    for serial in sorted({event.module for event in record.rounds} | {span.module for span in record.spans}):
        of = f" of {modules[serial].name}" if len(modules) > 1 and serial in modules else ""
        rounds = [event for event in record.rounds if event.module == serial]
        phases = [
            Slice(span.phase, span.phase, span.began_at, span.ended_at, {})
            for span in record.spans
            if span.module == serial
        ]
        for event in rounds:
            phases += _phases(record.rank, event, journeys)
        for number, lane in enumerate(nested_lanes(phases, lambda one: one.interval), 1):
            yield f"phases{of} {number}" if number > 1 else f"phases{of}", lane
        for number in sorted({bucket.number for event in rounds for bucket in event.buckets}):
            yield f"bucket {number}{of}", [one for event in rounds for one in _bucket_slices(event, number, journeys)]


def _phases(rank: int, event: RoundClosed, journeys: Journeys) -> Iterator[Slice]:
    """The round as the rank's own time: backward, and what follows it."""
    label = {"round": event.round}
    backward = Slice("backward", "backward", event.opened_at, event.backward_ended_at, label)
    waited = {**label, "waited ms": round(1e3 * event.waited, 4)}
    yield backward
    yield Slice("end of backward", "exposed", event.backward_ended_at, event.closed_at, waited)
    for wait in waits_of(rank, event, journeys):
        for_rank = round(1e3 * (wait.complete_at - wait.began_at), 4)
        details = {"bucket": wait.bucket, "for rank": wait.rank, "ms until it launched": for_rank, **label}
        name = f"wait for bucket {wait.bucket}"
        yield Slice(name, "wait", wait.began_at, wait.ended_at, details)
    for bucket in event.buckets:
        began_at, ended_at = delivery_of(event, bucket)
        yield Slice(
            f"deliver bucket {bucket.number}", "deliver", began_at, ended_at, {**label, "bucket": bucket.number}
        )


def _bucket_slices(event: RoundClosed, number: int, journeys: Journeys) -> Iterator[Slice]:
    """A bucket's way in one round, and what happened to it on that."""
    for bucket in event.buckets:
        if bucket.number != number:
            continue
        last = journeys[event.module, event.round, bucket.number].rank
        details = {"round": event.round, "bucket": bucket.number, "launched last by rank": last}
        sent = {"bytes sent": bucket.traffic.sent, "bytes between hosts": bucket.traffic.crossed}
        yield Slice(f"bucket {bucket.number}", "bucket", bucket.ready_at, bucket.delivered_at, {**details, **sent})
        yield Slice("ready", "ready", bucket.ready_at, bucket.launched_at, details)
        yield Slice("reduce", "reduce", bucket.launched_at, bucket.reduced_at, details)
        yield Slice("deliver", "deliver", *delivery_of(event, bucket), details)


# --- in the format's words --------------------------------------------------------------------------------


def _complete(one: Slice, lane: Lane, origin: float) -> Event:
    began_at, ended_at = _microseconds(one.began_at, origin), _microseconds(one.ended_at, origin)
    return {
        "ph": "X",
        "name": one.name,
        "cat": one.category,
        "pid": lane.process,
        "tid": lane.number,
        "ts": began_at,
        "dur": round(max(ended_at - began_at, 0.0), 3),
        "args": one.details,
    }


def _microseconds(at: float, origin: float) -> float:
    return round(1e6 * (at - origin), 3)


def _named_process(record: RankRecord) -> Iterator[Event]:
    for name, value in (
        ("process_name", {"name": f"rank {record.rank}"}),
        ("process_labels", {"labels": record.host}),
        ("process_sort_index", {"sort_index": record.rank}),
    ):
        yield {"ph": "M", "name": name, "pid": record.rank, "tid": 0, "args": value}


def _named_lane(lane: Lane, name: str) -> Iterator[Event]:
    for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": lane.number})):
        yield {"ph": "M", "name": key, "pid": lane.process, "tid": lane.number, "args": value}


def _arrows(recording: Recording, events: Iterable[Event], journeys: Journeys, origin: float) -> Iterator[Event]:
    """From the last rank's launch of a bucket to the waits for it on other ranks."""
    lanes = {
        (event["pid"], event["args"]["round"], event["args"]["bucket"], event["cat"], event["ts"]): event
        for event in events
        if event["ph"] == "X" and event["cat"] in ("reduce", "wait")
    }
    numbers = count(1)
    for record in recording.ranks:
        for event in record.rounds:
            for wait in waits_of(record.rank, event, journeys):
                launched_at, last, _ = journeys[event.module, event.round, wait.bucket]
                key = event.round, wait.bucket
                source = lanes.get((last, *key, "reduce", _microseconds(launched_at, origin)))
                target = lanes.get((record.rank, *key, "wait", _microseconds(wait.began_at, origin)))
                if last == record.rank or source is None or target is None:
                    continue
                # A small bucket may be there before its rank has noted that it left.
                if not wait.began_at <= launched_at <= wait.ended_at:
                    continue
                number, at = next(numbers), _microseconds(launched_at, origin)
                for phase, one, when in (("s", source, source["ts"]), ("f", target, at)):
                    arrow = {"ph": phase, "id": number, "name": "launched last", "cat": "arrow", "ts": when}
                    yield {**arrow, "pid": one["pid"], "tid": one["tid"], **({"bp": "e"} if phase == "f" else {})}
