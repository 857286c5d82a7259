"""The command as a user runs it: a process, its output, its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import Stopwatch, wait_until

LIMIT = 60
TINY = ["--layers", "1", "--width", "16", "--context", "16", "--batch", "2"]


@dataclass(frozen=True)
class Result:
    """A run that is over."""

    code: int
    output: str
    folder: Path
    seconds: float  # from the signal, if there was one, to the end, on an idle machine
    survivors: list[int]  # ranks that were alive a moment after the end

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Endings:
    """Four runs, each ended in its own way."""

    finished: Result
    interrupted: Result
    rank_killed: Result
    command_killed: Result


class Command:
    """`gradsync demo`, running."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "gradsync.cli", "demo", "--out", str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        self._seen = ""

    def wait_for(self, words: str) -> list[int]:
        """Until the command has said so; its ranks at that moment."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._seen += line
            if words in line:
                return _children(self.process.pid)
        raise AssertionError(f"no {words!r} in:\n{self._seen}")

    def result(self, ranks: list[int]) -> Result:
        watch, rest = Stopwatch(), None
        while rest is None:
            try:
                rest, _ = self.process.communicate(timeout=0.25)
            except subprocess.TimeoutExpired:
                if watch.seconds > LIMIT:
                    raise
        seconds = watch.seconds
        wait_until(lambda: not any(map(_alive, ranks)), 1)
        survivors = [rank for rank in ranks if _alive(rank)]
        return Result(self.process.returncode, self._seen + rest, self.folder, seconds, survivors)


def _finish(run: Command) -> Result:
    return run.result([])


def _interrupt(run: Command) -> Result:
    ranks = run.wait_for("step ")
    run.process.send_signal(signal.SIGINT)
    return run.result(ranks)


def _kill_rank(run: Command) -> Result:
    """Early, to save time: who is to blame among peers that fail together is test_launch's matter."""
    ranks = run.wait_for("starting")
    os.kill(ranks[1], signal.SIGKILL)
    return run.result(ranks)


def _kill_command(run: Command) -> Result:
    ranks = run.wait_for("starting")
    run.process.kill()
    return run.result(ranks)


def _children(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert found, "the command has no ranks"
    return found


def _alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="session")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """All at the same time: a short run is mostly one core that imports torch; in a row they take twice as long."""
    folder = tmp_path_factory.mktemp("demo")
    for name in ("one.py", "two.py"):
        (folder / name).write_text("spam = 1\n" * 1000)
    endless = ["--steps", "100000", "--text", str(folder), *TINY]
    runs = [
        (_finish, Command("--steps", "12", *TINY, folder=folder / "deep" / "finished")),
        (_interrupt, Command(*endless, "--ranks", "1", folder=folder / "interrupted")),
        (_kill_rank, Command(*endless, folder=folder / "rank_killed")),
        (_kill_command, Command(*endless, "--ranks", "1", folder=folder / "command_killed")),
    ]
    try:
        with ThreadPoolExecutor() as pool:
            return Endings(*pool.map(lambda pair: pair[0](pair[1]), runs))
    finally:
        for _, run in runs:
            run.process.kill()
            run.process.communicate()
