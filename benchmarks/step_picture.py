"""The picture of steps: a bar for each contender and model, with what communication adds in full color."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.contenders import PLAIN, TORCH, TRANSPORTS, WRAPPER, contender
from benchmarks.models import model
from benchmarks.step_result import Race, StepResult
from gradsync.cli.display import count
from gradsync.cli.picture import GRID, INK, QUIET

# What is drawn: a name, its color, and which contender that is on a model.
TORCH_COLOR, BEST_COLOR, MPI_COLOR = "#9aa5b1", "#ea580c", "#7c3aed"
OURS_COLORS = ("#2563eb", "#0d9488", "#60a5fa", "#1e3a8a")
OURS = dict(zip((contender.key for contender in (*TRANSPORTS, WRAPPER)), OURS_COLORS, strict=True))
PALE = 0.3
WIDTH = 0.82  # of a group of bars; groups are 1 apart


def draw(result: StepResult, path: Path) -> None:
    """Without pyplot: no global state, no window, whatever backend the user has set."""
    figure = Figure(figsize=(10.5, 3.6 * len(result.ranks) + 0.9), dpi=150, layout="constrained")
    panels = figure.subplots(len(result.ranks), 1, squeeze=False)[:, 0]
    drawn: dict[str, str] = {}
    for axes, ranks in zip(panels, result.ranks, strict=True):
        drawn |= _draw_ranks(axes, result.of(ranks))
        axes.set_title(count(ranks, "rank"), loc="left", color=INK, fontsize=11, pad=8)
    figure.suptitle(
        "Time of a training step; 1 = without communication (lower is better)",
        x=0.012,
        ha="left",
        color=INK,
        fontsize=12.5,
    )
    handles = [Patch(color=color, label=name) for name, color in drawn.items()]
    handles.append(Patch(color=QUIET, alpha=PALE, label="pale: computing; full color: exposed communication"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=9)
    figure.savefig(path, facecolor="white")


def bars_of(race: Race) -> list[tuple[str, str, str]]:
    """Name, color and contender, from left to right; of families with several configurations the best."""
    bars = []
    if race.ratio(TORCH.key, PLAIN.key):
        bars.append((TORCH.name, TORCH_COLOR, TORCH.key))
    for name, color, key in (
        ("torch's best", BEST_COLOR, race.best("torch")),
        ("MPI's best", MPI_COLOR, race.best("mpi")),
    ):
        if key is not None:
            bars.append((name, color, key))
    return bars + [(contender(key).name, color, key) for key, color in OURS.items() if key in race.measured]


def _draw_ranks(axes: Any, races: Sequence[Race]) -> dict[str, str]:
    """Returns the names that were drawn, with their colors."""
    drawn: dict[str, str] = {}
    for place, race in enumerate(races):
        bars = bars_of(race)
        drawn |= {name: color for name, color, _ in bars}
        for number, (_, color, key) in enumerate(bars):
            _draw_bar(axes, place - WIDTH / 2 + (number + 0.5) * WIDTH / len(bars), WIDTH / len(bars), race, key, color)
    axes.axhline(1, color=INK, linewidth=1)
    _style(axes, races)
    return drawn


def _draw_bar(axes: Any, x: float, width: float, race: Race, key: str, color: str) -> None:
    ratio = race.ratio(key, PLAIN.key)
    if ratio is None:
        return
    axes.bar(x, min(ratio.median, 1), width * 0.92, color=color, alpha=PALE, linewidth=0)
    if ratio.median > 1:
        axes.bar(x, ratio.median - 1, width * 0.92, bottom=1, color=color, linewidth=0)
    axes.vlines(x, ratio.low, ratio.high, color=INK, linewidth=0.9)
    axes.annotate(
        f"{ratio.median:.2f}",
        (x, max(ratio.median, ratio.high)),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=7.5,
        color=INK,
    )


def _style(axes: Any, races: Sequence[Race]) -> None:
    labels = [f"{model(race.model).name}\n{1e3 * race.seconds(PLAIN.key).median:.0f} ms" for race in races]
    axes.set_xticks(range(len(races)), labels, color=INK)
    axes.set_ylabel("step / step without communication", color=QUIET)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.1)
    axes.tick_params(colors=QUIET, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
