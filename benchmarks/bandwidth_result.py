"""What moving one buffer took, and what follows from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.machine import Machine
from benchmarks.ratios import Spread, ratio, spread
from benchmarks.targets import Target

COPY, GLOO, MPI = "copy", "gloo", "mpi"
TRANSPORTS = ("shared_memory", "hierarchical", "process_group")
CARRIERS = (COPY, GLOO, MPI, *TRANSPORTS)
NAMES = {COPY: "copy within each rank: the limit", GLOO: "gloo all_reduce", MPI: "MPI Allreduce"} | {
    key: f"gradsync, {key.replace('_', ' ')}" for key in TRANSPORTS
}
JUDGED_MB = 32


@dataclass(frozen=True, kw_only=True)
class Track:
    """One size of buffer."""

    size_mb: int
    repetitions: list[dict[str, float]]  # carrier -> seconds on the slowest rank

    def seconds(self, key: str) -> Spread | None:
        return spread([times[key] for times in self.repetitions]) if key in self.repetitions[0] else None

    def bandwidth(self, key: str) -> float | None:
        """GB of the buffer a second, however often its bytes are moved to get there."""
        seconds = self.seconds(key)
        return None if seconds is None else self.size_mb * 1024 * 1024 / seconds.median / 1e9

    def speed(self, key: str, to: str) -> Spread | None:
        """How many times as fast as another one."""
        if not {key, to} <= self.repetitions[0].keys():
            return None
        return ratio(self.repetitions, to, key)

    def to_dict(self) -> dict[str, Any]:
        figures = {
            key: {
                "gb_per_second": self.bandwidth(key),
                "to_gloo": asdict(speed) if (speed := self.speed(key, GLOO)) else None,
                "to_copy": asdict(speed) if (speed := self.speed(key, COPY)) else None,
            }
            for key in self.repetitions[0]
        }
        return {**asdict(self), "figures": figures}


@dataclass(frozen=True, kw_only=True)
class BandwidthResult:
    ranks: int
    tracks: list[Track]
    absent: dict[str, str]
    machine: Machine = field(default_factory=Machine)

    def targets(self) -> list[Target]:
        """For shared memory, at the size at which the caches no longer help."""
        track = next((track for track in self.tracks if track.size_mb == JUDGED_MB), None)
        to_gloo, to_copy = (track and track.speed(TRANSPORTS[0], to) for to in (GLOO, COPY))
        return [
            Target(
                name=f"shared memory, {JUDGED_MB} MB, times gloo's bandwidth",
                value=to_gloo.median if to_gloo else None,
                limit=5,
                at_least=True,
            ),
            Target(
                name=f"shared memory, {JUDGED_MB} MB, part of the copy limit",
                value=to_copy.median if to_copy else None,
                limit=0.5,
                at_least=True,
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        tracks = [track.to_dict() for track in self.tracks]
        targets = [target.to_dict() for target in self.targets()]
        return {**asdict(self), "tracks": tracks, "targets": targets}
