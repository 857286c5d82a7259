"""What is under way in this process: no thread works on it, it goes on whenever somebody asks."""

from __future__ import annotations

import contextlib
import threading
from time import perf_counter
from typing import Protocol

from gradsync.transport.link import Link

LOOK_EVERY = 50e-6


class Step(Protocol):
    """Something under way that goes on whenever somebody asks."""

    link: Link
    """Between the ranks that take part."""

    def advance(self) -> bool:
        """Does what is possible now; whether this rank's part is done."""


_in_progress: list[Step] = []
_at_it = threading.Lock()
_look_again = 0.0


def begin(step: Step) -> None:
    if not step.advance():
        _in_progress.append(step)


def anything() -> bool:
    return bool(_in_progress)


def give_up(step: Step) -> None:
    with contextlib.suppress(ValueError):  # another thread was quicker
        _in_progress.remove(step)


def progress() -> None:
    """Does this rank's share of all reductions for which the other ranks are ready."""
    if not _in_progress or not _at_it.acquire(blocking=False):  # two threads would both add up the same
        return
    try:
        for step in tuple(_in_progress):
            try:
                over = step.advance()
            except BaseException:
                give_up(step)
                raise
            if over:
                give_up(step)
    finally:
        _at_it.release()


def progress_now_and_then() -> None:
    """The same for those who call it all the time: it looks no more often than is of use."""
    global _look_again
    if _in_progress and (now := perf_counter()) > _look_again:
        progress()
        _look_again = now + LOOK_EVERY


def waited_for_elsewhere(link: Link) -> bool:
    """Whether ranks may wait for this one that can't wake it, as they have no part in `link`."""
    return any(step.link is not link for step in _in_progress)
