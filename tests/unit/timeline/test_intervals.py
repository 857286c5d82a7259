"""Pieces of time, and lanes of them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.observe.timeline.intervals import Interval, clip, flat_lanes, length, nested_lanes, union, without

TIMES = st.integers(0, 20)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(lambda one: (float(min(one)), float(max(one)))), max_size=12)


def cells(intervals: list[Interval]) -> set[int]:
    return {cell for began, ended in intervals for cell in range(int(began), int(ended))}


@settings(deadline=None)  # machines are busy
@given(INTERVALS, INTERVALS)
def test_they_are_sets_of_time(one: list[Interval], other: list[Interval]) -> None:
    assert cells(union(one)) == cells(one)
    assert length(one) == len(cells(one))
    assert cells(without(one, other)) == cells(one) - cells(other)
    assert cells(clip(one, 5, 9)) == cells(one) & set(range(5, 9))


def nests(one: Interval, other: Interval) -> bool:
    inner, outer = sorted((one, other), key=lambda interval: interval[1] - interval[0])
    apart = one[1] <= other[0] or other[1] <= one[0]
    return apart or (outer[0] <= inner[0] and inner[1] <= outer[1])


@settings(deadline=None)  # machines are busy
@given(INTERVALS)
def test_lanes_hold_each_item_once_and_nest(items: list[Interval]) -> None:
    lanes = nested_lanes(items, lambda one: one)
    assert sorted(one for lane in lanes for one in lane) == sorted(items)
    assert all(nests(one, other) for lane in lanes for one, other in combinations(lane, 2))


@settings(deadline=None)  # machines are busy
@given(INTERVALS)
def test_flat_lanes_are_apart_and_as_few_as_can_be(items: list[Interval]) -> None:
    lanes = flat_lanes(items, lambda one: one)
    assert sorted(one for lane in lanes for one in lane) == sorted(items)
    assert all(one[1] <= other[0] or other[1] <= one[0] for lane in lanes for one, other in combinations(lane, 2))
    at_once = [sum(began <= cell < ended for began, ended in items) for cell in range(20)]
    long = [one for one in items if one[1] > one[0]]
    assert len(flat_lanes(long, lambda one: one)) == max(at_once)


def test_what_lies_in_another_shares_its_lane() -> None:
    assert len(nested_lanes([(0.0, 10.0), (2.0, 4.0), (4.0, 10.0)], lambda one: one)) == 1
    assert len(nested_lanes([(0.0, 10.0), (2.0, 12.0)], lambda one: one)) == 2
