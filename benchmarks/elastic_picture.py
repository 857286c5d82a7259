"""The picture of trainings whose ranks are killed: loss over time, with the kills; below, how many ranks there were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.elastic_result import ElasticResult, ElasticTrack
from gradsync.cli.picture import HELD_OUT, INK, LOSS, QUIET, WAITING, quiet_axes

KILLED = "#dc2626"


def draw(result: ElasticResult, path: Path) -> None:
    """Without pyplot: no global state, no window, whatever backend the user has set."""
    tracks = [track for track in result.tracks if track.points]
    figure = Figure(figsize=(10.5, 3.2 * len(tracks) + 0.6), dpi=150, layout="constrained")
    panels = figure.subplots(2 * len(tracks), 1, squeeze=False, height_ratios=[4, 1] * len(tracks))[:, 0]
    for number, track in enumerate(tracks):
        loss, ranks = panels[2 * number : 2 * number + 2]
        _draw_track(loss, ranks, track)
    figure.suptitle("Training while ranks are killed: loss over time", x=0.012, ha="left", color=INK, fontsize=12.5)
    figure.savefig(path, facecolor="white")


def _draw_track(loss: Any, ranks: Any, track: ElasticTrack) -> None:
    times = [point.at for point in track.points]
    loss.plot(times, [point.loss for point in track.points], color=LOSS, linewidth=1.2, label="loss")
    sizes = [point.ranks for point in track.points]
    ranks.step(times, sizes, where="pre", color=WAITING, linewidth=0)
    ranks.fill_between(times, sizes, step="pre", color=WAITING, alpha=0.75, linewidth=0)
    ranks.set_ylim(0, track.ranks + 0.5)
    ranks.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    for axes in (loss, ranks):
        for number, at in enumerate(track.kills):
            label = "a rank is killed" if not number and axes is loss else None
            axes.axvline(at, color=KILLED, linewidth=1.1, linestyle=(0, (4, 2)), label=label)
        quiet_axes(axes)
        axes.set_xlim(0, max(times) or 1)
    for number, one in enumerate(track.recoveries):
        at = track.kills[0] + one.at - track.recoveries[0].at + one.ready + one.joined
        label = "the one in its place is in step" if not number else None
        loss.axvline(at, color=HELD_OUT, linewidth=1.1, linestyle=(0, (1, 2)), label=label)
    loss.set_title(track.name, loc="left", color=INK, fontsize=11, pad=8)
    loss.set_ylabel("loss", color=QUIET)
    loss.tick_params(labelbottom=False)
    loss.legend(labelcolor=INK, fontsize=9, loc="upper right", ncols=3, framealpha=0.9, edgecolor="none")
    ranks.set_ylabel("ranks", color=QUIET)
    ranks.set_xlabel("seconds", color=QUIET)
