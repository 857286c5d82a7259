"""What it costs that ranks die and come, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.elastic_result import FIGURES, ElasticResult, ElasticTrack, Figure, targets_of
from benchmarks.ratios import spread
from benchmarks.tables import OURS_STYLE, QUIET_STYLE, make_table, target_table
from gradsync.cli.display import count

ABOUT = """\
begun      from the kill until the others have all begun their next step
next step  from the kill until the others have all finished their next step, less such a step
new rank   from its coming to training.steps() until it has finished its first step
lose       what the others were slower meanwhile than without it"""


def parts(result: ElasticResult) -> Iterator[RenderableType]:
    yield table(result)
    yield target_table(targets_of(result), "Targets, for medians")
    absent = [f"absent  {name}: {why}" for name, why in result.absent.items()]
    yield Text("\n".join([ABOUT, str(result.machine), *absent]), style=QUIET_STYLE)


def table(result: ElasticResult) -> Table:
    title = f"The GPT, a step of {count(result.shards, 'shard')}: kill -9 of a rank; median (slowest)"
    made = make_table(title, "kills", "a step\n(s)", *(figure.name for figure in FIGURES))
    for track in result.tracks:
        seconds = f"{spread(track.seconds).median:.2f}" if track.seconds else ""
        cells = (cell(track, figure) for figure in FIGURES)
        style = "" if track.key == "torchft" else OURS_STYLE
        made.add_row(f"  {track.name}", str(len(track.recoveries)), seconds, *cells, style=style)
    return made


def cell(track: ElasticTrack, figure: Figure) -> str:
    values = track.values(figure)
    return f"{median(values):.2f} ({max(values):.2f})" if values else ""
