"""The trace is one that viewers show rightly, and has everything in it."""

from __future__ import annotations

import json

import pytest

from gradsync.observe.timeline.chrome import chrome_trace
from gradsync.observe.timeline.clocks import align
from tests.unit.timeline import trace_format
from tests.unit.timeline.made import Made
from tests.unit.timeline.test_measures import MADE


@pytest.mark.parametrize("made", MADE)
def test_it_keeps_to_the_format(made: Made) -> None:
    trace = json.loads(json.dumps(chrome_trace(align(made.recording()))))
    slices = trace_format.check(trace)
    assert {process for process, _ in slices} == set(range(made.ranks))


def test_every_phase_and_bucket_of_every_rank_is_there() -> None:
    made = Made(accumulated=1)
    slices = trace_format.check(chrome_trace(made.recording()))
    for rank in range(2):
        names = [one["name"] for lane, events in slices.items() if lane[0] == rank for one in events]
        # A round's backward and the one that only accumulates.
        assert (names.count("forward"), names.count("backward"), names.count("optimizer")) == (8, 8, 4)
        for number in range(4):
            assert names.count(f"bucket {number}") == names.count(f"deliver bucket {number}") == 4
        assert names.count("ready") == names.count("reduce") == 16
        assert names.count("wait for bucket 3") == 4


def test_the_parts_of_a_bucket_lie_in_it() -> None:
    slices = trace_format.check(chrome_trace(Made().recording()))
    for events in slices.values():
        if events[0]["name"].startswith("bucket"):
            assert len({one["args"]["bucket"] for one in events}) == 1
            assert {one["name"] for one in events} == {events[0]["name"], "ready", "reduce", "deliver"}


def test_times_are_microseconds_from_the_first_one_on() -> None:
    slices = trace_format.check(chrome_trace(Made().recording()))
    phases = slices[0, 1]
    assert phases[0]["name"] == "forward"
    assert phases[0]["ts"] == 0
    assert phases[0]["dur"] == pytest.approx(10_000)


def test_arrows_lead_from_who_was_late_to_who_waited() -> None:
    trace = chrome_trace(Made(ranks=3, late={1: {"data": 6.0}}, rounds=1).recording())
    trace_format.check(trace)
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert [event["pid"] for event in arrows if event["ph"] == "s"] == [1, 1, 1, 1]
    assert sorted(event["pid"] for event in arrows if event["ph"] == "f") == [0, 0, 2, 2]


def test_two_modules_have_lanes_of_their_own() -> None:
    recording = Made().recording()
    ranks = []
    for record in recording.ranks:
        others = tuple(event._replace(module=1) for event in record.rounds)
        second = record.modules[0]._replace(serial=1, name="Critic")
        ranks.append(record._replace(rounds=(*record.rounds, *others), modules=(*record.modules, second)))
    trace = chrome_trace(recording._replace(ranks=tuple(ranks)))
    trace_format.check(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"phases of Net", "phases of Critic", "bucket 0 of Net", "bucket 3 of Critic"} <= names


def test_phases_that_overlap_get_another_lane() -> None:
    """As when a model is evaluated in another thread."""
    recording = Made().recording()
    first = recording.ranks[0]
    beside = first.spans[0]._replace(began_at=first.spans[0].began_at + 0.003, ended_at=first.spans[0].ended_at + 0.001)
    trace = chrome_trace(recording._replace(ranks=(first._replace(spans=(*first.spans, beside)), *recording.ranks[1:])))
    trace_format.check(trace)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names.count("phases 2") == 1


def test_the_check_notices_what_viewers_would_show_wrongly() -> None:
    trace = chrome_trace(Made().recording())
    one = next(event for event in trace["traceEvents"] if event["name"] == "forward")
    one["dur"] += 1000
    with pytest.raises(AssertionError, match="does not nest"):
        trace_format.check(trace)


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert trace_format.check(chrome_trace(Made(rounds=0).recording())) == {}
