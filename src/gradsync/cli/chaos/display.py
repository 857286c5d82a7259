"""The progress of a run: one line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from gradsync.cli.chaos.fault import Fault
from gradsync.cli.chaos.judge import Judgment
from gradsync.cli.chaos.tally import COLUMNS, Case, Tally
from gradsync.cli.display import count, duration

PLAIN_SECONDS = 15.0  # between lines, where there is no terminal
_REASON = 400  # characters of it on the screen; the file has all


class Display:
    def __init__(self, console: Console, tally: Tally) -> None:
        self._console, self._tally = console, tally
        self._began = self._said = time.monotonic()
        is_alive = console.is_terminal and not console.is_dumb_terminal
        self._status = Status("starting", console=console, spinner="dots") if is_alive else None

    def running(self) -> AbstractContextManager[object]:
        return nullcontext() if self._status is None else self._status

    def began(self, fault: Fault) -> None:
        if self._status is not None:
            self._status.update(Text(f"{self._so_far()}   {fault}"))

    def over(self, case: Case) -> None:
        if case.is_bad:
            self.say(f"BAD  {case.fault}", "bold red")
            self.say(f"     {case.verdict.reason[:_REASON]}")
        if self._status is None and time.monotonic() - self._said > PLAIN_SECONDS:
            self._said = time.monotonic()
            self.say(self._so_far())

    def _so_far(self) -> str:
        tally = self._tally
        return (
            f"{duration(time.monotonic() - self._began)}  {count(len(tally.cases), 'fault')}: "
            f"{tally.count(Judgment.WENT_ON)} went on, {tally.count(Judgment.NAMED)} named, {len(tally.bad)} bad"
        )

    def finish(self) -> None:
        """The table, and how to have each bad one again."""
        self._console.print(_table(self._tally))
        if self._tally.cases:
            self.say(self._tally.by_transport())
        for case in self._tally.bad:
            self.say(f"again:  gradsync chaos --fault '{case.fault}'", "red")
        self.say(self._so_far(), "bold red" if self._tally.bad else "bold green")

    def say(self, line: str, style: str = "") -> None:
        """`Text`, not a string: brackets in what ranks say are not markup."""
        self._console.print(Text(line, style=style), soft_wrap=True)
        self._console.file.flush()


def _table(tally: Tally) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right")
    for row in tally.rows():
        table.add_row(*row.cells(), style="red" if row.bad else None, end_section=row.kind == "all")
    return table
