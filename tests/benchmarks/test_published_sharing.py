"""docs/sharing.svg and the tables of docs/performance.md show the figures of published_sharing.json."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published_sharing import COLORS, PAGE, PICTURE, draw, read, tables, with_tables, write
from tests.benchmarks.test_published import words

DOCS = Path(__file__).parents[2] / "docs"


def test_tables_are_those_of_the_page() -> None:
    page = PAGE.read_text()
    assert len(list(tables(read()))) > 1
    assert with_tables(page, read()) == page, "python -m benchmarks.published_sharing writes them"


def test_the_picture_is_drawn_again_with_the_same_words(tmp_path: Path) -> None:
    draw(read(), tmp_path / "again.svg")
    assert words(tmp_path / "again.svg") == words(PICTURE)
    assert all(name in COLORS for panel in read().panels for name in panel.ratios)
    for page in ("performance.md", "one_model_a_host.md"):
        assert f"({PICTURE.name})" in (DOCS / page).read_text()


def test_figures_are_written_as_they_are_read(tmp_path: Path) -> None:
    write(read(), tmp_path / "again.json")
    assert read(tmp_path / "again.json") == read()
