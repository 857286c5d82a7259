"""The picture in README.md shows the figures of docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.published import PICTURE, draw, read
from benchmarks.ratios import geometric_mean

ROOT = Path(__file__).parents[2]
# Where the picture has a shorter name than the table.
NAMES = {
    "torch, best of its flags": "torch DDP or `replicate`, best of its flags and bucket sizes",
    "MPI, best of three": "a reducer over MPI's shared memory, best of three",
}


def rows(page: str) -> dict[str, list[str]]:
    """The first table, by what stands in its first column."""
    first = next(block for block in page.split("\n\n") if block.startswith("| "))
    lines = re.findall(r"^\| (.*) \|$", first, re.MULTILINE)
    cells = [[cell.strip().strip("*") for cell in line.split("|")] for line in lines]
    return {name: figures for name, *figures in cells}


def test_figures_are_those_of_the_page() -> None:
    published, table = read(), rows((ROOT / "docs" / "performance.md").read_text())
    assert table[""][:-1] == published.models
    assert table["no communication"][:-1] == [f"{one} ms" for one in published.milliseconds]
    assert len(published.contenders) == len(table) - 3  # without the head, the line below it, and no communication
    for contender in published.contenders:
        mean = geometric_mean(contender.ratios)
        shown = [f"{ratio:.2f}" for ratio in (*contender.ratios, mean)]
        assert table[NAMES.get(contender.name, contender.name)] == shown


def test_the_picture_is_drawn_again_with_the_same_words(tmp_path: Path) -> None:
    """Not byte by byte: that would ask for one release of matplotlib."""
    draw(read(), tmp_path / "again.svg")
    assert words(tmp_path / "again.svg") == words(PICTURE)
    assert PICTURE.name in (ROOT / "README.md").read_text()


def words(picture: Path) -> list[str]:
    """matplotlib draws text as paths, and leaves what they say in comments."""
    text = picture.read_text()
    ElementTree.fromstring(text)
    found = re.findall(r"<!-- (.*?) -->", text, re.DOTALL)
    assert "embedding" in " ".join(found)
    return found
