"""Limits on time that a busy machine does not trip, and a hang does.

With twenty processes on two cores everything takes ten times as long, and nothing hangs. So time is counted as it would
have passed on an idle machine: a second in which ten processes wanted each core counts as a tenth of one. A hang waits,
and does not compete: on an idle machine it is ended after as many seconds as the limit says.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_LONGEST = 30.0  # times a limit: however busy the machine is, a hang ends some day
_LOOK_EVERY = 0.25


def crowding() -> float:
    """How many processes there are that want to run, for each core; 1 if there is a core for each."""
    now, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    wanting = max(float(now), float(running.split("/")[0]))  # the mean of the last minute, and at this moment
    return min(max(1.0, wanting / (os.cpu_count() or 1)), _LONGEST)


class Stopwatch:
    """Runs from when it is made, slower on a busy machine. Look at it often: it reckons with how busy it was last."""

    def __init__(self) -> None:
        self._seen, self._crowding = time.monotonic(), crowding()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        now, crowded = time.monotonic(), crowding()
        self._seconds += (now - self._seen) / max(crowded, self._crowding)
        self._seen, self._crowding = now, crowded
        return self._seconds

    def slice(self, limit: float) -> float:
        """How long to wait, in real seconds, before looking again; below 0: the limit is over."""
        return min(limit - self.seconds, _LOOK_EVERY)
