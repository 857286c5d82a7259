"""How far a benchmark is: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class BenchProgress:
    """Parts, each with a number of steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._alive = console.is_terminal and not console.is_dumb_terminal
        self._bars = Progress(
            TextColumn("   {task.description:<34}"),
            BarColumn(bar_width=30, complete_style="cyan", finished_style="green"),
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._alive,
        )
        self._task: TaskID | None = None

    @contextmanager
    def part(self, name: str, steps: int) -> Iterator[None]:
        if not self._alive:
            self._console.print(f"measuring {name}", markup=False, soft_wrap=True)
            self._console.file.flush()
        if self._task is not None:  # its bar stands above, and is not drawn again
            self._bars.update(self._task, visible=False)
        self._task = self._bars.add_task(name, total=steps)
        with self._bars:
            yield

    def step(self) -> None:
        if self._task is not None:
            self._bars.advance(self._task)
