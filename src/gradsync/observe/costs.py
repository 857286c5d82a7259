"""What rounds cost this rank, in seconds and bytes: a pure function of what the engine tells of each.

|  outside, forward  |  backward            |  exposed, finishing  |  outside, optimizer  | ...
^ the round before   ^ the round            ^ backward             ^ the round
  has closed           opens                  has ended              has closed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from gradsync.events import BucketTimes, RoundClosed


@dataclass(frozen=True)
class Costs:
    """Of one round, or of several added up. Seconds are this rank's, by its host's clock."""

    rounds: int = 0
    seconds: float = 0.0
    """From the end of the round before to the end of this one: with one backward a step, that of a whole step."""
    forward: float = 0.0
    """Forwards since the round before; those of an evaluation too."""
    backward: float = 0.0
    """From the output, or the first gradient, to the end of the last computation; also those that only accumulate."""
    optimizer: float = 0.0
    """Steps since the round before: those that used its gradients."""
    communication: float = 0.0
    """While at least one bucket was under way: from when its gradients were copied in, to leave, until this rank saw
    that it was reduced."""
    exposed: float = 0.0
    """What of that came after backward had ended: the step would be that much shorter if nothing had to travel."""
    finishing: float = 0.0
    """The rest of the round after backward: gradients delivered, buffers, replicas compared; in the first, the plan."""
    waited: float = 0.0
    """What of `communication` this rank did nothing in but wait for its peers."""
    sent: int = 0
    """Bytes that other ranks got from this one; with a communication hook, without what that has sent."""
    crossed: int = 0
    """What of that went to other hosts, where the transport knows."""
    is_counted: bool = True
    """Whether `sent` is all: no communication hook sends anything else."""

    @property
    def outside(self) -> float:
        """What of `seconds` is none of these phases: data, logging, code of your own."""
        known = self.forward + self.backward + self.exposed + self.finishing + self.optimizer
        return max(0.0, self.seconds - known)

    @property
    def overlap(self) -> float:
        """The share of `communication` that was hidden behind backward, from 0 to 1."""
        return 1 - self.exposed / self.communication if self.communication else 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes sent a second of `communication`. None: nothing was sent, or a hook has sent nobody knows how much."""
        return self.sent / self.communication if self.is_counted and self.sent and self.communication else None

    def __add__(self, other: object) -> Costs:
        if not isinstance(other, Costs):
            return NotImplemented
        both = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return Costs(**both, is_counted=self.is_counted and other.is_counted)

    def mean(self) -> Costs:
        """Of a round. Bytes are rounded."""
        count = max(self.rounds, 1)
        return Costs(
            rounds=min(self.rounds, 1),
            sent=round(self.sent / count),
            crossed=round(self.crossed / count),
            is_counted=self.is_counted,
            **{name: getattr(self, name) / count for name in SECONDS},
        )


SECONDS = tuple(one.name for one in fields(Costs) if one.type == "float")
_ADDED = tuple(one.name for one in fields(Costs) if one.name != "is_counted")


def of_round(event: RoundClosed, closed_before: float) -> Costs:
    """`closed_before`: when the round before has closed; 0.0: there was none, and this one began with its forward."""
    communication, exposed = _under_way(event.buckets, event.backward_ended_at)
    before, after = event.before, event.closed_at - event.backward_ended_at
    backward = before.backward + event.backward_ended_at - event.opened_at
    began_at = closed_before or min(event.forward_at or event.opened_at, event.opened_at)
    return Costs(
        rounds=1,
        seconds=max(event.closed_at - began_at, before.forward + backward + before.optimizer + after),
        forward=before.forward,
        backward=backward,
        optimizer=before.optimizer,
        communication=communication,
        exposed=exposed,
        finishing=max(0.0, after - exposed),
        waited=event.waited,
        sent=sum(one.traffic.sent for one in event.buckets),
        crossed=sum(one.traffic.crossed for one in event.buckets),
        is_counted=not event.hooked,
    )


def _under_way(buckets: Iterable[BucketTimes], ended_at: float) -> tuple[float, float]:
    """Seconds in which at least one was, and what of them came after backward. They are in the order of launching."""
    total = exposed = reached = 0.0
    for one in buckets:
        begin, end = max(one.launched_at, reached), one.reduced_at
        if end > begin:
            total += end - begin
            exposed += max(0.0, end - max(begin, ended_at))
            reached = end
    return total, exposed
