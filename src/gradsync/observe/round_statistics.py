"""One round in detail, put together when somebody asks: its costs, and its buckets with names and moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gradsync.events import BucketTimes, Layout, RoundClosed
from gradsync.observe.costs import Costs


@dataclass(frozen=True)
class BucketStatistics:
    """One bucket of a round. Moments are seconds since the round has opened."""

    number: int
    """In the order in which they leave."""
    parameters: tuple[str, ...]
    nbytes: int
    """Of gradients."""
    sent: int
    """Bytes that other ranks got from this one."""
    ready: float
    """The last of its gradients was there."""
    start: float
    """It was launched."""
    end: float
    """It was reduced, as this rank noticed: at the next launch, or when it waited for it."""
    waited: float
    """Seconds that this rank did nothing but wait for it."""


@dataclass(frozen=True)
class RoundStatistics(Costs):
    """One round of this rank."""

    number: int = 0
    """All ranks count alike."""
    buckets: tuple[BucketStatistics, ...] = ()
    """Those that traveled."""
    overlapped_buckets: int = 0
    """Those of them that left while backward was still computing."""
    idle_buckets: int = 0
    """Those that nobody had anything for, and that were left out."""
    backward_ended: float = 0.0
    """Seconds since the round has opened, as the buckets' moments."""
    unused: tuple[str, ...] = ()
    """Parameters that this rank brought no gradient for."""


def describe(event: RoundClosed, costs: Costs) -> RoundStatistics:
    layout = event.layout
    return RoundStatistics(
        **{one.name: getattr(costs, one.name) for one in fields(Costs)},
        number=event.round,
        buckets=tuple(_bucket(one, layout, event.opened_at) for one in event.buckets),
        overlapped_buckets=event.overlapped_buckets,
        idle_buckets=len(layout.buckets) - len(event.buckets),
        backward_ended=event.backward_ended_at - event.opened_at,
        unused=_names(layout, event.unused),
    )


def _bucket(times: BucketTimes, layout: Layout, opened_at: float) -> BucketStatistics:
    planned = layout.buckets[times.number]
    return BucketStatistics(
        times.number,
        _names(layout, planned.parameters),
        planned.nbytes,
        times.traffic.sent,
        times.ready_at - opened_at,
        times.launched_at - opened_at,
        times.reduced_at - opened_at,
        times.reduced_at - times.awaited_at if times.awaited_at else 0.0,
    )


def _names(layout: Layout, indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(layout.names[index] for index in indices)
