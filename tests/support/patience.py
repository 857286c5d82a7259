"""Time as it passes on an idle machine, for tests: see `gradsync.cli.crowding`."""

import time
from collections.abc import Callable

from gradsync.cli.crowding import Stopwatch, crowding

__all__ = ["Stopwatch", "crowding", "seconds_since", "wait_until"]


def seconds_since(began: float) -> float:
    """Since a monotonic time not long ago, on an idle machine."""
    return (time.monotonic() - began) / crowding()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    watch = Stopwatch()
    while not (found := condition()) and watch.seconds < seconds:
        time.sleep(0.02)
    return found
