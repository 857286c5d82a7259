"""Ranks that `gradsync run --elastic` starts, and starts again, for a command of ours.

They come and go, so they tell what they do through a pipe that has a name, one for each launcher. What a launcher
itself says is kept, as a rank's output is.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.cli import kernel, report
from gradsync.cli.launch import Rank, Ranks, start_rank

LAUNCHER = "gradsync.run"
PROGRAM = """\
from {module} import main

main()
"""


@dataclass(frozen=True)
class Launcher:
    """One, of the ranks of a host."""

    options: Sequence[str]
    """Of `gradsync run`, besides `--elastic`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    inside: Sequence[str] = ()
    """A command that runs another one in its place, as `ip netns exec NAME` does."""


class LaunchedRanks(Ranks):
    """The launchers of a run, as a context: neither they nor their ranks are alive after it.

    `reports()` gives what ranks say with the number of their launcher: each says by itself who it is.
    """

    def __init__(self, module: str, job: str, launchers: Sequence[Launcher]) -> None:
        """`module`: its `main` is what a rank runs, with `job` as its argument."""
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-")
        self._launchers = launchers
        super().__init__(module, [job], ranks=len(launchers))

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        program = Path(self._folder.name) / "train.py"
        program.write_text(PROGRAM.format(module=module), encoding="utf-8")
        for number, one in enumerate(self._launchers):
            pipe = program.with_name(f"reports{number}")
            os.mkfifo(pipe)
            variables = {
                "OMP_NUM_THREADS": "1",  # how many decides the bits
                **one.variables,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                report.PATH_VARIABLE: str(pipe),
            }
            words = ["--elastic", *one.options, str(program), *arguments]
            started = start_rank(number, variables, LAUNCHER, words, one.inside)
            started.inbox.close()
            # Open for both, so that it does not end when no rank is there for a while.
            yield dataclasses.replace(started, inbox=report.Inbox(os.open(pipe, os.O_RDWR)))

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def begin_rank() -> Path:
    """In a rank: the kernel ends it with its launcher, however that ends. A folder that is gone when all is over."""
    kernel.die_with(os.getppid())
    return Path(sys.argv[0]).parent
