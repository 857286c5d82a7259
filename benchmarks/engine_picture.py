"""The picture of the engine's cost: overhead for each parameter, by the number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from benchmarks.contenders import PLAIN, REPLICATE, TORCH, TORCH_BEST, WRAPPER, contender
from benchmarks.engine_result import Cost, Result
from gradsync.cli.display import count
from gradsync.cli.picture import GRID, INK, QUIET

COLORS = {TORCH.key: "#b8c2cc", TORCH_BEST.key: "#ea580c", REPLICATE.key: "#2563eb", WRAPPER.key: "#0d9488"}
STYLES = {WRAPPER.key: (0, (4, 2))}
TICKS = [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 300, 500, 1000]


def draw(result: Result, path: Path) -> None:
    """Without pyplot: no global state, no window, whatever backend the user has set."""
    groups = sorted({cost.ranks for cost in result.costs})
    figure = Figure(figsize=(4.2 * len(groups) + 1.2, 4.9), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, ranks in zip(panels, groups, strict=True):
        _draw_ranks(axes, [cost for cost in result.costs if cost.ranks == ranks and cost.contender != PLAIN.key])
        axes.set_title(count(ranks, "rank"), loc="left", color=INK, fontsize=11, pad=8)
    _style_height(panels[0], result)
    panels[0].set_ylabel("µs per parameter, above no communication", color=QUIET)
    figure.suptitle(
        "Host time to keep replicas in step, for each parameter (lower is better)",
        x=0.012,
        ha="left",
        color=INK,
        fontsize=12.5,
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=9)
    figure.savefig(path, facecolor="white")


def _draw_ranks(axes: Any, costs: list[Cost]) -> None:
    for key, color in COLORS.items():
        row = sorted((cost for cost in costs if cost.contender == key), key=lambda cost: cost.parameters)
        axes.loglog(
            [cost.parameters for cost in row],
            [max(cost.us_per_parameter, 1e-3) for cost in row],
            marker="o",
            markersize=6,
            markeredgecolor="white",
            linewidth=2,
            linestyle=STYLES.get(key, "solid"),
            color=color,
            label=contender(key).name,
        )
    _style(axes, sorted({cost.parameters for cost in costs}))


def _style(axes: Any, parameters: list[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(parameters))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("parameters", color=QUIET)
    axes.grid(axis="y", which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.08)
    axes.tick_params(which="both", colors=QUIET, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _style_height(axes: Any, result: Result) -> None:
    """Round numbers as ticks, more of them than the powers of ten."""
    values = [cost.us_per_parameter for cost in result.costs if cost.us_per_parameter > 0]
    low, high = min(values, default=1) * 0.75, max(values, default=10) * 1.15
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
