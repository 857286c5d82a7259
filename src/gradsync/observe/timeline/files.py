"""Writes what a recording is shown as into a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gradsync.observe.timeline import png
from gradsync.observe.timeline.advice import advise
from gradsync.observe.timeline.chrome import chrome_trace
from gradsync.observe.timeline.measures import Measures, measure
from gradsync.observe.timeline.picture import draw
from gradsync.observe.timeline.recording import Recording
from gradsync.observe.timeline.report import Figure, html_report
from gradsync.observe.timeline.svg import svg

REPORT, TRACE, PICTURE, BITMAP = "report.html", "trace.json", "step.svg", "step.png"
# The slowest step has a picture of its own in the report if it took so many times as long as a typical one.
_SLOW = 1.5


def write(recording: Recording, folder: Path) -> str:
    """`recording`: by one clock. Says in one line what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    measures = measure(recording)
    (folder / TRACE).write_text(json.dumps(chrome_trace(recording), separators=(",", ":")))
    written, note = [REPORT, TRACE], ""
    figures = []
    if (number := measures.round_at(0.5)) is not None:
        drawing = draw(measures, number)
        (folder / PICTURE).write_text(text := svg(drawing))
        figures.append(Figure("A typical step", text))
        written.append(PICTURE)
        if png.is_possible():
            png.write_png(drawing, folder / BITMAP)
            written.append(BITMAP)
        else:
            note = f" ({BITMAP} {png.HOW_TO_GET_IT})"
        figures += _slowest(measures, number)
    (folder / REPORT).write_text(html_report(measures, advise(measures), figures))
    return f"trace of {_rounds(recording)} written to {folder}/: {', '.join(written)}{note}"


def _slowest(measures: Measures, typical: int) -> list[Figure]:
    slowest = measures.round_at(1.0)
    assert slowest is not None
    usual, worst = (max(step.seconds for step in measures.steps[number]) for number in (typical, slowest))
    return [Figure("The slowest step", svg(draw(measures, slowest)))] if worst > _SLOW * usual else []


def _rounds(recording: Recording) -> str:
    serial = recording.main_module
    numbers: Sequence[int] = [] if serial is None else recording.common_rounds(serial)
    if not numbers:
        return "no round"
    return f"rounds {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"round {numbers[0]}"
