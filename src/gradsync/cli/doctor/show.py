"""A diagnosis on a terminal, or as plain lines."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradsync.cli.doctor.diagnosis import Diagnosis
from gradsync.cli.doctor.finding import Finding, Level

STYLES = {Level.FINE: "green", Level.UNTRIED: "dim", Level.WARNING: "yellow", Level.WRONG: "bold red"}
_SUBJECT = 14


def show(console: Console, diagnosis: Diagnosis) -> None:
    (_show_table if console.is_terminal else _show_lines)(console, diagnosis)
    level = Level.WRONG if not diagnosis.is_well else Level.WARNING if diagnosis.of(Level.WARNING) else Level.FINE
    console.print(Text(diagnosis.verdict(), style=STYLES[level]))


def _show_table(console: Console, diagnosis: Diagnosis) -> None:
    """Long texts are wrapped inside their column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in diagnosis.findings:
        text = Text(one.text)
        if one.cure:
            text.append(f"\n→ {one.cure}", style="bold")
        table.add_row(Text(one.level.value, style=STYLES[one.level]), Text(one.subject, style="dim"), text)
    console.print(Padding(table, (1, 0)))


def _show_lines(console: Console, diagnosis: Diagnosis) -> None:
    """One for each finding, and one for its cure: for logs, and for `grep`."""
    for one in diagnosis.findings:
        console.print(Text(_line(one)), soft_wrap=True)
        if one.cure:
            console.print(Text(f"{'':<9}{'':<{_SUBJECT}} cure: {one.cure}"), soft_wrap=True)


def _line(one: Finding) -> str:
    return f"{one.level.value:<9}{one.subject:<{_SUBJECT}} {one.text}"
