"""What having gradsync costs beside its steps: memory, and time at the start."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.contenders import REPLICATE, TORCH_VIEWS, TRANSPORTS
from benchmarks.machine import Machine
from benchmarks.ratios import Spread
from benchmarks.targets import Target


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Memory of one contender in MiB, the mean over the ranks."""

    contender: str
    parameters: int
    start_mib: float  # construction and first steps
    steady_mib: float  # the steps after them
    proportional_mib: float  # with memory that ranks share divided among them


@dataclass(frozen=True, kw_only=True)
class Making:
    """Seconds to make replicas of the GPT, beyond the broadcast of its values; on the slowest rank."""

    contender: str
    first: Spread  # in a process
    later: Spread | None


@dataclass(frozen=True, kw_only=True)
class FootprintResult:
    ranks: int
    importing: Spread | None  # seconds of `import gradsync` after `import torch`
    makings: list[Making]
    peaks: list[Peak]
    absent: dict[str, str]
    machine: Machine = field(default_factory=Machine)

    def peak(self, key: str) -> Peak | None:
        return next((peak for peak in self.peaks if peak.contender == key), None)

    def targets(self) -> list[Target]:
        """Memory is judged for the fastest transport that is there."""
        ours = next((peak for transport in TRANSPORTS if (peak := self.peak(transport.key))), None)
        theirs = self.peak(TORCH_VIEWS.key)
        made = next((making for making in self.makings if making.contender == REPLICATE.key), None)
        both = (ours, theirs) if ours and theirs else None
        which = f"memory to torch DDP's with views, {(ours.contender if ours else 'gradsync').replace('_', ' ')}"
        return [
            Target(name=f"{which}, peak", value=both and both[0].steady_mib / both[1].steady_mib, limit=1.0),
            Target(
                name=f"{which}, shared divided",
                value=both and both[0].proportional_mib / both[1].proportional_mib,
                limit=1.0,
            ),
            _milliseconds("replicate(GPT) beyond the broadcast, first time", made.first if made else None, 100),
            _milliseconds("import gradsync, beyond torch's", self.importing, 50),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "targets": [target.to_dict() for target in self.targets()]}


def _milliseconds(name: str, seconds: Spread | None, limit: float) -> Target:
    return Target(name=name, value=1e3 * seconds.median if seconds else None, limit=limit, unit=" ms")
