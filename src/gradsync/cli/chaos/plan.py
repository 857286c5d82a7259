"""Which faults a seed stands for: a pure function, so that any of them can be had again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from gradsync.cli.chaos.fault import BUCKETS, FRONTS, LAST_STEP, TRANSPORTS, Fault, Kind, Phase

# In each 30 faults. A cut takes ten seconds, who is stuck five, all others one or two.
_OFTEN = {
    Kind.KILL: 8,
    Kind.RAISE: 5,
    Kind.EXIT: 2,
    Kind.END: 3,
    Kind.STOP: 3,
    Kind.SLOW: 2,
    Kind.FLAP: 3,
    Kind.CUT: 1,
    Kind.HALT: 1,
    Kind.LOOP: 1,
    Kind.LOCK: 1,
}
_PHASES: dict[Kind, tuple[Phase, ...]] = {Kind.END: (Phase.LOADING,)}
_LONGEST_DELAY = 0.06  # seconds: as long as the making of a replica, or ten steps
_LASTING = {Kind.STOP: (0.1, 1.2), Kind.SLOW: (0.1, 1.2), Kind.FLAP: (0.1, 2.5)}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Among what to draw."""

    transports: tuple[str, ...] = TRANSPORTS
    fewest: int = 2
    most: int = 4
    hosts: bool = True
    """Whether there are two of them, to be cut off from each other."""

    @property
    def is_between_hosts(self) -> bool:
        return self.hosts and any(_fits_hosts(transport, self.most) for transport in self.transports)


def faults(seed: int, choices: Choices) -> Iterator[Fault]:
    """Without end. Kinds come as often as `_OFTEN` says in each 30, in an order of their own."""
    kinds = [kind for kind, often in _OFTEN.items() for _ in range(often)]
    if not choices.is_between_hosts:
        kinds = [kind for kind in kinds if not kind.needs_hosts]
    block = 0
    while True:
        dice = Random(f"{seed}/{block}")
        dice.shuffle(kinds)
        for number, kind in enumerate(kinds):
            yield _draw(Random(f"{seed}/{block}/{number}"), kind, choices)
        block += 1


def _draw(dice: Random, kind: Kind, choices: Choices) -> Fault:
    ranks = dice.randint(choices.fewest, choices.most)
    transport, hosts = _place(dice, kind, choices, ranks)
    if transport == "hierarchical" and hosts == 2:
        ranks = max(ranks, 3)
    phase = dice.choice(_PHASES.get(kind, tuple(Phase)))
    # Half of those that can come at any moment do.
    delay = dice.uniform(0.0, _LONGEST_DELAY) if kind.may_come_late and dice.random() < 0.5 else 0.0
    rank, halts_start = dice.randrange(ranks), kind is Kind.HALT and phase is Phase.CONSTRUCTION
    return Fault(
        kind=kind,
        rank=rank,
        phase=phase,
        transport=transport,
        ranks=ranks,
        hosts=hosts,
        front=dice.choice(FRONTS),
        step=0 if phase is Phase.CONSTRUCTION else dice.randint(0, LAST_STEP),
        bucket=dice.randrange(BUCKETS) if phase is Phase.BACKWARD else 0,
        after=phase is Phase.BACKWARD and dice.random() < 0.5,
        delay=0.0 if halts_start else round(delay, 4),
        seconds=round(dice.uniform(*_LASTING[kind]), 2) if kind in _LASTING else 0.0,
        store_in_rank_0=dice.random() < 0.3 and not (halts_start and rank == 0),
        caught=dice.random() < 0.7,
    )


def _place(dice: Random, kind: Kind, choices: Choices, ranks: int) -> tuple[str, int]:
    """The transport, and on how many hosts."""
    if kind.needs_hosts:
        fitting = [one for one in choices.transports if _fits_hosts(one, choices.most)]
        return dice.choice(fitting), 2
    transport = dice.choice(choices.transports)
    between = choices.hosts and _fits_hosts(transport, choices.most) and dice.random() < 0.4
    return transport, 2 if between else 1


def _fits_hosts(transport: str, most: int) -> bool:
    """Whether there is one that works between two hosts, with so many ranks at most."""
    return transport == "process_group" or (transport == "hierarchical" and most > 2)
