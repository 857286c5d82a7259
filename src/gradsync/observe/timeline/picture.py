"""One step of all ranks on one axis, as a drawing. Pure.

For each rank a row with what it did, and below it the way of its buckets: lanes, as many as overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gradsync.events import BucketTimes, RoundClosed
from gradsync.observe.timeline.advice import ms, size
from gradsync.observe.timeline.drawing import Drawing, Line, Rect, Text, text_width
from gradsync.observe.timeline.intervals import flat_lanes
from gradsync.observe.timeline.measures import Measures
from gradsync.observe.timeline.step import Journeys, Step, parts_of, spent_in

WIDTH = 1200.0
_LEFT, _RIGHT, _TOP = 118.0, 126.0, 124.0
_MOST_RANKS = 64  # others are left out, those waited for least
_LEGEND = {
    "data": "data",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "ranks": "waits for ranks",
    "transfer": "waits for transfer",
    "deliver": "delivers",
    "optimizer": "optimizer",
    "queued": "not its turn",
    "skew": "not all have launched",
    "travel": "travels",
    "noticed": "has arrived, not noticed yet",
}
_WAY = {"queued", "skew", "travel", "noticed"}  # of buckets
_STRONG = ("forward", "backward", "ranks", "optimizer", "travel")  # text on them is white
_LONG = {
    "data": "before forward: data and the like",
    "loss": "between forward and backward",
    "ranks": "waits for ranks that have yet to launch a bucket",
    "transfer": "waits for transfers, when all ranks have launched all buckets",
    "deliver": "delivers gradients",
}

Shape = Rect | Text | Line


class Axis(NamedTuple):
    """Seconds to pixels."""

    began_at: float
    ended_at: float

    def __call__(self, at: float) -> float:
        return _LEFT + (at - self.began_at) / (self.ended_at - self.began_at) * (WIDTH - _LEFT - _RIGHT)


class _Bar(NamedTuple):
    """A bucket of a round, on one rank."""

    event: RoundClosed
    times: BucketTimes


def draw(measures: Measures, number: int) -> Drawing:
    """The step of this round."""
    steps = _shown(measures, number)
    axis = Axis(min(step.began_at for step in steps), max(step.ended_at for step in steps))
    shapes: list[Shape] = []
    y = _TOP
    for step in steps:
        height = _height(step, len(steps))
        shapes += _rank(measures, step, axis, y, height)
        y += height + (14 if _has_lanes(len(steps)) else 4)
    bottom = y
    title = _title(measures, number, axis)
    left_out = len(measures.steps[number]) - len(steps)
    note = f"; {left_out} ranks that were waited for least are left out" if left_out else ""
    head = [
        Text(24, 34, title, 18, bold=True),
        Text(24, 56, _subtitle(measures, number) + note, 13, "quiet"),
        *_legend(_kinds(shapes)),
    ]
    grid = list(_grid(axis, _TOP - 8, bottom))
    return Drawing(WIDTH, bottom + 34, title, (*head, *grid, *shapes))


def _shown(measures: Measures, number: int) -> list[Step]:
    steps = list(measures.steps[number])
    if len(steps) <= _MOST_RANKS:
        return steps
    caused = {one.rank: one.caused for one in measures.by_rank}
    worst = sorted(steps, key=lambda step: -caused[step.rank])[:_MOST_RANKS]
    return sorted(worst, key=lambda step: step.rank)


def _title(measures: Measures, number: int, axis: Axis) -> str:
    name = measures.module.name if measures.module is not None else "the module"
    ranks = measures.recording.size
    return f"{name}, round {number}: {ms(axis.ended_at - axis.began_at)} on {ranks} rank{'s' * (ranks > 1)}"


def _subtitle(measures: Measures, number: int) -> str:
    each = [spent_in(step, measures.journeys) for step in measures.steps[number]]
    exposed, total = sum(one.exposed for one in each) / len(each), sum(one.total for one in each) / len(each)
    nbytes = measures.steps[number][0].round.nbytes
    transport = measures.module.transport.replace("_", " ") if measures.module is not None else ""
    buckets = len(measures.steps[number][0].round.buckets)
    of = f"{size(nbytes)} of gradients in {buckets} bucket{'s' * (buckets != 1)} over {transport}"
    return f"{of}; {ms(exposed)} exposed in the mean over ranks, {exposed / total:.1%} of the step"


def _has_lanes(ranks: int) -> bool:
    return ranks <= 16


def _lanes(step: Step) -> list[list[_Bar]]:
    bars = [_Bar(event, times) for event in step.rounds for times in event.buckets]
    return flat_lanes(bars, lambda bar: (bar.times.ready_at, bar.times.reduced_at))


def _lane_height(lanes: int) -> float:
    return max(2.5, min(13.0, 104 / max(lanes, 1)))


def _height(step: Step, ranks: int) -> float:
    if not _has_lanes(ranks):
        return 14.0
    lanes = len(_lanes(step))
    return 28.0 + lanes * _lane_height(lanes)


# --- one rank ---------------------------------------------------------------------------------------------


def _rank(measures: Measures, step: Step, axis: Axis, y: float, height: float) -> Iterator[Shape]:
    ranks = len(measures.steps[step.round.round])
    row = 24.0 if _has_lanes(ranks) else height
    host = next(one.host for one in measures.recording.ranks if one.rank == step.rank)
    spent = spent_in(step, measures.journeys)
    middle = y + row / 2 + 4
    yield Text(_LEFT - 12, middle, f"rank {step.rank}", 13 if row > 20 else 11, anchor="end", bold=True)
    if row > 20:
        yield Text(_LEFT - 12, middle + 15, _short(host), 10.5, "quiet", "end")
    yield Text(WIDTH - _RIGHT + 12, middle, f"{ms(spent.exposed)} exposed", 11.5 if row > 20 else 10, "quiet")
    for phase, intervals in parts_of(step, measures.journeys).items():
        for began_at, ended_at in intervals:
            yield from _phase(axis, phase, began_at, ended_at, y, row)
    if _has_lanes(ranks):
        yield from _buckets(step, measures.journeys, axis, y + row + 4)


def _short(host: str) -> str:
    return host if len(host) <= 16 else host[:15] + "…"


def _phase(axis: Axis, phase: str, began_at: float, ended_at: float, y: float, height: float) -> Iterator[Shape]:
    x, width = axis(began_at), axis(ended_at) - axis(began_at)
    yield Rect(x, y, width, height, phase, f"{_LONG.get(phase, phase)}: {ms(ended_at - began_at)}")
    if phase != "other" and height > 20:
        yield from _inside(_LEGEND[phase], x, width, y + height / 2 + 4, 11.5, phase)


def _inside(text: str, x: float, width: float, y: float, font: float, kind: str) -> Iterator[Text]:
    """If there is room for it."""
    if text_width(text, font) + 6 < width:
        yield Text(x + width / 2, y, text, font, "on" if kind in _STRONG else "ink", "middle")


def _buckets(step: Step, journeys: Journeys, axis: Axis, y: float) -> Iterator[Shape]:
    lanes = _lanes(step)
    height = _lane_height(len(lanes))
    for place, lane in enumerate(lanes):
        top = y + place * height
        for bar in lane:
            yield from _bucket(bar, journeys, axis, top, height - (2 if height > 6 else 0.5))


def _bucket(bar: _Bar, journeys: Journeys, axis: Axis, y: float, height: float) -> Iterator[Shape]:
    event, times = bar
    launched_at, last, arrived_at = journeys[event.module, event.round, times.number]
    complete_at = min(launched_at, times.reduced_at)
    arrived_at = min(max(arrived_at, complete_at), times.reduced_at)
    title = (
        f"bucket {times.number}: ready {ms(times.ready_at - event.opened_at)} after backward began, "
        f"launched {ms(times.launched_at - times.ready_at)} later; "
        f"last by rank {last}, {ms(max(0.0, launched_at - times.launched_at))} later; "
        f"arrived {ms(arrived_at - complete_at)} after that, noticed {ms(times.reduced_at - arrived_at)} later"
    )
    for color, began_at, ended_at in (
        ("queued", times.ready_at, times.launched_at),
        ("skew", times.launched_at, complete_at),
        ("travel", complete_at, arrived_at),
        ("noticed", arrived_at, times.reduced_at),
    ):
        if ended_at > began_at:
            yield Rect(axis(began_at), y, axis(ended_at) - axis(began_at), height, color, title)
    if height >= 9:
        parts = {"travel": (complete_at, arrived_at), "noticed": (arrived_at, times.reduced_at)}
        kind = max(parts, key=lambda name: parts[name][1] - parts[name][0])
        x, width = axis(parts[kind][0]), axis(parts[kind][1]) - axis(parts[kind][0])
        yield from _inside(str(times.number), x, width, y + height / 2 + 3.5, 9.5, kind)


# --- around them ------------------------------------------------------------------------------------------


def _kinds(shapes: Iterable[Shape]) -> set[str]:
    return {shape.color for shape in shapes if isinstance(shape, Rect)}


def _legend(kinds: set[str]) -> Iterator[Shape]:
    """What ranks do in one line, the way of buckets in another."""
    for y, head, shown in (
        (80.0, "ranks", [kind for kind in _LEGEND if kind in kinds - _WAY]),
        (100.0, "buckets", [kind for kind in _LEGEND if kind in kinds & _WAY]),
    ):
        if shown:
            yield Text(24, y, head, 12, "quiet")
        x = 82.0
        for kind in shown:
            yield Rect(x, y - 10, 12, 12, kind)
            yield Text(x + 17, y, _LEGEND[kind], 12)
            x += 17 + text_width(_LEGEND[kind], 12) + 16


def _grid(axis: Axis, top: float, bottom: float) -> Iterator[Shape]:
    for seconds in ticks(axis.ended_at - axis.began_at):
        x = axis(axis.began_at + seconds)
        yield Line(x, top, x, bottom)
        yield Text(x, bottom + 16, f"{1000 * seconds:g}", 11, "quiet", "middle")
    yield Text(WIDTH - _RIGHT + 12, bottom + 16, "ms", 11, "quiet")


def ticks(seconds: float, most: int = 12) -> Sequence[float]:
    """Round numbers from 0 to `seconds`."""
    rough = seconds / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(step * place, 12) for place in range(math.floor(seconds / step) + 1)]
