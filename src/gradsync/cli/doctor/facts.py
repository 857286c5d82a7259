"""What was seen, as plain values: of each rank's process and host, and of the ranks' attempt to work together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradsync.cli.display import count

# What a rank has reached, in this order.
STAGES = COME, STARTED, MET, CONNECTED, SHARED, MEASURED, CHOSEN, DONE = (
    "has come",
    "loaded torch",
    "reached the store",
    "connected by gloo",
    "tried shared memory",
    "measured the process group",
    "chose a transport",
    "done",
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One rank's process, and the host it is on. Sizes in bytes; None where there is no limit, or no such thing."""

    rank: int = 0
    host: str = "here"
    """Its name."""
    location: str = "boot/net:[1]"
    """The running kernel and the network namespace: the same on ranks that can share memory."""
    user: int = 0
    gradsync: str = ""
    torch: str = ""
    python: str = ""
    machine: str = "x86_64"
    backends: tuple[str, ...] = ("gloo",)
    """That this build of torch has; none: it has no torch.distributed."""
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = (0,)
    """That this process may use."""
    quota: float | None = None
    """Cores' worth of time that the container may use."""
    threads: int = 1
    """That torch computes with in this process."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, those that matter."""
    load: float = 0.0
    """Processes that want to run, in the mean of the last minute."""
    open_files: int | None = None
    locked_memory: int | None = None
    has_rdma: bool = False
    memory: int = 0
    memory_free: int = 0
    container_memory: int | None = None
    container_free: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    overcommit: int = 0
    commit_left: int = 0
    address: str = ""
    """That the host's name stands for; "" for none."""
    interfaces: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Facts:
        read: dict[str, Any] = json.loads(line)
        lists = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
        return cls(**{**read, **lists})


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of an all-reduce: the size of the buffer by the time that it took."""

    ranks: tuple[int, ...]
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How far one rank has come with the others."""

    stage: str = DONE
    error: str = ""
    end: str = ""
    """How its process ended, if not well."""
    unshared: str | None = None
    """Why it shares no memory with the other ranks of its host; "" if it does; None if it was not tried."""
    shared_speed: Speed | None = None
    group_speed: Speed | None = None
    transport: str = ""
    reason: str = ""
    descriptors: int = 0
    """Open at the end."""
    skew: float | None = None
    """Seconds that this host's clock is ahead of rank 0's."""
    skew_error: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Attempt:
        return cls.from_record(json.loads(line))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Attempt:
        speeds = {
            name: Speed(ranks=tuple(given["ranks"]), bytes_per_second=given["bytes_per_second"])
            for name in ("shared_speed", "group_speed")
            if (given := record.get(name))
        }
        return cls(**{**record, **speeds})


@dataclass(frozen=True, kw_only=True)
class Job:
    """All ranks, as far as they have answered."""

    size: int
    limit: float
    """Seconds that each was given."""
    is_launched: bool = False
    """By torchrun, srun or mpirun; else the ranks are the doctor's own, on this machine."""
    meeting: str = ""
    """Where the ranks meet, as host:port."""
    facts: Mapping[int, Facts] = field(default_factory=dict)
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    """None of any rank if not all have come."""
    launcher_problem: str = ""
    """What is wrong with what the launcher says, if something is."""

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks that have answered by where they are, in the order of the lowest."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.facts):
            found.setdefault(self.facts[rank].location, []).append(rank)
        return list(found.values())

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.facts]

    def first_facts(self) -> Iterator[tuple[Facts, list[int]]]:
        """For each host those of its first rank, and its ranks."""
        for ranks in self.hosts:
            yield self.facts[ranks[0]], ranks

    def host_name(self, rank: int) -> str:
        """Of the host it is on. Containers may all have the same: then with its lowest rank."""
        mine, first = self.facts[rank], {self.facts[ranks[0]].location: ranks[0] for ranks in self.hosts}
        alike = {one.location for one in self.facts.values() if one.host == mine.host}
        return mine.host if len(alike) == 1 else f"{mine.host} (of rank {first[mine.location]})"

    def name_of(self, rank: int) -> str:
        """With its host, if there are several."""
        several = len(self.hosts) > 1 and rank in self.facts
        return f"rank {rank} on {self.host_name(rank)}" if several else f"rank {rank}"


def amount(nbytes: float) -> str:
    """In a unit that people read; powers of 1024, as limits are set."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def rank_list(ranks: list[int]) -> str:
    """`3 ranks (0, 1, 5)`."""
    return f"{count(len(ranks), 'rank')} ({', '.join(map(str, ranks))})"
