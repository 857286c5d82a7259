"""The progress of a run: alive on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gradsync.cli.history import History, waiting_share

WIDTH = 76
SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_LINES = 20


def make_console(stderr: bool = False) -> Console:
    """Escape codes only for a terminal, whatever FORCE_COLOR and its like say: a log is read by programs."""
    if (sys.stderr if stderr else sys.stdout).isatty():
        return Console(highlight=False, stderr=stderr)
    return Console(highlight=False, force_terminal=False, color_system=None, width=100, stderr=stderr)


class Display(Protocol):
    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def ready(self, parameters: int) -> None:
        """All ranks are about to take their first step."""

    def update(self, history: History) -> None:
        """Another step is complete."""

    def note(self, line: str) -> None:
        """Something has happened that stays to be seen."""


def make_display(console: Console, *, ranks: int) -> Display:
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, ranks)
    return PlainDisplay(console, ranks)


class PlainDisplay:
    """A line every few percent, each complete in itself."""

    def __init__(self, console: Console, ranks: int) -> None:
        self._console = console
        self._ranks = ranks
        self._clock = Clock()

    def __enter__(self) -> PlainDisplay:
        self._print(f"starting {count(self._ranks, 'rank')}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def ready(self, parameters: int) -> None:
        self._clock.start()
        self._print(f"training {parameters:,} parameters on {count(self._ranks, 'rank')}")

    def update(self, history: History) -> None:
        done, planned = len(history.steps), history.planned_steps
        if done > 1 and done * PLAIN_LINES // planned == (done - 1) * PLAIN_LINES // planned:
            return
        self._print(
            f"step {done:>{len(str(planned))}}/{planned}   loss {history.smoothed[-1]:.3f}   "
            f"{history.tokens_per_second(history.recent):>7,.0f} tokens/s   "
            f"waiting {waiting_share(history.recent):>5.1%}   {duration(self._clock.left(history))} left"
        )

    def note(self, line: str) -> None:
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
        self._console.file.flush()


class LiveDisplay:
    """A panel that is redrawn in place, and stays behind, complete, when the run is over."""

    def __init__(self, console: Console, ranks: int) -> None:
        self._ranks = ranks
        self._clock = Clock()
        self._title = f"{count(ranks, 'rank')}"
        self._notes: list[str] = []
        self._latest: History | None = None
        self._live = Live(self._starting(), console=console, refresh_per_second=8)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def ready(self, parameters: int) -> None:
        self._clock.start()
        self._title = f"{count(self._ranks, 'rank')} × {parameters:,} parameters"

    def update(self, history: History) -> None:
        self._latest = history
        self._live.update(self._panel(self._running(history)))

    def note(self, line: str) -> None:
        self._notes.append(line)
        if self._latest is not None:
            self.update(self._latest)

    def _starting(self) -> RenderableType:
        return self._panel(Spinner("dots", f" starting {count(self._ranks, 'rank')}", style="cyan"))

    def _panel(self, content: RenderableType) -> Panel:
        title = Text.assemble(("gradsync demo", "bold"), ("  " + self._title, "dim"))
        return Panel(
            content,
            title=title,
            title_align="left",
            box=ROUNDED,
            border_style="dim",
            padding=(1, 2),
            width=WIDTH,
        )

    def _running(self, history: History) -> RenderableType:
        done, planned = len(history.steps), history.planned_steps
        figures = Table.grid(expand=True)
        for _ in range(4):
            figures.add_column(ratio=1)
        figures.add_row(
            _figure("loss ", f"{history.smoothed[-1]:.3f}", "", "bold cyan"),
            _figure("", f"{history.tokens_per_second(history.recent):,.0f}", " tokens/s"),
            _figure("waiting ", f"{waiting_share(history.recent):.1%}", ""),
            _figure("", duration(self._clock.left(history)), " left"),
        )
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(
            ProgressBar(total=planned, completed=done, complete_style="cyan", finished_style="green"),
            Text(f"{done:>{len(str(planned))}}/{planned}", style="dim"),
        )
        curve = sparkline(history.smoothed, planned=planned, width=WIDTH - 6)
        notes = [Text(), *(Text(line) for line in self._notes)] if self._notes else []
        return Group(figures, Text(), Text(curve, style="cyan"), Text(), bar, *notes)


def _figure(before: str, value: str, after: str, style: str = "bold") -> Text:
    return Text.assemble((before, "dim"), (value, style), (after, "dim"), no_wrap=True)


class Clock:
    """How long the rest will take, from the time since training began (validation included)."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def start(self) -> None:
        self._began = time.monotonic()

    def left(self, history: History) -> float:
        done = len(history.steps)
        return (time.monotonic() - self._began) / done * (history.planned_steps - done)


def sparkline(values: Sequence[float], *, planned: int, width: int) -> str:
    """`values` as blocks; a column stands for an equal part of the planned values, so the line grows
    to the right instead of sliding."""
    columns = min(width, planned)
    ends = [(c + 1) * planned // columns for c in range(columns)]
    heights = [values[end - 1] for end in ends if end <= len(values)] or list(values[-1:])
    low, high = min(heights), max(heights)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((height - low) * scale)] for height in heights)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
