"""The progress engine of this process: sums advance whenever somebody calls it, as no thread works on them.

On a host whose cores compute, a thread that reduces would take its time from those cores. So the hooks that run
anyway call `progress_throttled` while gradients arrive, and whoever waits for something calls `progress`.

Nothing is kept alive here: a sum that will never be done, since a rank of it was lost, goes with the round that awaits
it, and with it go its memory and its connections. The others then see that this rank is gone, too.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from time import perf_counter
from typing import Protocol

# Calls of `progress_throttled` closer together than this find nothing new: other ranks take longer than that.
THROTTLE_SECONDS = 50e-6


class Step(Protocol):
    """Something under way that advances when it is asked to."""

    def advance(self) -> bool:
        """Does what is possible now; whether this rank's part is done."""

    def needs_polling(self, link: object) -> bool:
        """Whether it may become possible to advance without a wake-up for those who sleep on `link`."""


_steps: list[weakref.ref[Step]] = []  # as long as somebody has them
_advancing = threading.Lock()
_throttled_until = 0.0


def begin(step: Step) -> None:
    """Advances it at once, and from now on whenever `progress` is called, until it is done."""
    if not step.advance():
        _steps.append(weakref.ref(step, _forget))


def abandon(step: Step) -> None:
    _forget(weakref.ref(step))


def _forget(step: weakref.ref[Step]) -> None:
    with contextlib.suppress(ValueError):  # another thread was quicker
        _steps.remove(step)


def is_idle() -> bool:
    return not _steps


def progress() -> None:
    """Advances everything under way as far as the other ranks are ready for it."""
    if not _steps or not _advancing.acquire(blocking=False):  # two threads would both add up the same share
        return
    try:
        for step in _alive():
            try:
                is_done = step.advance()
            except BaseException:
                abandon(step)
                raise
            if is_done:
                abandon(step)
    finally:
        _advancing.release()


def progress_throttled() -> None:
    """The same for those who call it all the time, as every arrival of a gradient does."""
    global _throttled_until
    if _steps and (now := perf_counter()) > _throttled_until:
        progress()
        _throttled_until = now + THROTTLE_SECONDS


def needs_polling(link: object) -> bool:
    """Whether somebody who sleeps on `link` has to look after the steps again soon, as nobody will wake it for them."""
    return any(step.needs_polling(link) for step in _alive())


def _alive() -> list[Step]:
    """At the moment."""
    return [step for known in tuple(_steps) if (step := known()) is not None]
