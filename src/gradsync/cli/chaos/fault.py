"""One fault: what happens to which rank, when, and among whom. Drawn, shown, run and judged as this one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

BUCKETS = 10  # of the model in script.py, where each parameter has one
LAST_STEP = 4  # with a fault
STEPS, STEPS_WITH_DELAY = 8, 60  # of a training: the others need some more to notice, or have to be still at it
TRANSPORTS = ("shared_memory", "process_group", "hierarchical")
FRONTS = ("replicate", "DistributedDataParallel")


class Kind(Enum):
    KILL = "kill"
    EXIT = "exit"  # `os._exit`
    RAISE = "raise"
    END = "end"  # of the script, in good order, before the others
    STOP = "stop"  # SIGSTOP, and SIGCONT
    HALT = "halt"  # SIGSTOP, and nothing more
    LOOP = "loop"  # without end
    LOCK = "lock"  # Python's, held without end by code in C
    SLOW = "slow"
    CUT = "cut"  # the link of its host goes down
    FLAP = "flap"  # and up again

    @property
    def is_loss(self) -> bool:
        """Whether nobody can go on."""
        return self in (Kind.KILL, Kind.EXIT, Kind.RAISE, Kind.END, Kind.CUT)

    @property
    def is_stuck(self) -> bool:
        """Whether the rank is there, and never comes: the others end at the limit of the group."""
        return self in (Kind.HALT, Kind.LOOP, Kind.LOCK)

    @property
    def needs_hosts(self) -> bool:
        return self in (Kind.CUT, Kind.FLAP)

    @property
    def may_come_late(self) -> bool:
        """Whether it can happen at any moment, whatever the rank does then, and not only where the script says so."""
        return self in (Kind.KILL, Kind.STOP, Kind.HALT, Kind.CUT, Kind.FLAP)


class Phase(Enum):
    CONSTRUCTION = "construction"
    LOADING = "loading"  # between steps
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"  # of the optimizer
    EVALUATION = "evaluation"


class BadFault(ValueError):
    """There can be no such fault; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: Kind
    rank: int
    phase: Phase
    transport: str
    ranks: int
    hosts: int = 1
    front: str = "replicate"
    step: int = 0
    bucket: int = 0
    """In backward: which gradient has arrived, and with it which bucket is complete."""
    after: bool = False
    """In backward: whether that bucket has left."""
    delay: float = 0.0
    """Seconds between that point and the fault, in which the rank goes on; 0: exactly there."""
    seconds: float = 0.0
    """How long a stop, a slowness or a flap lasts."""
    store_in_rank_0: bool = False
    """Else in a process of its own, as torchrun has it."""
    caught: bool = True
    """Whether the others catch the error, and clean up; else it ends them."""

    def __post_init__(self) -> None:
        is_construction = self.phase is Phase.CONSTRUCTION
        for complaint, is_so in (
            (f"{self.transport} is no transport: {', '.join(TRANSPORTS)}", self.transport not in TRANSPORTS),
            (f"{self.front} is no front: {', '.join(FRONTS)}", self.front not in FRONTS),
            (f"there is no rank {self.rank} of {self.ranks}", not 0 <= self.rank < self.ranks),
            ("ranks must be 2 or more", self.ranks < 2),
            ("hosts must be 1 or 2", self.hosts not in (1, 2)),
            (f"step must be 0 to {LAST_STEP}", not 0 <= self.step <= LAST_STEP),
            (f"bucket must be 0 to {BUCKETS - 1}", not 0 <= self.bucket < BUCKETS),
            ("no time can be negative", min(self.delay, self.seconds) < 0),
            (f"{self.kind.value} needs hosts=2", self.kind.needs_hosts and self.hosts != 2),
            ("shared memory ends at a host", self.transport == "shared_memory" and self.hosts != 1),
            ("no host has two ranks", self.transport == "hierarchical" and self.hosts == self.ranks),
            ("a script ends between steps", self.kind is Kind.END and self.phase is not Phase.LOADING),
            (f"{self.kind.value} can't be delayed", self.delay > 0 and not self.kind.may_come_late),
            # Where connections are being made, each has a limit of its own, and whoever runs into it says what it was.
            ("halt can't be delayed in construction", self.kind is Kind.HALT and self.delay > 0 and is_construction),
            ("a store that is halted tells nobody anything", self._halts_store and is_construction),
        ):
            if is_so:
                raise BadFault(complaint)

    @property
    def _halts_store(self) -> bool:
        return self.kind is Kind.HALT and self.rank == 0 and self.store_in_rank_0

    @property
    def steps(self) -> int:
        """Of the training."""
        return STEPS_WITH_DELAY if self.delay else STEPS

    def host_of(self, rank: int) -> int:
        """Neighbors share a host."""
        return rank * self.hosts // self.ranks

    def __str__(self) -> str:
        """One line, which `parse` reads. What is as usual is left out."""
        words = [self.kind.value]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_written(value)}")
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "phase": self.phase.value}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Fault:
        return cls(**{**record, "kind": Kind(record["kind"]), "phase": Phase(record["phase"])})


def _written(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


_READ: dict[str, Callable[[str], Any]] = {
    "Kind": Kind,
    "Phase": Phase,
    "str": str,
    "int": int,
    "float": float,
    "bool": {"yes": True, "no": False}.get,
}


def parse(line: str) -> Fault:
    """The fault that a line describes. Raises `BadFault`."""
    kind, *words = line.split() or [""]
    known = {field.name: str(field.type) for field in fields(Fault)}
    found: dict[str, Any] = {}
    for name, equals, text in (word.partition("=") for word in [f"kind={kind}", *words]):
        if name not in known or not equals:
            raise BadFault(f"{name!r} is nothing that a fault has: {', '.join(known)}")
        try:
            found[name] = _READ[known[name]](text)
        except ValueError:
            found[name] = None
        if found[name] is None:
            raise BadFault(f"{name} can't be {text!r}")
    missing = {"rank", "phase", "transport", "ranks"} - found.keys()
    if missing:
        raise BadFault(f"what is missing: {', '.join(sorted(missing))}")
    return Fault(**found)
