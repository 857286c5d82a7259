"""The result as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from benchmarks.contenders import PLAIN, REPLICATE, TORCH_BEST, WRAPPER, contender
from benchmarks.engine_result import Cost, Growth, Result
from benchmarks.tables import OURS_STYLE, QUIET_STYLE, make_table
from gradsync.cli.display import count

OURS = (REPLICATE.key, WRAPPER.key)


def tables(result: Result) -> Iterator[Table]:
    for ranks in sorted({cost.ranks for cost in result.costs}):
        yield cost_table(result, ranks)
    if result.growths:
        yield growth_table(result)


def cost_table(result: Result, ranks: int) -> Table:
    """Host: processor time of the thread that trains. Clock: with the waiting for peers and for the processor."""
    names = ("host\nms", "overhead\nms", "µs per\nparameter", "of torch's\nbest", "clock\nms", "of torch's\nbest")
    table = make_table(f"A round of {count(ranks, 'rank')}, and its overhead above no communication", *names)
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


def growth_table(result: Result) -> Table:
    """The exponent where the growth is steepest: 1 is linear."""
    groups = sorted({growth.ranks for growth in result.growths})
    names = [f"{count(ranks, 'rank')}\nexponent" for ranks in groups]
    table = make_table("Growth of the overhead with the number of parameters, where it is steepest", *names)
    rows: dict[str, list[Growth]] = {}
    for growth in result.growths:
        rows.setdefault(growth.contender, []).append(growth)
    for key, row in rows.items():
        cells = [describe_growth(growth) for growth in row]
        table.add_row(f"  {contender(key).name}", *cells, style=_style(key))
    return table


def describe_growth(growth: Growth) -> str:
    verdict = "at most linear" if growth.linear else "more than linear"
    return f"{growth.exponent:.2f}  {verdict}"


def _style(key: str) -> str:
    if key in OURS:
        return OURS_STYLE
    return "" if key == TORCH_BEST.key else QUIET_STYLE
