"""Clocks of several hosts, aligned by what their ranks did together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.observe.timeline.clocks import Meeting, align, compare
from gradsync.observe.timeline.recording import Recording, shifted
from tests.unit.timeline.made import Made


def meetings(chance: random.Random, count: int, offset: float, drift: float = 0.0) -> list[dict[object, Meeting]]:
    """Of two hosts, whose ranks come when they come, and leave some time after the last one has."""
    found: list[dict[object, Meeting]] = [{}, {}]
    for number in range(count):
        came = [number + chance.expovariate(1000) for _ in range(2)]
        for host, own in enumerate(came):
            left = max(came) + chance.uniform(0.0001, 0.002)
            ahead = host * (offset + drift * number)
            found[host][number] = Meeting(own + ahead, left + ahead)
    return found


@settings(deadline=None)  # machines are busy
@given(st.integers(0, 10**6), st.floats(-1e5, 1e5), st.integers(1, 40))
def test_the_true_offset_is_within_the_error(seed: int, offset: float, count: int) -> None:
    here, there = meetings(random.Random(seed), count, offset)
    clock = compare((1,), here, there)
    assert abs(clock.offset - offset) <= clock.error + 1e-9


@pytest.mark.parametrize("offset", [0.0, -3000.0, 0.004])
def test_many_meetings_leave_a_small_error(offset: float) -> None:
    here, there = meetings(random.Random(1), 64, offset)
    clock = compare((1,), here, there)
    assert clock.error < 0.0005  # of jitter of a millisecond and two
    assert clock.offset == pytest.approx(offset, abs=0.0005)


def test_a_drift_is_part_of_the_error() -> None:
    here, there = meetings(random.Random(1), 60, 5.0, drift=1e-4)
    clock = compare((1,), here, there)
    assert clock.offset == pytest.approx(5.003, abs=0.001)
    assert 0.002 < clock.error < 0.004


def test_without_anything_in_common_nothing_is_known() -> None:
    assert compare((1,), {0: Meeting(1, 2)}, {1: Meeting(1, 2)}).error == float("inf")


def test_ranks_of_one_host_are_left_as_they_are() -> None:
    recording = Made(ranks=4).recording()
    assert align(recording) == recording


def test_all_ranks_of_a_host_are_moved_alike() -> None:
    true = Made(ranks=4, hosts=2).recording()
    aligned = align(Made(ranks=4, hosts=2, skew=77.0).recording())
    (clock,) = aligned.clocks
    assert clock.ranks == (2, 3)
    assert clock.offset == pytest.approx(77.0, abs=0.002)
    for mine, wanted in zip(aligned.ranks, true.ranks, strict=True):
        assert mine.rounds[0].opened_at == pytest.approx(wanted.rounds[0].opened_at, abs=clock.error + 1e-9)


def test_a_straggler_biases_rounds_and_an_exchange_corrects_that() -> None:
    """Who never comes last sees the transfer and the wait as one. The error says so."""
    late = {0: {"data": 10.0}}
    recording = Made(hosts=2, skew=77.0, late=late).recording()
    (by_rounds,) = align(recording).clocks
    assert abs(by_rounds.offset - 77.0) > 0.003
    assert abs(by_rounds.offset - 77.0) <= by_rounds.error + 1e-9
    exchanges = [[Meeting(5.0, 5.0002)], [Meeting(82.0, 82.0002)]]
    (exchanged,) = align(recording, exchanges).clocks
    assert exchanged.offset == pytest.approx(77.0, abs=0.0002)
    assert exchanged.error < 0.0003


def test_exchanges_count_only_for_the_ranks_that_made_them() -> None:
    recording = Made(ranks=4, hosts=2, skew=77.0).recording()
    aligned = align(recording, [[Meeting(5.0, 5.0002)], [], [Meeting(82.0, 82.0002)], []])
    assert aligned.clocks[0].error < 0.0003
    assert aligned.ranks[3].rounds[0].opened_at == pytest.approx(
        shifted(recording.ranks[3], -77.0).rounds[0].opened_at, abs=0.0003
    )


def test_a_recording_of_one_rank() -> None:
    recording = Made(ranks=1).recording()
    assert align(Recording(3, recording.ranks)).missing == (1, 2)
