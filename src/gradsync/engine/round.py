"""What is known of the round under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from gradsync.engine.delivery import InFlight
from gradsync.engine.identity import Identity
from gradsync.guard.replicas import Fingerprint


class Phase(Enum):
    IDLE = auto()  # between rounds
    OPEN = auto()  # backward runs
    CLOSING = auto()  # backward ended, gradients are being delivered


@dataclass
class Round:
    """One synchronisation, from its first sign to its last gradient delivered."""

    identity: Identity
    opened_at: float
    fingerprint: Fingerprint | None = None
    thread: int = 0  # in which it was opened
    position: int = 0  # how many rounds of other modules this backward had opened before
    second_order: bool = False  # by a backward with `create_graph=True`
    own: set[int] = field(default_factory=set)
    """Parameters whose `.grad` is a tensor of the user's, which has to become the result."""
    saved: dict[int, Tensor] = field(default_factory=dict)
    """For buckets of which somebody still holds a part of what an earlier round left there: what that was."""
    idle: frozenset[int] = frozenset()
    """Buckets that nobody has filled in the round before: they are left out, unless somebody has filled them now."""
    launched: list[InFlight] = field(default_factory=list)
    """A prefix of the plan, and behind all of it those that were left out although somebody has filled them."""
    late: set[int] = field(default_factory=set)
    late_gradients: dict[int, Tensor] = field(default_factory=dict)
    delivered: int = 0  # how many of those launched
    arrived: int = 0  # how many have come home and were found to be of this round
    first_launch_at: float = 0.0
    reduced_at: float = 0.0
    waited: float = 0.0  # seconds
    overlapped: int = 0
    corrected: bool = False
