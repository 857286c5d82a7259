"""The picture of an elastic run: loss over time, with the kill and the joining; below, how many ranks there were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradsync.cli.display import count
from gradsync.cli.elastic_demo.history import ShardHistory
from gradsync.cli.elastic_demo.incident import Incident
from gradsync.cli.picture import HELD_OUT, INK, LOSS, QUIET, WAITING, quiet_axes

KILLED, JOINED = "#dc2626", "#0d9488"
DOTS = 28  # of the undisturbed run


def draw(history: ShardHistory, undisturbed: ShardHistory, incident: Incident, path: Path) -> None:
    """Without pyplot: no global state, no window, whatever backend the user has set."""
    from matplotlib.figure import Figure  # as in cli/picture.py

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    loss, ranks = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    began = history.times[0]
    _draw_loss(loss, history, undisturbed, began)
    _draw_ranks(ranks, history, began)
    _draw_moments((loss, ranks), incident, began)
    loss.set_title(
        f"gradsync: {count(history.ranks, 'rank')}, one killed and replaced; {history.tokens:,} characters",
        loc="left",
        color=INK,
        fontsize=12,
        pad=12,
    )
    for axes in (loss, ranks):
        quiet_axes(axes)
    figure.savefig(path, facecolor="white")


def _draw_loss(axes: Any, history: ShardHistory, undisturbed: ShardHistory, began: float) -> None:
    times = [at - began for at in history.times]
    axes.plot(times, [s.loss for s in history.steps], color=LOSS, alpha=0.28, linewidth=0.8)
    axes.plot(times, history.smoothed, color=LOSS, linewidth=2, label="training")
    every = max(1, len(times) // DOTS)
    axes.plot(
        times[::every],
        undisturbed.smoothed[: len(times) : every],
        "o",
        color=HELD_OUT,
        markersize=4.5,
        markeredgecolor="white",
        label="the same steps on one rank, undisturbed",
        zorder=3,
    )
    axes.set_ylabel("loss (nats a character)", color=QUIET)
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")


def _draw_ranks(axes: Any, history: ShardHistory, began: float) -> None:
    from matplotlib.ticker import MaxNLocator

    times = [at - began for at in history.times]
    axes.stairs(history.sizes, [times[0] - (times[-1] - times[0]) / len(times), *times], fill=True, color=WAITING)
    axes.set_ylim(0, history.ranks + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_ylabel("ranks", color=QUIET)
    axes.set_xlabel("seconds", color=QUIET)


def _draw_moments(panels: tuple[Any, ...], incident: Incident, began: float) -> None:
    drawn = (
        ("killed", KILLED, f"rank {incident.rank} is killed", 0.80),
        ("joined", JOINED, "the one in its\nplace is in step", 0.66),
    )
    for event, color, name, height in drawn:
        if (moment := incident.moment(event)) is None:
            continue
        for axes in panels:
            axes.axvline(moment.at - began, color=color, linewidth=1.2, linestyle=(0, (4, 2)))
        panels[0].annotate(
            name,
            (moment.at - began, height),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            fontsize=9,
            va="top",
        )
