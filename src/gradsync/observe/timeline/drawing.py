"""A drawing: shapes in pixels, y downwards, with the names of their colors. How to write it is for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Color(NamedTuple):
    light: str
    dark: str


PALETTE: Mapping[str, Color] = {
    "paper": Color("#ffffff", "#14181f"),
    "ink": Color("#1f2933", "#e6eaf0"),
    "quiet": Color("#66727f", "#98a4b3"),
    "grid": Color("#e6e9ed", "#2a313c"),
    "on": Color("#ffffff", "#ffffff"),  # text on a strong color
    "data": Color("#d5dbe2", "#3a4350"),
    "forward": Color("#3f78b5", "#4a86c5"),
    "loss": Color("#9fbcdb", "#6c8fb5"),
    "backward": Color("#3f9a77", "#46a582"),
    "ranks": Color("#d94f4b", "#e0605c"),
    "transfer": Color("#f0932b", "#f0932b"),
    "deliver": Color("#e3c33c", "#d9bb3f"),
    "optimizer": Color("#9a6fb0", "#a87fbd"),
    "other": Color("#eceff2", "#2c3440"),
    "queued": Color("#e3e8ee", "#39424f"),
    "skew": Color("#f3c4c1", "#7d4544"),
    "travel": Color("#6f86a6", "#7b93b5"),
    "noticed": Color("#c3cfde", "#4a5a70"),
}


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    color: str
    title: str = ""
    """Shown by a viewer when the pointer is over it."""


class Text(NamedTuple):
    x: float
    y: float
    """Of the base line."""
    text: str
    size: float = 12
    color: str = "ink"
    anchor: str = "start"
    """"start", "middle" or "end"."""
    bold: bool = False


class Line(NamedTuple):
    x: float
    y: float
    to_x: float
    to_y: float
    color: str = "grid"
    dashed: bool = False


class Drawing(NamedTuple):
    width: float
    height: float
    title: str
    shapes: tuple[Rect | Text | Line, ...]


def text_width(text: str, size: float) -> float:
    """About as wide as it will be: fonts differ."""
    return 0.56 * size * len(text)
