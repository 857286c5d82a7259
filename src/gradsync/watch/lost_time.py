"""Who is waited for, and how long, in the rounds of one module. Pure: blocks in, totals and a straggler out.

All ranks end a round at about the same time, so the one that waited least was the last to come. What the others waited
beyond that, they waited for it.

    rank 0   compute      |  waits 5          |
    rank 1   compute        |  waits 4        |     they waited for rank 2: (5 - 1 + 4 - 1) / 2 = 3.5
    rank 2   compute ............   | waits 1 |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gradsync.watch.straggler import Straggler
from gradsync.watch.waits import MOST_ROUNDS, Block, Phases, RoundWait, Totals

# Over so many rounds and seconds at least, a rank is slow ...
MIN_ROUNDS, MIN_SECONDS = 128, 10.0
# ... if it is the last to come in most rounds, and costs the others so much of their time.
MOST, MUCH = 0.75, 0.1
# Rounds of which some ranks have yet to tell. A rank that never tells must not pile up the others'.
MOST_OPEN = 512
_WORST = 16  # ranks in totals


@dataclass
class _Open:
    """A round of which some ranks have told."""

    ranks: int = 0
    total: float = 0.0
    least: float = float("inf")
    last: int = -1
    """The rank that waited least."""

    def add(self, rank: int, waited: float) -> None:
        self.ranks += 1
        self.total += waited
        if waited < self.least:
            self.least, self.last = waited, rank


@dataclass
class _Window:
    """Some rounds that are judged together."""

    rounds: int = 0
    slowest: dict[int, int] = field(default_factory=dict)
    waited_for: dict[int, float] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    """Of how many rounds each rank has told, and ..."""
    phases: dict[int, Phases] = field(default_factory=dict)
    """... where its time went in these."""

    def add_phases(self, block: Block) -> None:
        self.told[block.rank] = self.told.get(block.rank, 0) + len(block.waits)
        self.phases[block.rank] = self.phases.get(block.rank, Phases()).plus(block.phases)

    def close(self, rank: int, seconds: float) -> None:
        self.rounds += 1
        if seconds > 0:
            self.slowest[rank] = self.slowest.get(rank, 0) + 1
            self.waited_for[rank] = self.waited_for.get(rank, 0.0) + seconds

    @property
    def elapsed(self) -> float:
        return self.rounds * sum(one.all for one in self.phases.values()) / max(sum(self.told.values()), 1)

    def straggler(self, module: str) -> Straggler | None:
        if not self.waited_for:
            return None
        rank = max(self.waited_for, key=lambda one: self.waited_for[one])
        slowest, seconds, elapsed = self.slowest[rank], self.waited_for[rank], self.elapsed
        means = {one: phases.over(self.told[one]) for one, phases in self.phases.items()}
        its = means.pop(rank, None)
        if its is None or not means or slowest < MOST * self.rounds or seconds < MUCH * elapsed:
            return None
        others = Phases(*map(median, zip(*means.values(), strict=True)))
        all_waits = sum(self.waited_for.values())
        return Straggler(rank, module, slowest, self.rounds, seconds, elapsed, all_waits, its, others)


class LostTime:
    """Rank 0's account of one module."""

    def __init__(self, size: int) -> None:
        """`size`: how many ranks there are, at least 2."""
        self._size = size
        self._open: dict[int, _Open] = {}
        self._window = _Window()
        self._name = ""
        self._rounds = 0
        self._waited_for: dict[int, float] = {}
        self._latest: deque[RoundWait] = deque(maxlen=MOST_ROUNDS)

    def add(self, block: Block) -> None:
        """A rank tells of some rounds, each once."""
        self._name = block.name
        self._window.add_phases(block)
        for number, waited in enumerate(block.waits, block.first):
            one = self._open.setdefault(number, _Open())
            one.add(block.rank, waited)
            if one.ranks >= self._size:
                self._close(number, self._open.pop(number))
        while len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _close(self, number: int, one: _Open) -> None:
        """All ranks have told of this round."""
        seconds = (one.total - self._size * one.least) / (self._size - 1)
        self._rounds += 1
        self._waited_for[one.last] = self._waited_for.get(one.last, 0.0) + seconds
        self._latest.append(RoundWait(number, one.last, seconds))
        self._window.close(one.last, seconds)

    @property
    def rounds(self) -> int:
        """Of which all ranks have told."""
        return self._rounds

    def totals(self) -> Totals:
        worst = sorted(self._waited_for.items(), key=lambda one: (-one[1], one[0]))[:_WORST]
        return Totals(self._rounds, dict(worst), tuple(self._latest))

    def judge(self) -> Straggler | None:
        """The rank that was slow over the latest rounds, if there are enough to say so; then begins anew."""
        window = self._window
        if window.rounds < MIN_ROUNDS or window.elapsed < MIN_SECONDS:
            return None
        self._window = _Window()
        return window.straggler(self._name)
