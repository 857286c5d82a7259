"""A benchmark as a command: its console, its folder, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path

import typer
from rich.console import RenderableType
from rich.text import Text

from benchmarks.progress import BenchProgress
from gradsync.cli import launch
from gradsync.cli.display import make_console
from gradsync.cli.launch import RankFailed

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def prepare(*files: Path) -> None:
    """Their folders, writable, without the results of an earlier run."""
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"can't write {file}: {error.strerror}") from None


class BenchRun:
    """One run, seen from the process that started it. Subjects fill in `measure`, which also shows and writes."""

    def __init__(self) -> None:
        self.console = make_console()
        self.progress = BenchProgress(self.console)

    def measure(self) -> None:
        raise NotImplementedError

    def run(self) -> int:
        """Returns the exit code."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # where there is no UTF-8, ? is better than a traceback
        try:
            with launch.interruptible():
                self.measure()
                return 0
        except KeyboardInterrupt:
            self.say("Stopped; all ranks have ended, nothing was written.")
            return INTERRUPTED
        except RankFailed as failed:
            self.say(f"{failed}; the others were stopped.", style="bold red")
            self.say(failed.words)
            return 1

    def show(self, parts: Iterable[RenderableType], files: Iterable[Path]) -> None:
        """Tables, each after an empty line, and which files were written."""
        for part in parts:
            self.say("")
            self.console.print(part)
        self.say("")
        for file in files:
            self.say(f"wrote {file}")

    def say(self, line: str, style: str = "") -> None:
        """`Text`, not a string: brackets in what ranks say are not markup."""
        self.console.print(Text(line, style=style), soft_wrap=True)
