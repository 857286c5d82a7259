"""The picture in README.md: the figures of docs/performance.md, from published.json.

`python -m benchmarks.published` draws it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.ratios import geometric_mean
from gradsync.cli.picture import GRID, INK, QUIET

FIGURES = Path(__file__).with_name("published.json")
PICTURE = Path(__file__).parents[1] / "docs" / "step_times.svg"
WIDTH = 0.86  # of a group of bars; groups are 1 apart
PALE = 0.3


@dataclass(frozen=True)
class Contender:
    name: str
    color: str
    ratios: list[float]


@dataclass(frozen=True)
class Published:
    models: list[str]
    milliseconds: list[int]
    where: str
    contenders: list[Contender]


def read(file: Path = FIGURES) -> Published:
    data = json.loads(file.read_text(encoding="utf-8"))
    contenders = [Contender(**one) for one in data["contenders"]]
    return Published(data["models"], data["milliseconds_without_communication"], data["where"], contenders)


def draw(published: Published, path: Path) -> None:
    """Without pyplot: no global state, no window. Without a date: the same figures are the same file."""
    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    bar = WIDTH / len(published.contenders)
    for number, contender in enumerate(published.contenders):
        for place, ratio in enumerate([*contender.ratios, geometric_mean(contender.ratios)]):
            _draw_bar(axes, place - WIDTH / 2 + (number + 0.5) * bar, bar, ratio, contender)
        axes.bar(0, 0, color=contender.color, label=contender.name)
    axes.axhline(1, color=INK, linewidth=1)
    models = zip(published.models, published.milliseconds, strict=True)
    labels = [*(f"{name}\n{milliseconds} ms" for name, milliseconds in models), "geometric\nmean"]
    _style(axes, labels)
    axes.set_title(
        f"Time of a training step; 1 = without communication. Lower is better; pale is computing.\n{published.where}",
        loc="left",
        color=INK,
        fontsize=11,
    )
    axes.legend(loc="upper left", framealpha=1, edgecolor="white", labelcolor=INK, fontsize=9.5)
    with matplotlib.rc_context({"svg.hashsalt": "gradsync"}):
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_bar(axes: Any, x: float, width: float, ratio: float, contender: Contender) -> None:
    axes.bar(x, 1, width * 0.9, color=contender.color, alpha=PALE, linewidth=0)
    axes.bar(x, ratio - 1, width * 0.9, bottom=1, color=contender.color, linewidth=0)
    axes.annotate(
        f"{ratio:.2f}", (x, ratio), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7, color=INK
    )


def _style(axes: Any, labels: list[str]) -> None:
    axes.set_xticks(range(len(labels)), labels, color=INK)
    axes.axvline(len(labels) - 1.5, color=GRID, linewidth=1)
    axes.set_ylim(0, 4.6)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=QUIET, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


if __name__ == "__main__":
    draw(read(), PICTURE)
