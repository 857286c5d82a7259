"""What a process has: threads, descriptors and shared memory, to be compared before and after."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gradsync.cli.crowding import crowding

# A thread that was told to end, or a connection that was closed by one, needs a moment.
PATIENCE = 3.0
_SHARED = ("memfd:", "/dev/shm/")


class Belonging(NamedTuple):
    what: str
    identity: str

    def __str__(self) -> str:
        return f"{self.what} {self.identity}"


def belongings() -> set[Belonging]:
    """Of this process, now."""
    gc.collect()
    return {*_threads(), *_descriptors(), *_memory()}


def left_behind(before: set[Belonging]) -> list[str]:
    """What is there and was not before."""
    deadline = time.monotonic() + PATIENCE * crowding()
    while (left := belongings() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(map(str, left))


def _threads() -> list[Belonging]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended while we looked
            found.append(Belonging("thread", f"{task.name} ({(task / 'comm').read_text().strip()})"))
    return found


def _descriptors() -> list[Belonging]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one with which the folder was listed
            found.append(Belonging("descriptor", f"{descriptor.name} ({descriptor.readlink()})"))
    return found


def _memory() -> list[Belonging]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [Belonging("memory", line) for line in lines if any(name in line for name in _SHARED)]
