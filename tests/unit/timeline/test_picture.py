"""The picture of a step: all ranks on one axis, everything in its frame, in files that can be opened."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gradsync.observe.timeline.drawing import PALETTE, Drawing, Rect, Text
from gradsync.observe.timeline.measures import Measures, measure
from gradsync.observe.timeline.picture import draw, ticks
from gradsync.observe.timeline.png import write_png
from gradsync.observe.timeline.svg import svg
from tests.unit.timeline.made import Made
from tests.unit.timeline.test_measures import MADE

SVG = "{http://www.w3.org/2000/svg}"


def typical(made: Made) -> tuple[Measures, Drawing]:
    measures = measure(made.recording())
    number = measures.round_at(0.5)
    assert number is not None
    return measures, draw(measures, number)


def rects(drawing: Drawing, color: str) -> list[Rect]:
    return [shape for shape in drawing.shapes if isinstance(shape, Rect) and shape.color == color and shape.title]


@pytest.mark.parametrize("made", [*MADE, Made(ranks=20), Made(ranks=100), Made(late={0: {"data": 2000.0}})])
def test_all_shapes_are_in_the_frame_and_have_a_color(made: Made) -> None:
    _, drawing = typical(made)
    for shape in drawing.shapes:
        assert shape.color in PALETTE
        assert 0 <= shape.x <= drawing.width
        assert 0 <= shape.y <= drawing.height
        if isinstance(shape, Rect):
            assert shape.width >= 0
            assert shape.x + shape.width <= drawing.width
            assert shape.y + shape.height <= drawing.height
    assert drawing.height < 1600


@pytest.mark.parametrize("made", [*MADE, Made(ready=tuple(range(1, 21)), nbytes=(1000,) * 20)])
def test_no_two_bars_cover_each_other(made: Made) -> None:
    _, drawing = typical(made)
    bars = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
    for place, one in enumerate(bars):
        for other in bars[:place]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert across <= 1e-6 or down <= 1e-6, (one, other)


def test_ranks_are_on_one_axis() -> None:
    """What they end together lies at the same place; the one that is late is behind."""
    _, drawing = typical(Made(late={1: {"forward": 5.0}}))
    first, second = rects(drawing, "optimizer")
    assert first.x == pytest.approx(second.x)
    first, second = rects(drawing, "backward")
    scale = first.width / 20
    assert second.x - first.x == pytest.approx(5 * scale)
    assert sum(one.width for one in rects(drawing, "ranks")) / scale == pytest.approx(5)


def test_a_bucket_is_drawn_from_ready_to_reduced() -> None:
    _, drawing = typical(Made(late={1: {"forward": 1.0}}))
    scale = rects(drawing, "backward")[0].width / 20
    assert len(rects(drawing, "travel")) == 8
    assert {round(one.width / scale, 6) for one in rects(drawing, "travel")} == {2.0}
    assert {round(one.width / scale, 6) for one in rects(drawing, "skew")} == {1.0}
    assert "last by rank 1" in rects(drawing, "skew")[0].title


def test_the_words_say_which_step_it_is() -> None:
    measures, drawing = typical(Made(data=0.6))
    texts = [shape.text for shape in drawing.shapes if isinstance(shape, Text)]
    assert f"Net, round {measures.round_at(0.5)}: 37 ms on 2 ranks" in texts
    assert (
        "13 MiB of gradients in 4 buckets over shared memory; 3 ms exposed in the mean over ranks, 8.1% of the step"
        in texts
    )
    assert {"rank 0", "rank 1", "3 ms exposed", "forward", "backward"} <= set(texts)


def test_of_many_ranks_those_waited_for_are_shown() -> None:
    _, drawing = typical(Made(ranks=100, late={97: {"data": 5.0}}))
    texts = [shape.text for shape in drawing.shapes if isinstance(shape, Text)]
    assert sum(text.startswith("rank ") for text in texts) == 64
    assert "rank 97" in texts
    assert any("36 ranks that were waited for least are left out" in text for text in texts)


@pytest.mark.parametrize("seconds", [3e-5, 0.0099, 0.0375, 0.1, 2.0, 61.0])
def test_ticks_are_few_round_and_inside(seconds: float) -> None:
    found = ticks(seconds)
    assert found[0] == 0
    assert 5 <= len(found) <= 14
    assert found[-1] <= seconds
    assert len(f"{1000 * found[1]:g}") <= 5


def test_svg_is_well_formed_and_needs_nothing_else() -> None:
    recording = Made().recording()
    evil = recording.ranks[0]._replace(host="<script>&\"'")
    measures = measure(recording._replace(ranks=(evil, recording.ranks[1])))
    text = svg(draw(measures, 22))
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f".//{SVG}rect")) > 20
    assert any(one.text == "<script>&\"'" for one in root.iter(f"{SVG}text"))
    for word in ("href", "url(", "@import", "<image"):
        assert word not in text
    classes = {one.get("class") for one in root.iter() if one.get("class")}
    assert classes <= set(PALETTE)
    assert all(f".{name}{{" in text for name in classes)


def test_png_is_the_same_drawing(tmp_path: Path) -> None:
    from matplotlib.image import imread

    _, drawing = typical(Made(late={1: {"forward": 5.0}}))
    write_png(drawing, tmp_path / "step.png")
    pixels = imread(tmp_path / "step.png")
    assert pixels.shape[:2] == (round(2 * drawing.height), round(2 * drawing.width))
    for color in ("forward", "backward", "ranks", "optimizer", "travel"):
        one = max(rects(drawing, color), key=lambda rect: rect.width)
        wanted = [int(PALETTE[color].light[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        found = pixels[round(2 * one.y + 3), round(2 * one.x + 6), :3]
        assert list(found) == pytest.approx(wanted, abs=0.01), color


WITHOUT = """
import sys
from pathlib import Path
sys.modules["matplotlib"] = None
sys.path.insert(0, {root!r})
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
from tests.unit.timeline.made import Made
from gradsync.observe.timeline.files import write
print(write(Made().recording(), Path({out!r})))
"""


def test_without_matplotlib_a_line_says_how_to_get_the_png(tmp_path: Path) -> None:
    code = WITHOUT.format(root=str(Path(__file__).parents[3]), out=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"trace of rounds 20 to 23 written to {tmp_path}/out/: report.html, trace.json, step.svg "
        "(step.png needs matplotlib: pip install 'gradsync[cli]')\n"
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "step.svg", "trace.json"]
