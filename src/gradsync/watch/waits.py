"""What ranks tell each other of their waits: each its own to rank 0, a block of rounds at a time; rank 0 the sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gradsync.watch.wire import Message

MOST_ROUNDS = 64  # of one block
_MODULES = 64  # of which totals are kept; replicas come and go
_MICRO = 1_000_000


class Phases(NamedTuple):
    """Where a rank's time went, in seconds, summed over some rounds."""

    outside: float = 0.0
    """Between rounds: data, optimizer, steps that only accumulate."""
    forward: float = 0.0
    backward: float = 0.0
    all: float = 0.0
    """From the end of one round to that of the next."""

    def plus(self, other: Phases) -> Phases:
        return Phases(*(mine + its for mine, its in zip(self, other, strict=True)))

    def over(self, rounds: int) -> Phases:
        """In the mean."""
        return Phases(*(seconds / rounds for seconds in self))


class Block(NamedTuple):
    """How long one rank waited for the others in each of some consecutive rounds of a module."""

    rank: int
    module: int
    """Its serial number, the same on all ranks."""
    name: str
    first: int
    """The number of the first round."""
    waits: tuple[float, ...]
    phases: Phases

    def pack(self) -> Message:
        waits = [round(_MICRO * seconds) for seconds in self.waits]
        return {"is": "waits", **self._asdict(), "waits": waits, "phases": [round(one, 6) for one in self.phases]}

    @classmethod
    def unpack(cls, message: Message) -> Block:
        waits = tuple(int(one) / _MICRO for one in message["waits"])
        if not 0 < len(waits) <= MOST_ROUNDS:
            raise ValueError(f"a block of {len(waits)} rounds")
        phases = Phases(*map(float, message["phases"]))
        module, name = int(message["module"]), str(message["name"])[:200]
        return cls(int(message["rank"]), module, name, int(message["first"]), waits, phases)


class RoundWait(NamedTuple):
    """In one round the others waited for this rank, so many seconds in the mean over them."""

    round: int
    rank: int
    seconds: float


class Totals(NamedTuple):
    """What all ranks hear from rank 0 about the rounds of one module."""

    rounds: int = 0
    """That all ranks have told of."""
    waited_for: Mapping[int, float] = {}
    """By rank, the worst ones first: seconds that the others waited for it, in the mean over them."""
    latest: tuple[RoundWait, ...] = ()
    """The latest rounds, one after the other."""

    def pack(self, module: int) -> Message:
        return {
            "is": "totals",
            "module": module,
            "rounds": self.rounds,
            "waited_for": [[rank, round(seconds, 6)] for rank, seconds in self.waited_for.items()],
            "latest": [[one.round, one.rank, round(_MICRO * one.seconds)] for one in self.latest],
        }

    @classmethod
    def unpack(cls, message: Message) -> Totals:
        return cls(
            int(message["rounds"]),
            {int(rank): float(seconds) for rank, seconds in message["waited_for"]},
            tuple(RoundWait(int(number), int(rank), int(wait) / _MICRO) for number, rank, wait in message["latest"]),
        )


class Heard:
    """The latest totals of each module, written by the watch's thread and read by anybody."""

    def __init__(self) -> None:
        self._totals: dict[int, Totals] = {}

    def take(self, message: Message) -> None:
        module = int(message["module"])
        self._totals.pop(module, None)
        while len(self._totals) >= _MODULES:
            del self._totals[next(iter(self._totals))]
        self._totals[module] = Totals.unpack(message)

    def of(self, module: int) -> Totals:
        return self._totals.get(module, Totals())
