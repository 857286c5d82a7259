"""Memory and start-up time as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.contenders import PLAIN, contender
from benchmarks.footprint_result import FootprintResult
from benchmarks.ratios import Spread
from benchmarks.tables import OURS_STYLE, QUIET_STYLE, make_table, target_table
from gradsync.cli.display import count


def parts(result: FootprintResult) -> Iterator[RenderableType]:
    if result.peaks:
        yield memory_table(result)
    yield start_table(result)
    yield target_table(result.targets())
    absent = [f"absent  {contender(key).name}: {why}" for key, why in result.absent.items()]
    yield Text("\n".join([str(result.machine), *absent]), style=QUIET_STYLE)


def memory_table(result: FootprintResult) -> Table:
    """Memory that several ranks see counts in full for each in a peak, but exists once: hence the last column."""
    parameters = result.peaks[0].parameters
    title = f"{count(result.ranks, 'rank')}: peak memory of a rank with {parameters:,} numbers to train, MiB"
    table = make_table(f"{title}, above no communication", "steps", "start", "shared memory\ndivided by ranks")
    plain = result.peak(PLAIN.key)
    for peak in result.peaks:
        figures = (peak.steady_mib, peak.start_mib, peak.proportional_mib)
        if plain is not None and peak is not plain:
            bases = (plain.steady_mib, plain.start_mib, plain.proportional_mib)
            cells = [f"{value - base:+.0f}" for value, base in zip(figures, bases, strict=True)]
        else:
            cells = [f"{value:.0f}" for value in figures]
        table.add_row(f"  {contender(peak.contender).name}", *cells, style=_style(peak.contender))
    return table


def start_table(result: FootprintResult) -> Table:
    table = make_table("Time at the start, ms", "first in a process", "later ones")
    for making in result.makings:
        name = f"  {contender(making.contender).name}: replicas of the GPT, beyond the broadcast"
        table.add_row(name, _ms(making.first), _ms(making.later), style=_style(making.contender))
    table.add_row("  import gradsync, beyond torch's", _ms(result.importing), "", style=OURS_STYLE)
    return table


def _ms(seconds: Spread | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds.median:.1f}"


def _style(key: str) -> str:
    return OURS_STYLE if contender(key).family == "gradsync" else QUIET_STYLE if key == PLAIN.key else ""
