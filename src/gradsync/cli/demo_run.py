"""A run of the demo, seen from the process that started it: what it says, and how it ends."""

from __future__ import annotations

import time
from pathlib import Path

from rich.text import Text

from gradsync.cli import launch
from gradsync.cli.history import History
from gradsync.cli.launch import RankFailed
from gradsync.cli.style import INTERRUPTED, Output

METRICS, SUMMARY, PICTURE = "metrics.jsonl", "summary.json", "loss.png"


class DemoRun:
    """A subclass trains, and says what came of it."""

    def __init__(self, history: History, out: Path, output: Output) -> None:
        self.history = history
        self.out = out
        self.output = output
        self.console = output.console
        self.began = time.monotonic()

    def train(self) -> None:
        """With ranks, of which none is left behind."""
        raise NotImplementedError

    def finish(self) -> int:
        """The exit code; all files are written."""
        raise NotImplementedError

    def run(self) -> int:
        """Returns the exit code."""
        try:
            with launch.interruptible():
                self.train()
                return self.finish()
        except KeyboardInterrupt:
            self.say(f"Stopped after {self.how_far()}; all ranks have ended.")
            self.say_written()
            return INTERRUPTED
        except RankFailed as failed:
            self.say(f"{self.what_failed(failed)}; the others were stopped.", style="bold red")
            if failed.words:
                self.say(f"Its last lines:\n{failed.words}")
            self.say_written()
            return 1

    def how_far(self) -> str:
        return f"step {len(self.history.steps)} of {self.history.planned_steps}"

    def what_failed(self, failed: RankFailed) -> str:
        return str(failed)

    def show(self, rows: list[tuple[str, str]], sample: str) -> None:
        """Figures, and what the model writes."""
        self.say("")
        for name, value in rows:
            self.console.print(Text.assemble((f"   {name:<18}", "dim"), value))
        self.say("\n   and this is what the model writes by now:\n")
        for line in sample.rstrip().splitlines():
            self.console.print(Text(f"   {line}".rstrip(), style="cyan"), no_wrap=True, overflow="ellipsis")
        self.say("")

    def say_written(self) -> None:
        for name in (PICTURE, METRICS, SUMMARY):
            if (self.out / name).exists():
                self.say(f"wrote {self.out / name}")

    def say(self, line: str, style: str = "") -> None:
        self.output.say(line, style)
