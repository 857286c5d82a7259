"""Totals over all rounds of one replicated module."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradsync.events import Event, RoundClosed


@dataclass
class Statistics:
    """What the rounds so far have cost. Kept up to date by the engine; read it at any time."""

    rounds: int = 0
    waited_seconds: float = 0.0
    """Seconds this rank stood still at the end of a backward, waiting for its peers."""
    bytes_reduced: int = 0
    """Of gradients in buckets, also where less had to travel."""
    buckets: int = 0
    """Buckets of the latest round."""
    overlapped_buckets: int = 0
    """Those of them that travelled while backward was still computing."""
    corrected_rounds: int = 0
    """Rounds that needed a second pass for gradients that came after their bucket had left."""
    repaired_rounds: int = 0
    """Rounds in which replicas had different parameters, and were given the same ones (`on_divergence="repair"`)."""

    transport: str = ""
    """What carries the buckets, and why that and no other."""
    hook: str = ""
    """The communication hook, if one is registered."""

    used: set[frozenset[int]] = field(default_factory=set)
    """The sets of parameters that rounds used on this rank; no more than a few are kept."""
    joined: bool = False
    """Whether training went through torch's `Join`."""

    def moved_to(self, transport: str, reason: str) -> None:
        self.transport = f"{transport}: {reason}"

    def hook_registered(self, name: str) -> None:
        self.hook = name

    def entered_join(self) -> None:
        self.joined = True

    def record(self, event: Event) -> None:
        if isinstance(event, RoundClosed):
            self.rounds += 1
            self.waited_seconds += event.waited
            self.bytes_reduced += event.nbytes
            self.buckets = len(event.sent)
            self.overlapped_buckets = event.overlapped_buckets
            self.corrected_rounds += event.corrected
            self.repaired_rounds += event.repaired
            if len(self.used) < 3:
                self.used.add(frozenset(event.order))
