"""What was seen of a fault: how each rank ended, and what was left behind. Plain values, which travel as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one rank."""

    rank: int
    status: int | None
    """Its exit code, or minus a signal; None: it hung, and was killed for that."""
    finished: str = ""
    """The fingerprint of its parameters, if it came to the end of training."""
    error: str = ""
    """The type of what it raised,"""
    text: str = ""
    blamed: tuple[int, ...] = ()
    at: float = 0.0
    """and when, on the clock that all processes of this machine have in common."""
    left: tuple[str, ...] = ()
    """Threads, descriptors and memory that it still had when all was deleted."""
    output: str = ""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Outcome:
        return cls(**{**record, "blamed": tuple(record["blamed"]), "left": tuple(record["left"])})


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Of all of them, and of what was around them."""

    outcomes: tuple[Outcome, ...]
    fault_at: float | None
    """When it happened; None: it did not."""
    left: tuple[str, ...] = ()
    """Processes and files."""
    crowding: float = 1.0
    """How many processes wanted each core: by so much everything took longer than on an idle machine."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Observation:
        outcomes = tuple(map(Outcome.from_json, record["outcomes"]))
        return cls(**{**record, "outcomes": outcomes, "left": tuple(record["left"])})
