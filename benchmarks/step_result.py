"""What steps took, and what follows from it: frozen, shown as tables and kept as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.contenders import IN_STEP, PLAIN, TRANSPORTS, WRAPPER, Family
from benchmarks.machine import Machine
from benchmarks.ratios import Spread, fastest, geometric_mean
from benchmarks.targets import Target
from benchmarks.turns import Turns


@dataclass(frozen=True, kw_only=True)
class Race(Turns):
    """One model on one number of ranks."""

    where: str = ""  # if not on one host

    @property
    def measured(self) -> list[str]:
        return [contender.key for contender in IN_STEP if contender.key in self.repetitions[0]]

    def best(self, family: Family) -> str | None:
        """The fastest configuration of a family, all of them counted: what a rival's user could have found out."""
        members = [contender.key for contender in IN_STEP if contender.family == family]
        return fastest(self.repetitions, members, PLAIN.key)

    def to_dict(self) -> dict[str, Any]:
        best = self.best("torch")
        figures = {
            key: {
                "seconds": asdict(self.seconds(key)),
                "to_no_communication": asdict(self.ratio(key, PLAIN.key) or Spread(1, 1, 1)),
                "to_torch_best": None if (to := self.ratio(key, best)) is None else asdict(to),
            }
            for key in self.measured
        }
        return {**asdict(self), "torch_best": best, "mpi_best": self.best("mpi"), "figures": figures}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    races: list[Race]
    seconds: float
    machine: Machine = field(default_factory=Machine)

    def of(self, ranks: int) -> list[Race]:
        return [race for race in self.races if race.ranks == ranks]

    @property
    def ranks(self) -> list[int]:
        return sorted({race.ranks for race in self.races})

    def targets(self) -> dict[int, list[Target]]:
        return {ranks: targets_of(self.of(ranks)) for ranks in self.ranks}

    def to_dict(self) -> dict[str, Any]:
        targets = {ranks: [target.to_dict() for target in them] for ranks, them in self.targets().items()}
        races = [race.to_dict() for race in self.races]
        return {**asdict(self), "races": races, "targets": targets}


def judged(races: Sequence[Race]) -> str:
    """Which of ours the targets are about: the first transport that ran on every model."""
    ran = [key.key for key in TRANSPORTS if all(key.key in race.measured for race in races)]
    return ran[0] if ran else TRANSPORTS[0].key


def mean_ratio(races: Sequence[Race], key: str, family: Family) -> float | None:
    """The geometric mean over the models of the ratio to each model's best of a family; None if any is missing."""
    ratios = [race.ratio(key, race.best(family)) for race in races]
    medians = [one.median for one in ratios if one is not None]
    return geometric_mean(medians) if medians and len(medians) == len(races) else None


def worst_ratio(races: Sequence[Race], key: str, family: Family) -> float | None:
    ratios = [race.ratio(key, race.best(family)) for race in races]
    medians = [one.median for one in ratios if one is not None]
    return max(medians) if medians and len(medians) == len(races) else None


def worst_to_replicate(races: Sequence[Race]) -> float | None:
    """The wrapper to the other front, which the transports are measured with."""
    ratios = [race.ratio(WRAPPER.key, TRANSPORTS[0].key) for race in races]
    medians = [one.median for one in ratios if one is not None]
    return max(medians) if len(medians) == len(races) else None


def targets_of(races: Sequence[Race]) -> list[Target]:
    """Those for the number of ranks of these races. With more ranks than cores another one counts than with two."""
    key = judged(races)
    several = f"{len(races)} model{'s' if len(races) > 1 else ''}"
    to_torch = f"to torch's best, geometric mean of {several}"
    if races[0].ranks > 2:
        return [Target(name=to_torch, value=mean_ratio(races, key, "torch"), limit=0.6)]
    embedding = [race for race in races if race.model == "embedding"]
    return [
        Target(name=to_torch, value=mean_ratio(races, key, "torch"), limit=0.75),
        Target(name="to torch's best, worst model", value=worst_ratio(races, key, "torch"), limit=1.0),
        Target(name="to torch's best, embedding", value=worst_ratio(embedding, key, "torch"), limit=0.5),
        Target(
            name=f"to no communication, geometric mean of {several}",
            value=mean_ratio(races, key, "none"),
            limit=1.15,
        ),
        Target(name="to MPI's best, worst model", value=worst_ratio(races, key, "mpi"), limit=1.0),
        Target(name="gradsync DDP to replicate, worst model", value=worst_to_replicate(races), limit=1.03),
    ]
