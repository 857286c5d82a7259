"""What the engine reports: how long each phase took, and when each bucket was where. Nothing here acts.

A recorder is any callable that takes an event. The engine calls its recorders one after the other; statistics are
always among them. All times are `time.perf_counter` seconds of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """A phase of this rank, outside of what ranks do together."""

    phase: str  # FORWARD, BACKWARD (one that is no round) or OPTIMIZER
    began_at: float
    ended_at: float


FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


class PhaseSeconds(NamedTuple):
    """Seconds that phases have taken."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


class Traffic(NamedTuple):
    """Bytes that other ranks have got from this one."""

    sent: int = 0
    crossed: int = 0  # of those, what crossed from one host to another, where the transport knows

    def __add__(self, other: object) -> Traffic:
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.sent + other.sent, self.crossed + other.crossed)


NO_TRAFFIC = Traffic()


class BucketTimes(NamedTuple):
    """When one bucket of a round was where, in this order."""

    number: int  # in the plan
    ready_at: float  # the last of its gradients was there
    launched_at: float  # its gradients begin to be copied in, to leave at once
    reduced_at: float  # as this rank noticed: at the next launch, or when it waited for it
    awaited_at: float  # from here to `reduced_at` the rank did nothing but wait for it; 0.0: it did not have to
    delivered_at: float  # in `.grad`
    traffic: Traffic


class PlannedBucket(NamedTuple):
    """What lies in a bucket."""

    parameters: tuple[int, ...]  # by their places in `Layout.names`, in the order of the plan
    nbytes: int  # of their gradients
    allocated: int  # bytes, with what travels beside them
    is_shared: bool  # its memory is seen by other ranks
    device: str
    dtype: str


class Layout(NamedTuple):
    """Which gradients lie in which bucket. The same object in each round of a plan."""

    names: tuple[str, ...] = ()  # of all managed parameters
    buckets: tuple[PlannedBucket, ...] = ()  # in the order of the plan
    sparse: tuple[int, ...] = ()  # parameters that travel by themselves
    gradients_are_views: bool = True  # of the buckets; else they have memory of their own


NO_LAYOUT = Layout()


class RoundClosed(NamedTuple):
    """A round ended: every gradient is delivered."""

    round: int
    opened_at: float
    first_launch_at: float
    reduced_at: float  # the last bucket was there
    closed_at: float
    waited: float  # seconds in which this rank did nothing but wait for its peers
    nbytes: int
    buckets: tuple[BucketTimes, ...]  # those that traveled, in this order
    overlapped_buckets: int
    order: tuple[int, ...]  # of arrival on this rank
    corrected: bool  # a gradient arrived after its bucket had left, and a second pass carried it
    repaired: bool  # replicas had different parameters, and were given the same ones
    hooked: bool = False  # a communication hook reduced the buckets: what it sent is not in their traffic
    steps_in_backward: bool = False  # an optimizer does
    unused: tuple[int, ...] = ()  # parameters that this rank had no gradient for
    layout: Layout = NO_LAYOUT
    forward_at: float = 0.0  # the latest forward began
    backward_ended_at: float = 0.0  # it has computed all it had to; the rest of the buckets has yet to leave
    module: int = -1  # its serial number, the same on all ranks
    before: PhaseSeconds = PhaseSeconds()
    """Since the round before: forwards, backwards that were no rounds, and steps of optimizers."""


class RoundRecord:
    """What becomes such an event, taken down while the round lasts."""

    def __init__(self, hooked: bool = False, steps_in_backward: bool = False) -> None:
        self._opened_at = time.perf_counter()
        self._hooked, self._steps_in_backward = hooked, steps_in_backward
        self._first_launch_at = self._reduced_at = self._waited = self._backward_ended_at = 0.0
        self._ready: dict[int, float] = {}  # these by the buckets' numbers
        self._launched: dict[int, float] = {}
        self._reduced: dict[int, float] = {}
        self._awaited: dict[int, float] = {}
        self._delivered: dict[int, float] = {}
        self._overlapped = 0
        self._corrected = self._repaired = False

    def bucket_ready(self, number: int) -> None:
        """All of its gradients are there; it may not be its turn."""
        self._ready[number] = time.perf_counter()

    def bucket_launched(self, number: int, overlaps: bool, since: float) -> None:
        """It has left; `since`: it began to, its gradients were copied in; `overlaps`: backward still computes."""
        self._launched[number] = since
        self._first_launch_at = self._first_launch_at or since
        self._overlapped += overlaps

    def bucket_reduced(self, number: int, awaited_since: float = 0.0) -> None:
        """`awaited_since`: if this rank did nothing but wait for it, from when on. The first call counts."""
        if number in self._reduced:
            return
        self._reduced[number] = self._reduced_at = now = time.perf_counter()
        if awaited_since:
            self._awaited[number] = awaited_since
            self._waited += now - awaited_since

    def bucket_delivered(self, number: int) -> None:
        self._delivered[number] = time.perf_counter()

    def backward_ended(self) -> None:
        """The first call counts."""
        self._backward_ended_at = self._backward_ended_at or time.perf_counter()

    def second_pass(self) -> None:
        """Gradients that came after their bucket had left are carried."""
        self._corrected = True

    def replicas_repaired(self) -> None:
        self._repaired = True

    def closed(
        self,
        number: int,
        nbytes: int,
        traffic: Mapping[int, Traffic],
        order: Sequence[int],
        unused: Sequence[int],
        layout: Layout,
    ) -> RoundClosed:
        """`traffic`: of each bucket that has left, by its number."""
        return RoundClosed(
            round=number,
            opened_at=self._opened_at,
            first_launch_at=self._first_launch_at,
            reduced_at=self._reduced_at,
            closed_at=time.perf_counter(),
            waited=self._waited,
            nbytes=nbytes,
            buckets=tuple(self._times(one, sent) for one, sent in traffic.items()),
            overlapped_buckets=self._overlapped,
            order=tuple(order),
            corrected=self._corrected,
            repaired=self._repaired,
            hooked=self._hooked,
            steps_in_backward=self._steps_in_backward,
            unused=tuple(unused),
            layout=layout,
            backward_ended_at=self._backward_ended_at,
        )

    def _times(self, number: int, traffic: Traffic) -> BucketTimes:
        launched_at = self._launched[number]
        ready_at = min(self._ready.get(number, launched_at), launched_at)
        awaited_at, reduced_at = self._awaited.get(number, 0.0), self._reduced[number]
        return BucketTimes(number, ready_at, launched_at, reduced_at, awaited_at, self._delivered[number], traffic)


Event = RoundClosed
Recorder = Callable[[Event], None]
