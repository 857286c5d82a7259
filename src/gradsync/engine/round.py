"""What is known of the round under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from gradsync.engine.delivery import InFlight


class Phase(Enum):
    IDLE = auto()  # between rounds
    OPEN = auto()  # backward runs
    CLOSING = auto()  # backward ended, gradients are being delivered


@dataclass
class Round:
    """One synchronisation, from its first sign to its last gradient delivered."""

    number: int
    opened_at: float
    launched: list[InFlight] = field(default_factory=list)  # a prefix of the plan
    late: set[int] = field(default_factory=set)
    late_gradients: dict[int, Tensor] = field(default_factory=dict)
    delivered: int = 0  # how many of those launched
    first_launch_at: float = 0.0
    reduced_at: float = 0.0
    waited: float = 0.0  # seconds
    overlapped: int = 0
    shadow: bool = False  # on a rank without data
    corrected: bool = False
