"""Pieces of time: how long they are together, and how they lie in lanes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Interval = tuple[float, float]
T = TypeVar("T")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in pieces that do not touch, in order."""
    found: list[Interval] = []
    for began, ended in sorted(one for one in intervals if one[1] > one[0]):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of all of them together; what is in several counts once."""
    return sum(ended - began for began, ended in union(intervals))


def clip(intervals: Iterable[Interval], began: float, ended: float) -> list[Interval]:
    """What of them lies between two times."""
    cut = [(max(one[0], began), min(one[1], ended)) for one in intervals]
    return [one for one in cut if one[1] > one[0]]


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """What of them lies outside of others."""
    left = union(intervals)
    for began, ended in union(taken):
        left = [piece for one in left for piece in (*clip([one], one[0], began), *clip([one], ended, one[1]))]
    return left


def nested_lanes(items: Sequence[T], interval: Callable[[T], Interval]) -> list[list[T]]:
    """As few lanes as a look from left to right finds, in which any two items are apart, or one lies in the other.

    Viewers of traces want that: what overlaps otherwise, they show wrongly.
    """
    lanes: list[list[T]] = []
    open_until: list[list[float]] = []  # in each lane: ends of those that the next one may lie in
    for item in sorted(items, key=lambda one: (interval(one)[0], -interval(one)[1])):
        began, ended = interval(item)
        for ends in open_until:
            while ends and ends[-1] <= began:
                ends.pop()
        fits = [place for place, ends in enumerate(open_until) if not ends or ended <= ends[-1]]
        if not fits:
            lanes.append([])
            open_until.append([])
        place = fits[0] if fits else -1
        lanes[place].append(item)
        open_until[place].append(ended)
    return lanes


def flat_lanes(items: Sequence[T], interval: Callable[[T], Interval]) -> list[list[T]]:
    """As few lanes as there can be in which all items are apart."""
    lanes: list[list[T]] = []
    for item in sorted(items, key=interval):
        for lane in lanes:
            if interval(lane[-1])[1] <= interval(item)[0]:
                lane.append(item)
                break
        else:
            lanes.append([item])
    return lanes
