"""Where this rank is: in which phase of which round of which module, and since when.

Written all the time by the training thread, a tuple each, and read now and then by the watch's thread.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

STACK_LINES, _TRACEBACK_LINES, _WIDTH = 8, 12, 250
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = __file__.rsplit("/", 2)[0]


class Position(NamedTuple):
    """Of one rank."""

    phase: str = "before its first round"
    module: str = ""
    serial: int = -1
    """Of the module, the same on all ranks."""
    round: int = 0
    awaits: object = ""
    """Which bucket, and whose gradients are in it: something that becomes a text when somebody asks."""
    since: float = 0.0
    """`time.monotonic`, which ranks don't have in common: what others hear is `aged`."""

    def aged(self) -> Position:
        """As others hear it: `since` becomes how many seconds ago that was."""
        return self._replace(since=max(time.monotonic() - self.since, 0.0))

    def pack(self) -> list[Any]:
        return [*self[:4], str(self.awaits), self.since]

    @classmethod
    def unpack(cls, packed: Any) -> Position:
        phase, module, serial, number, awaits, ago = packed
        return cls(str(phase), str(module), int(serial), int(number), str(awaits), float(ago))

    def __str__(self) -> str:
        of = f" of round {self.round} of {self.module}" if self.module else ""
        return f"{self.phase}{of}{f', waiting for {self.awaits}' if self.awaits else ''}"


class Awaited(NamedTuple):
    """A bucket that is on its way."""

    number: int
    of: int
    first: str
    """The name of its first parameter."""
    parameters: int

    def __str__(self) -> str:
        more = f" and {self.parameters - 1} more" if self.parameters > 1 else ""
        return f"bucket {self.number + 1} of {self.of} ({self.first}{more})"


class Here:
    """The position of this process."""

    def __init__(self) -> None:
        self.now = Position(since=time.monotonic())
        self.thread = threading.main_thread().ident
        self.trains_elsewhere = False
        """Whether another thread has trained."""
        self.rounds: dict[int, int] = {}
        """How many rounds each replicated module has closed, by its serial number."""
        self._wait, self._waits_since = "", 0.0

    def enter(self, phase: str, module: str, serial: int, number: int, awaits: object = "") -> None:
        self.now = Position(phase, module, serial, number, awaits, time.monotonic())

    def forward_begins(self) -> None:
        """Of a replica, in this thread."""
        if threading.get_ident() != self.thread:
            self.trains_elsewhere = True

    def round_closed(self, module: str, serial: int, number: int) -> None:
        self.rounds[serial] = number + 1
        self.enter("past the end", module, serial, number)

    def begin_wait(self, what: str) -> None:
        """A wait for other ranks that takes long, whatever the phase."""
        self._wait, self._waits_since = what, time.monotonic()

    def end_wait(self) -> None:
        self._wait = ""

    def described(self) -> Position:
        """`now`, and what is waited for, if anything is."""
        at = self.now
        return at._replace(awaits=self._wait, since=self._waits_since) if self._wait and not at.awaits else at


here = Here()


def stack() -> list[str]:
    """What the training thread does now, the last calls."""
    frame = sys._current_frames().get(here.thread or 0)
    return _lines([*traceback.walk_stack(frame)][::-1], STACK_LINES) if frame is not None else []


def lines_of(error: BaseException) -> list[str]:
    return _lines([*traceback.walk_tb(error.__traceback__)], _TRACEBACK_LINES)


def _lines(frames: Sequence[tuple[FrameType, int]], most: int) -> list[str]:
    """The last calls, without the source itself, for which files would have to be read.

    Of more than `most` those inside libraries go first, from the outermost one on; `...` is in their place.
    """
    inside = [not _is_users(frame.f_code.co_filename) for frame, _ in frames[:-1]] + [False]
    found: list[str] = []
    size, gap = len(frames), False
    for at, (frame, line) in enumerate(frames):
        gap = size > most and inside[at] and (gap or not found or inside[at + 1])
        if not gap:
            found.append(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"[-_WIDTH:])
        elif found and found[-1] != "...":
            found.append("...")  # takes as much room as what it stands for
        else:
            size -= 1
    return found[-most:]


def user_line() -> str:
    """The innermost line of the user's own code that the training thread is in."""
    frame: FrameType | None = sys._current_frames().get(here.thread or 0)
    return _innermost(traceback.walk_stack(frame)) if frame is not None else ""


def user_line_of(error: BaseException) -> str:
    """The same of where an exception was raised."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Of calls, the latest first: that of the user's own code."""
    for frame, line in frames:
        if _is_users(file := frame.f_code.co_filename):
            return f"{file.rsplit('/', 1)[-1]}:{line} in {frame.f_code.co_name}"
    return ""


def _is_users(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _OURS, "<"))
