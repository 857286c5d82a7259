"""Totals over all rounds of one replicated module."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradsync.events import Event, RoundClosed
from gradsync.watch.waits import Heard, RoundWait


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

    _module: int = field(default=-1, repr=False)
    _heard: Heard = field(default_factory=Heard, repr=False, compare=False)

    @property
    def waited_for(self) -> dict[int, float]:
        """By rank: seconds that the others waited for it, in the mean over them. The 16 worst, the worst one first.

        The same on all ranks, a few seconds behind. Empty where there is no watch between the ranks, and on GPUs.
        """
        return dict(self._heard.of(self._module).waited_for)

    @property
    def waited_for_rounds(self) -> int:
        """The rounds that `waited_for` counts."""
        return self._heard.of(self._module).rounds

    @property
    def latest_waits(self) -> tuple[RoundWait, ...]:
        """For each of the latest rounds of these: its number, who came last, and how long the others waited for it."""
        return self._heard.of(self._module).latest

    def hear_waits(self, heard: Heard) -> None:
        """From now on rank 0 tells there who was waited for."""
        self._heard = heard

    def moved_to(self, transport: str, reason: str) -> None:
        self.transport = f"{transport}: {reason}"

    def hook_registered(self, name: str) -> None:
        self.hook = name

    def entered_join(self) -> None:
        self.joined = True

    def record(self, event: Event) -> None:
        if isinstance(event, RoundClosed):
            self.rounds += 1
            self._module = event.module
            self.waited_seconds += event.waited
            self.bytes_reduced += event.nbytes
            self.buckets = len(event.buckets)
            self.overlapped_buckets = event.overlapped_buckets
            self.corrected_rounds += event.corrected
            self.repaired_rounds += event.repaired
            if len(self.used) < 3:
                self.used.add(frozenset(event.order))
