"""Bandwidths as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.bandwidth_result import CARRIERS, COPY, GLOO, NAMES, TRANSPORTS, BandwidthResult, Track
from benchmarks.tables import OURS_STYLE, QUIET_STYLE, make_table, target_table
from gradsync.cli.display import count

TRAFFIC = (
    "GB/s: size of the buffer by the time on the slowest rank. The limit: all ranks copy a buffer of\n"
    "their own at the same time. An all-reduce through shared memory moves as much: with N ranks each\n"
    "adds up an N-th of the buffer, read from N slots and written to N: for each rank one buffer read\n"
    "and one written. Small buffers stay in the caches."
)


def parts(result: BandwidthResult) -> Iterator[RenderableType]:
    yield bandwidth_table(result)
    yield target_table(result.targets())
    absent = [f"absent  {NAMES[key]}: {why}" for key, why in result.absent.items()]
    yield Text("\n".join([TRAFFIC, str(result.machine), *absent]), style=QUIET_STYLE)


def bandwidth_table(result: BandwidthResult) -> Table:
    title = f"{count(result.ranks, 'rank')}: all-reduce of float32, one thread each"
    table = make_table(title, "GB/s", "times\ngloo", "part of\nthe limit")
    for track in result.tracks:
        table.add_row(Text(f"{track.size_mb} MB", style="bold"))
        for key in CARRIERS:
            if key in result.absent or key in track.repetitions[0]:
                table.add_row(f"  {NAMES[key]}", *_cells(track, key), style=OURS_STYLE if key in TRANSPORTS else "")
        table.add_section()
    return table


def _cells(track: Track, key: str) -> Iterator[str]:
    bandwidth = track.bandwidth(key)
    yield "absent" if bandwidth is None else f"{bandwidth:.2f}"
    for base in (GLOO, COPY):
        speed = track.speed(key, base) if key not in (base, COPY) else None
        yield "" if speed is None else f"{speed.median:.2f}"
