"""What the rounds of one replicated module have cost: always on, and next to nothing itself.

A round adds a few numbers to the totals, and leaves its record; names and tables are made of that when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradsync.events import NO_LAYOUT, Event, Layout, RoundClosed
from gradsync.observe import statistics_table, units
from gradsync.observe.costs import Costs, of_round
from gradsync.observe.memory import Memory, measure
from gradsync.observe.round_statistics import RoundStatistics, describe
from gradsync.watch.waits import Heard, RoundWait


@dataclass(repr=False)
class Statistics:
    """What the rounds so far have cost this rank. Kept up to date by the engine; read it at any time, or print it."""

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
    rank: int = 0
    size: int = 1
    """How many ranks there are."""
    hook: str = ""
    """The communication hook, if one is registered."""
    module: str = ""
    """The name of its class."""

    used: set[frozenset[int]] = field(default_factory=set)
    """The sets of parameters that rounds used on this rank; no more than a few are kept."""
    joined: bool = False
    """Whether training went through torch's `Join`."""

    _module: int = -1
    _heard: Heard = field(default_factory=Heard, compare=False)
    _total: Costs = field(default_factory=Costs, compare=False)
    _costs: Costs = field(default_factory=Costs, compare=False)  # of the latest round
    _event: RoundClosed | None = field(default=None, compare=False)
    _closed_at: float = field(default=0.0, compare=False)

    # --- what there is to read -------------------------------------------------------------------

    @property
    def latest(self) -> RoundStatistics | None:
        """The latest round in detail; None before the first one."""
        return None if self._event is None else describe(self._event, self._costs)

    @property
    def latest_costs(self) -> Costs:
        """The same without details, which is quicker; zeros before the first one."""
        return self._costs

    @property
    def total(self) -> Costs:
        """All rounds added up; `total.mean()` is the mean round."""
        return self._total

    @property
    def memory(self) -> Memory:
        """What the buckets take now, and the process has taken at most."""
        return measure(self._layout)

    @property
    def on_host_only(self) -> bool:
        """Whether gradients are on an accelerator: times are then the host's, which only queues work for it."""
        return any(not one.device.startswith("cpu") for one in self._layout.buckets)

    @property
    def optimizer_in_backward(self) -> bool:
        """Whether an optimizer steps there: its time is part of backward, and of what follows it."""
        return self._event is not None and self._event.steps_in_backward

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

    def __repr__(self) -> str:
        step = units.seconds(self._total.mean().seconds)
        return f"<Statistics of {self.rounds} rounds, {step} each; print() shows them>"

    def __str__(self) -> str:
        return statistics_table.as_text(self._report())

    def _repr_html_(self) -> str:
        """For Jupyter."""
        return statistics_table.as_html(self._report())

    def _report(self) -> statistics_table.Report:
        return statistics_table.Report(
            module=self.module or "?",
            rank=self.rank,
            size=self.size,
            transport=self.transport,
            hook=self.hook,
            latest=self.latest,
            total=self.total,
            memory=self.memory,
            waited_for=self.waited_for,
            waited_for_rounds=self.waited_for_rounds,
            corrected_rounds=self.corrected_rounds,
            repaired_rounds=self.repaired_rounds,
            optimizer_in_backward=self.optimizer_in_backward,
            on_host_only=self.on_host_only,
            sparse=len(self._layout.sparse),
        )

    @property
    def _layout(self) -> Layout:
        return NO_LAYOUT if self._event is None else self._event.layout

    # --- what the engine tells -------------------------------------------------------------------

    def hear_waits(self, heard: Heard) -> None:
        """From now on rank 0 tells there who was waited for."""
        self._heard = heard

    def moved_to(self, transport: str, reason: str, rank: int, size: int) -> None:
        self.transport = f"{transport}: {reason}"
        self.rank, self.size = rank, size

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
            self._costs = of_round(event, self._closed_at)
            self._total += self._costs
            self._event, self._closed_at = event, event.closed_at
            for listener in _listeners:
                listener(self)


_listeners: tuple[Callable[[Statistics], None], ...] = ()


def listen(listener: Callable[[Statistics], None]) -> None:
    """From now on it is told of each round of any replica in this process, when its statistics know of it."""
    global _listeners
    _listeners = (*_listeners, listener)


def unlisten(listener: Callable[[Statistics], None]) -> None:
    global _listeners
    _listeners = tuple(one for one in _listeners if one != listener)
