"""What steps with an optimizer took, what they keep in memory, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine
from benchmarks.ratios import Spread, geometric_mean
from benchmarks.sharing_contenders import ALL, JUDGED, MPI_REDUCER, NO_COMMUNICATION, ONE_PROCESS, UNSHARED, ZERO
from benchmarks.targets import Target
from benchmarks.turns import Turns

# By optimizer and ranks, to no communication: the geometric mean, and limits of single models; "" is all of them.
MEANS = {
    ("adamw", 2): 0.8,
    ("adamw", 4): 0.65,
    ("fused", 2): 1.0,
    ("fused", 4): 0.85,
    ("sgd", 2): 1.02,
    ("sgd", 4): 0.9,
}
WORST = {("adamw", 2): ("", 1.0), ("fused", 2): ("mlp", 1.05)}
MEMORY = {2: 0.55, 4: 0.35}
MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SharingRace(Turns):
    """One optimizer, one model, one number of ranks."""

    optimizer: str

    @property
    def measured(self) -> list[str]:
        return [one.key for one in ALL if one.key in self.repetitions[0]]

    def to_dict(self) -> dict[str, Any]:
        figures = {
            key: {
                "seconds": asdict(self.seconds(key)),
                "to_no_communication": asdict(self.ratio(key, NO_COMMUNICATION.key) or Spread(1, 1, 1)),
            }
            for key in self.measured
        }
        return {**asdict(self), "figures": figures}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of the host: the sum over the ranks of what training takes beyond what was there before the model."""

    ranks: int
    contender: str
    bytes: int

    @property
    def mib(self) -> float:
        return self.bytes / MIB


@dataclass(frozen=True, kw_only=True)
class SharingResult:
    races: list[SharingRace]
    memories: list[Memory]
    seconds: float
    load: tuple[float, float]
    """Processes that wanted a core, ours among them, in the minute before the beginning and before the end."""
    machine: Machine = field(default_factory=Machine)

    @property
    def fields(self) -> list[tuple[int, str]]:
        """Ranks and optimizer, in the order in which they are shown."""
        return list(dict.fromkeys((race.ranks, race.optimizer) for race in self.races))

    def of(self, ranks: int, optimizer: str) -> list[SharingRace]:
        return [race for race in self.races if (race.ranks, race.optimizer) == (ranks, optimizer)]

    def weighed(self, ranks: int) -> dict[str, Memory]:
        return {memory.contender: memory for memory in self.memories if memory.ranks == ranks}

    @property
    def ranks_weighed(self) -> list[int]:
        return sorted({memory.ranks for memory in self.memories})

    def to_dict(self) -> dict[str, Any]:
        targets = [
            {"ranks": ranks, "optimizer": optimizer, "targets": [one.to_dict() for one in targets_of(self.of(*which))]}
            for which in self.fields
            for ranks, optimizer in [which]
        ]
        memory = {n: [target.to_dict() for target in memory_targets(self.weighed(n), n)] for n in self.ranks_weighed}
        races = [race.to_dict() for race in self.races]
        return {**asdict(self), "races": races, "targets": targets, "memory_targets": memory}


def mean_ratio(races: Sequence[SharingRace], key: str, to: str) -> float | None:
    """The geometric mean over the models; None if any is missing."""
    medians = _medians(races, key, to)
    return geometric_mean(medians) if medians else None


def worst_ratio(races: Sequence[SharingRace], key: str, to: str) -> float | None:
    return max(_medians(races, key, to), default=None)


def _medians(races: Sequence[SharingRace], key: str, to: str) -> list[float]:
    ratios = [race.ratio(key, to) for race in races]
    medians = [one.median for one in ratios if one is not None]
    return medians if len(medians) == len(races) else []


def better(races: Sequence[SharingRace]) -> str | None:
    """Of the two ways to share, by the mean to no communication."""
    means = {one.key: mean_ratio(races, one.key, NO_COMMUNICATION.key) for one in JUDGED}
    known = {key: mean for key, mean in means.items() if mean is not None}
    return min(known, key=lambda key: known[key], default=None)


def targets_of(races: Sequence[SharingRace]) -> list[Target]:
    """Of one optimizer and number of ranks, for each of the two ways."""
    return [target for one in JUDGED for target in _targets(races, one.key, one.name.removeprefix("gradsync, "))]


def _targets(races: Sequence[SharingRace], key: str, name: str) -> Iterator[Target]:
    which, several = (races[0].optimizer, races[0].ranks), f"{len(races)} model{'s' if len(races) > 1 else ''}"
    plain = NO_COMMUNICATION.key
    if which in MEANS:
        mean = mean_ratio(races, key, plain)
        yield Target(name=f"{name}, geometric mean of {several}", value=mean, limit=MEANS[which])
    if which in WORST:
        model, limit = WORST[which]
        worst = worst_ratio([race for race in races if race.model == model or not model], key, plain)
        yield Target(name=f"{name}, {model.upper() or 'worst model'}", value=worst, limit=limit)
    gpt = [race for race in races if race.model == "gpt"]
    yield Target(name=f"{name}, to one process, GPT", value=worst_ratio(gpt, key, ONE_PROCESS.key), limit=1.0)
    for rival, called in ((ZERO, "torch DDP + ZeRO"), (MPI_REDUCER, "MPI")):
        worst = worst_ratio(races, key, rival.key)
        yield Target(name=f"{name}, to {called}, worst model", value=worst, limit=1.0)


def memory_targets(weighed: dict[str, Memory], ranks: int) -> list[Target]:
    """To a copy a rank, which is today's."""
    today = weighed.get(UNSHARED.key)
    return [
        Target(
            name=f"memory, {one.name.removeprefix('gradsync, ')}, to a copy a rank",
            value=found.bytes / today.bytes if (found := weighed.get(one.key)) and today else None,
            limit=MEMORY[ranks],
        )
        for one in JUDGED
        if ranks in MEMORY
    ]
