"""What can happen to a rank of an elastic training, and which faults a seed stands for. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from random import Random
from typing import Any


class Kind(Enum):
    KILL = "killed"
    RAISE = "raises"
    EXIT = "exits"
    STOP = "stops for a while"
    LAUNCHER = "its launcher is killed"
    HOST = "its host is killed"
    ALL = "all ranks of its host are killed"

    @property
    def is_loss(self) -> bool:
        return self is not Kind.STOP

    @property
    def needs_hosts(self) -> bool:
        return self in (Kind.LAUNCHER, Kind.HOST)

    @property
    def is_of_host(self) -> bool:
        return self.needs_hosts or self is Kind.ALL


class Phase(Enum):
    BETWEEN = "between steps"
    BEGIN = "before the shards"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    REDUCED = "after backward"
    OPTIMIZER = "in the optimizer's step"
    STEPPED = "after the optimizer's step"
    MEETING = "while a group is made"
    TRANSFER = "while state is sent"
    JOINING = "while it starts"
    ANY = "at any moment"

    @property
    def is_in_step(self) -> bool:
        return self in STEP_PHASES


STEP_PHASES = (
    Phase.BETWEEN,
    Phase.BEGIN,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.REDUCED,
    Phase.OPTIMIZER,
    Phase.STEPPED,
)
# When the group of an epoch is made, or state is sent, only after another loss.
FOLLOWING = (Phase.MEETING, Phase.TRANSFER, Phase.JOINING)
_PARTS = 3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Happens once: to whoever is in this slot of this host, when it is there and `after` others have happened."""

    number: int
    kind: Kind
    phase: Phase
    slot: int = 0
    host: int = 0
    after: int = 0
    """All faults with lower numbers than this must have happened."""
    ranks: int = 0
    """So many must train, for as many steps as `wait` says."""
    wait: int = 0
    part: int = 0
    """Of the phase. Forward and backward: in the first or the last shard. State: after its head, its first tensors, all
    of it. A group: before, a little later, after. Starting: at the beginning, before it says it is there, later."""
    seconds: float = 0.0
    """How long a stop lasts; how much later it comes, if it is timed."""

    @property
    def is_outside(self) -> bool:
        """Not the rank does it, but the proof."""
        return self.phase is Phase.ANY

    @property
    def is_timed(self) -> bool:
        """Comes so many seconds behind its place."""
        return (self.phase, self.part) in ((Phase.MEETING, 1), (Phase.JOINING, 2))

    def __str__(self) -> str:
        return f"{self.number}: host {self.host} slot {self.slot} {self.kind.value} {self.phase.value}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "phase": self.phase.value}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Fault:
        return cls(**{**record, "kind": Kind(record["kind"]), "phase": Phase(record["phase"])})


def draw(dice: Random, count: int, hosts: int, slots: int) -> list[Fault]:
    """So many faults for a job, one after the other."""
    drawn: list[Fault] = []
    while len(drawn) < count:
        drawn.append(_one(dice, drawn, hosts, slots))
    return drawn


def _one(dice: Random, before: Sequence[Fault], hosts: int, slots: int) -> Fault:
    number, most = len(before), hosts * slots
    host, slot = dice.randrange(hosts), dice.randrange(slots)
    latest = before[-1] if before else None
    if latest is not None and latest.kind.is_loss and not latest.kind.is_of_host and dice.random() < 0.35:
        phase = dice.choice(FOLLOWING)
        if phase is Phase.JOINING:
            host, slot = latest.host, latest.slot
        part = dice.randrange(_PARTS)
        fault = Fault(number=number, kind=Kind.KILL, phase=phase, slot=slot, host=host, after=number, part=part)
        if fault.is_timed:
            return replace(fault, seconds=dice.uniform(0.0, 0.1 if phase is Phase.MEETING else 1.5))
        kind = dice.choice([Kind.KILL, Kind.KILL, Kind.STOP, Kind.RAISE])
        return replace(fault, kind=kind, seconds=dice.uniform(0.1, 1.5))
    # Sometimes the next one comes before who was lost is back.
    ranks = dice.choice([most, most, most - 1, 2]) if latest is not None else most
    common: Any = {"number": number, "after": number, "ranks": max(2, ranks), "wait": dice.randint(0, 5)}
    if dice.random() < (0.15 if hosts > 1 else 0.03):
        kind = dice.choice([Kind.HOST, Kind.LAUNCHER, Kind.ALL]) if hosts > 1 else Kind.ALL
        return Fault(kind=kind, phase=Phase.ANY, host=hosts - 1, seconds=dice.uniform(0.0, 0.2), **common)
    if dice.random() < 0.2:
        return Fault(kind=Kind.KILL, phase=Phase.ANY, slot=slot, host=host, seconds=dice.uniform(0.0, 0.2), **common)
    kind = dice.choices([Kind.KILL, Kind.RAISE, Kind.EXIT, Kind.STOP], [6, 2, 1, 1])[0]
    phase = dice.choice(STEP_PHASES)
    part = dice.randrange(2) if phase in (Phase.FORWARD, Phase.BACKWARD) else 0
    return Fault(kind=kind, phase=phase, slot=slot, host=host, part=part, seconds=dice.uniform(0.1, 1.5), **common)
