"""What the tables of all subjects have in common."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.targets import Target

OURS_STYLE = "cyan"
QUIET_STYLE = "dim"


def make_table(title: str, *columns: str) -> Table:
    """The first column holds names, the others figures."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.title_style = ""
    table.add_column("", no_wrap=True, min_width=25)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def target_table(targets: list[Target], title: str = "Targets") -> Table:
    table = make_table(title, "measured", "target", "")
    for target in targets:
        table.add_row(f"  {target.name}", target.figure, target.limit_text, _verdict(target))
    return table


def _verdict(target: Target) -> Text:
    if target.met is None:
        return Text("not measured", style=QUIET_STYLE)
    return Text("met", style="green") if target.met else Text("missed", style="bold red")
