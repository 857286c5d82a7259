"""The command as a user runs it: a process, its output, its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIMIT = 60
TINY = ["--layers", "1", "--width", "16", "--context", "16", "--batch", "2"]


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


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
        self.ranks: list[int] = []
        self._seen = ""

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._seen += line
            if words in line:
                self.ranks = children(self.process.pid)
                return
        pytest.fail(f"no {words!r} in:\n{self._seen}")

    def finish(self, limit: float = LIMIT) -> Result:
        rest, _ = self.process.communicate(timeout=limit)
        return Result(self.process.returncode, self._seen + rest, self.folder)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts the command; ends what a failing test leaves behind."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(*arguments, folder=tmp_path / "out"))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One whole run of two ranks, looked at by several tests."""
    return Command("--steps", "12", *TINY, folder=tmp_path_factory.mktemp("demo") / "deep" / "out").finish()
