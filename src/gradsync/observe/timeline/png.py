"""A drawing as PNG, by matplotlib, which is not needed for anything else here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gradsync.observe.timeline.drawing import PALETTE, Drawing, Line, Rect

HOW_TO_GET_IT = "needs matplotlib: pip install 'gradsync[cli]'"
_DPI = 100  # at which a pixel of the drawing is one of the picture; twice as fine is what is written
_ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_png(drawing: Drawing, path: Path) -> None:
    """Without pyplot: no global state, no window, whatever backend the user has set."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.set_axis_off()
    for place, shape in enumerate(drawing.shapes):  # later ones above earlier ones
        color = PALETTE[shape.color].light
        if isinstance(shape, Rect):
            corner, width = (shape.x, shape.y), max(shape.width, 0.3)
            axes.add_patch(Rectangle(corner, width, shape.height, facecolor=color, edgecolor="none", zorder=place))
        elif isinstance(shape, Line):
            style: Any = "--" if shape.dashed else "-"
            ends = [shape.x, shape.to_x], [shape.y, shape.to_y]
            axes.add_line(Line2D(*ends, color=color, linewidth=0.72, linestyle=style, zorder=place))
        else:
            weight = "bold" if shape.bold else "normal"
            points = 0.94 * shape.size * 72 / _DPI  # its font is a little wider than browsers'
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                color=color,
                fontsize=points,
                weight=weight,
                ha=_ALIGNMENTS[shape.anchor],
                va="baseline",
                parse_math=False,
                zorder=place,
            )
    figure.savefig(path, dpi=2 * _DPI, facecolor=PALETTE["paper"].light)
