"""The result as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradsync.cli.bench_contenders import PLAIN, REPLICATE, TORCH_BEST, TORCH_VIEWS, WRAPPER, contender
from gradsync.cli.bench_result import Cost, Growth, Result
from gradsync.cli.display import count

OURS = (REPLICATE.key, WRAPPER.key)


def tables(result: Result) -> Iterator[Table]:
    for ranks in sorted({cost.ranks for cost in result.costs}):
        yield cost_table(result, ranks)
    if result.peaks:
        yield memory_table(result)


def cost_table(result: Result, ranks: int) -> Table:
    table = _table(f"A round of {count(ranks, 'rank')}: medians, overhead above no communication")
    for name in ("host ms", "overhead ms", "µs a parameter", "of torch's best", "clock ms", "of torch's best"):
        table.add_column(name, justify="right")
    for parameters in sorted({cost.parameters for cost in result.costs}):
        table.add_row(Text(f"{parameters:,} parameters", style="bold"))
        for cost in result.of(ranks, parameters):
            table.add_row(*_cost_cells(cost), style=_style(cost.contender))
        table.add_section()
    return table


def _cost_cells(cost: Cost) -> list[str]:
    name = f"  {contender(cost.contender).name}"
    if cost.contender == PLAIN.key:
        return [name, f"{cost.host_ms:.2f}", "", "", "", f"{cost.clock_ms:.2f}", ""]
    return [
        name,
        f"{cost.host_ms:.2f}",
        f"{cost.host_overhead_ms:.2f}",
        f"{cost.us_per_parameter:.2f}",
        _ratio(cost, cost.host_ratio_to_best),
        f"{cost.clock_ms:.2f}",
        _ratio(cost, cost.clock_ratio_to_best),
    ]


def _ratio(cost: Cost, ratio: float) -> str:
    return "" if cost.contender == TORCH_BEST.key else f"{ratio:.2f}×"


def memory_table(result: Result) -> Table:
    table = _table(f"Peak memory with {result.peaks[0].parameters:,} parameters, above no communication")
    table.add_column("steps, MiB", justify="right")
    table.add_column("start, MiB", justify="right")
    plain = next(peak for peak in result.peaks if peak.contender == PLAIN.key)
    for peak in result.peaks:
        above = (peak.steady_mib - plain.steady_mib, peak.start_mib - plain.start_mib)
        cells = (
            [f"{mib:+.0f}" for mib in above]
            if peak is not plain
            else [f"{peak.steady_mib:.0f}", f"{peak.start_mib:.0f}"]
        )
        table.add_row(f"  {contender(peak.contender).name}", *cells, style=_style(peak.contender))
    return table


def growth_lines(result: Result) -> Iterator[str]:
    """Whether the overhead grows at most linearly, for each contender."""
    for growth in result.growths:
        yield f"{count(growth.ranks, 'rank')}, {contender(growth.contender).name}: {describe_growth(growth)}"


def describe_growth(growth: Growth) -> str:
    verdict = "at most linear" if growth.linear else "more than linear"
    return f"overhead grows {verdict} (as parameters to the power of {growth.exponent:.2f} where it is steepest)"


def _table(title: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    return table


def _style(key: str) -> str:
    if key in OURS:
        return "cyan"
    return "" if key in (TORCH_BEST.key, TORCH_VIEWS.key) else "dim"
