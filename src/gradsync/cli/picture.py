"""The picture of a run: loss above, the share of waiting below."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from gradsync.cli.display import count
from gradsync.cli.history import History, waiting_share

INK = "#1f2933"
QUIET = "#7b8794"
GRID = "#e4e7eb"
LOSS = "#2563eb"
HELD_OUT = "#ea580c"
WAITING = "#0d9488"


def draw(history: History, *, parameters: int, path: Path) -> None:
    """Without pyplot: no global state, no window, whatever backend the user has set."""
    from matplotlib.figure import Figure  # no other command needs it, and it takes as long as all else but torch

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    loss, waiting = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_loss(loss, history)
    _draw_waiting(waiting, history)
    loss.set_title(
        f"gradsync: {count(history.ranks, 'rank')}, {parameters:,} parameters, {history.tokens:,} characters",
        loc="left",
        color=INK,
        fontsize=12,
        pad=12,
    )
    for axes in (loss, waiting):
        quiet_axes(axes)
    figure.savefig(path, facecolor="white")


def _draw_loss(axes: Any, history: History) -> None:
    numbers = [s.step for s in history.steps]
    axes.plot(numbers, [s.loss for s in history.steps], color=LOSS, alpha=0.28, linewidth=0.8)
    axes.plot(numbers, history.smoothed, color=LOSS, linewidth=2, label="training")
    axes.plot(
        [v.step for v in history.validations],
        [v.loss for v in history.validations],
        "o",
        color=HELD_OUT,
        markersize=5.5,
        markeredgecolor="white",
        label="validation (held-out files)",
        zorder=3,
    )
    axes.set_ylabel("loss (nats a character)", color=QUIET)
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")


def _draw_waiting(axes: Any, history: History) -> None:
    """One bar for each step would be noise: the share over 60 equal parts of the run."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    parts = min(60, len(history.steps))
    bounds = [len(history.steps) * i // parts for i in range(parts + 1)]
    shares = [waiting_share(history.steps[a:b]) for a, b in pairwise(bounds)]
    axes.stairs(shares, [0.5 + b for b in bounds], fill=True, color=WAITING, alpha=0.75)
    axes.set_ylim(0, max(0.1, 1.25 * max(shares)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.set_ylabel("time waiting", color=QUIET)
    axes.set_xlabel("step", color=QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))


def quiet_axes(axes: Any) -> None:
    """Lines for reading off values, and nothing else."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=QUIET, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
