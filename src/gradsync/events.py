"""What the engine reports. Statistics and torch's logger read these records; nothing here acts.

A recorder is any callable that takes an event. The engine calls its recorders one after the other; statistics are
always among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class RoundClosed(NamedTuple):
    """A round ended: every gradient is delivered. Times are `time.perf_counter` seconds."""

    round: int
    opened_at: float
    first_launch_at: float
    reduced_at: float  # the last bucket was there
    closed_at: float
    waited: float  # seconds in which this rank did nothing but wait for its peers
    nbytes: int
    sent: tuple[int, ...]  # the buckets that travelled, by their numbers, in this order
    overlapped_buckets: int
    order: tuple[int, ...]  # of arrival on this rank
    corrected: bool  # a gradient arrived after its bucket had left, and a second pass carried it
    repaired: bool  # replicas had different parameters, and were given the same ones
    forward_at: float = 0.0  # the latest forward began
    backward_ended_at: float = 0.0
    module: int = -1  # its serial number, the same on all ranks


class RoundRecord:
    """What becomes such an event, taken down while the round lasts."""

    def __init__(self) -> None:
        self._opened_at = time.perf_counter()
        self._first_launch_at = self._reduced_at = self._waited = 0.0
        self._overlapped = 0
        self._corrected = self._repaired = False

    def bucket_launched(self, overlaps: bool) -> None:
        """`overlaps`: backward still computes."""
        self._first_launch_at = self._first_launch_at or time.perf_counter()
        self._overlapped += overlaps

    def bucket_reduced(self, awaited_since: float) -> None:
        self._reduced_at = time.perf_counter()
        self._waited += self._reduced_at - awaited_since

    def second_pass(self) -> None:
        """Gradients that came after their bucket had left are carried."""
        self._corrected = True

    def replicas_repaired(self) -> None:
        self._repaired = True

    def closed(self, number: int, nbytes: int, sent: Sequence[int], order: Sequence[int]) -> RoundClosed:
        return RoundClosed(
            round=number,
            opened_at=self._opened_at,
            first_launch_at=self._first_launch_at,
            reduced_at=self._reduced_at,
            closed_at=time.perf_counter(),
            waited=self._waited,
            nbytes=nbytes,
            sent=tuple(sent),
            overlapped_buckets=self._overlapped,
            order=tuple(order),
            corrected=self._corrected,
            repaired=self._repaired,
        )


Event = RoundClosed
Recorder = Callable[[Event], None]
