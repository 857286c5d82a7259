"""The picture of steps with an optimizer: a panel for each optimizer and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.ratios import geometric_mean
from gradsync.cli.picture import GRID, INK, QUIET

WIDTH = 0.86  # of a group of bars; groups are 1 apart
HIGHEST = 2.6  # what is higher is cut off, and its figure stands at the edge


@dataclass(frozen=True)
class Panel:
    title: str
    models: list[str]
    """With the time without communication."""
    ratios: Mapping[str, Sequence[float | None]]
    """To no communication, by contender: one for each model."""


def draw(panels: Sequence[Panel], colors: Mapping[str, str], title: str, path: Path) -> None:
    """Without pyplot: no global state, no window. Without a date: the same figures are the same file."""
    figure = Figure(figsize=(10.5, 2.9 * len(panels) + 1), dpi=110, layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, panel, colors)
    figure.suptitle(title, x=0.012, ha="left", color=INK, fontsize=11.5)
    drawn = {name for panel in panels for name in panel.ratios}
    handles = [Patch(color=color, label=name) for name, color in colors.items() if name in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=9)
    with matplotlib.rc_context({"svg.hashsalt": "gradsync"}):
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_panel(axes: Any, panel: Panel, colors: Mapping[str, str]) -> None:
    names = [name for name in colors if name in panel.ratios]
    width = WIDTH / len(names)
    for number, name in enumerate(names):
        ratios = panel.ratios[name]
        known = [ratio for ratio in ratios if ratio is not None]
        mean = geometric_mean(known) if len(known) == len(ratios) else None
        for place, ratio in enumerate([*ratios, mean]):
            if ratio is not None:
                _draw_bar(axes, place - WIDTH / 2 + (number + 0.5) * width, width, ratio, colors[name])
    axes.axhline(1, color=INK, linewidth=1)
    axes.axvline(len(panel.models) - 0.5, color=GRID, linewidth=1)
    axes.set_xticks(range(len(panel.models) + 1), [*panel.models, "geometric\nmean"], color=INK)
    axes.set_title(panel.title, loc="left", color=INK, fontsize=11, pad=6)
    axes.set_ylim(0, HIGHEST)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=QUIET, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _draw_bar(axes: Any, x: float, width: float, ratio: float, color: str) -> None:
    height = min(ratio, HIGHEST)
    axes.bar(x, height, width * 0.9, color=color, linewidth=0)
    inside = height > HIGHEST - 0.2
    axes.annotate(
        f"{ratio:.2f}",
        (x, height),
        xytext=(0, -2 if inside else 2),
        textcoords="offset points",
        ha="center",
        va="top" if inside else "bottom",
        fontsize=6.5,
        color="white" if inside else INK,
    )
