"""A benchmark as a command: its console, its files, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from benchmarks.progress import BenchProgress
from gradsync.cli import launch
from gradsync.cli.launch import RankFailed
from gradsync.cli.style import INTERRUPTED, Output, check_writable, write_json

KEEP_SECONDS = 1.0  # between two writings of what was measured so far


class Result(Protocol):
    """What was measured: frozen."""

    def to_dict(self) -> dict[str, Any]: ...


class BenchRun:
    """One run, seen from the process that started it. What was measured is written as it comes.

    Subjects fill in `measure`, which calls `keep` whenever there is more, and what can be said at any time: `so_far`,
    `parts` and `draw`.
    """

    def __init__(self, json: Path, picture: Path | None = None) -> None:
        self.output = Output(json)
        self.console = self.output.console
        self.progress = BenchProgress(self.console)
        self.picture = picture
        self._kept = 0.0
        if picture is not None:
            check_writable(picture, "--picture")

    def measure(self) -> None:
        raise NotImplementedError

    def so_far(self) -> Any:
        """The `Result` of what was measured up to now; None if that is nothing."""
        raise NotImplementedError

    def parts(self, result: Any) -> Iterable[RenderableType]:
        """As tables."""
        raise NotImplementedError

    def draw(self, result: Any, path: Path) -> None:
        """Where there is a picture."""
        raise NotImplementedError

    def run(self) -> int:
        """Returns the exit code."""
        with launch.interruptible():
            try:
                self.measure()
            except KeyboardInterrupt:
                self._finish(is_complete=False)
                self.output.say("Interrupted; all ranks have ended.", "bold yellow")
                return INTERRUPTED
            except RankFailed as failed:
                self._finish(is_complete=False)
                self.output.say(f"{failed}; the others were stopped.", "bold red")
                self.output.say(failed.words)
                return 1
            self._finish(is_complete=True)
            return 0

    def keep(self) -> None:
        """What was measured so far is in the file, should this process end."""
        now = time.monotonic()
        if self.output.file is not None and now - self._kept > KEEP_SECONDS:
            result: Result | None = self.so_far()
            if result is not None:
                write_json(self.output.file, {"complete": False, **result.to_dict()})
            self._kept = now

    def _finish(self, is_complete: bool) -> None:
        result: Result | None = self.so_far()
        if result is None:
            self.output.say("Nothing was measured.")
            return
        for part in self.parts(result):
            self.output.say("")
            self.console.print(part)
        self.output.say("")
        if not is_complete:
            self.output.say("Not all was measured. What was:")
        if self.picture is not None:
            self.draw(result, self.picture)
            self.output.say(f"wrote {self.picture}")
        self.output.write({"complete": is_complete, **result.to_dict()})
