"""What the engine reports. Statistics and timeline read these records; nothing here acts.

A recorder is any callable that takes an event. The engine holds at most one, and without one
reporting costs a single `is None`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class BucketLaunched(NamedTuple):
    """A bucket was handed to the transport."""

    round: int
    bucket: int
    nbytes: int
    at: float
    overlapped: bool  # launched while backward was still producing gradients


class RoundClosed(NamedTuple):
    """A round ended: every gradient is delivered. Times are `time.perf_counter` seconds."""

    round: int
    forward_at: float  # the latest forward began
    opened_at: float
    first_launch_at: float
    backward_ended_at: float
    reduced_at: float  # the last bucket was there
    closed_at: float
    waited: float  # seconds in which this rank did nothing but wait for its peers
    nbytes: int
    buckets: int
    overlapped_buckets: int
    order: tuple[int, ...]  # of arrival on this rank
    corrected: bool  # a gradient arrived after its bucket had left, and a second pass carried it


Event = BucketLaunched | RoundClosed
Recorder = Callable[[Event], None]
