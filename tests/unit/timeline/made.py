"""Recordings made up for tests: every time is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradsync.events import BACKWARD, FORWARD, OPTIMIZER, BucketTimes, RoundClosed, Traffic
from gradsync.observe.timeline.recording import BucketContents, ModuleRecord, PhaseSpan, RankRecord, Recording, shifted

MIB = 1024 * 1024


@dataclass(frozen=True)
class Made:
    """Steps in milliseconds, of ranks that differ only as is said here."""

    ranks: int = 2
    rounds: int = 4
    first_round: int = 20
    data: float = 1.0
    forward: float = 10.0
    loss: float = 0.5
    backward: float = 20.0
    ready: Sequence[float] = (5.0, 10.0, 15.0, 20.0)
    """Of each bucket, after backward began; the last one leaves when it is over."""
    transfer: float = 2.0
    deliver: float = 1.0
    optimizer: float = 3.0
    nbytes: Sequence[int] = (MIB, 4 * MIB, 4 * MIB, 4 * MIB)
    late: dict[int, dict[str, float]] = field(default_factory=dict)
    """By rank: how much longer a phase takes there."""
    overlapped: int = 3
    hosts: int = 1
    skew: float = 0.0
    """Seconds by which the clock of each further host is ahead."""
    transport: str = "shared_memory"
    reason: str = ""
    threads: int = 1
    cpus: int = 8
    """Of the host, for any of its ranks."""
    accumulated: int = 0
    """Backwards without synchronization before each round."""
    corrected: bool = False

    def _phase(self, rank: int, name: str) -> float:
        return (getattr(self, name) + self.late.get(rank, {}).get(name, 0.0)) / 1000

    def recording(self) -> Recording:
        spans: list[list[PhaseSpan]] = [[] for _ in range(self.ranks)]
        rounds: list[list[RoundClosed]] = [[] for _ in range(self.ranks)]
        now = [1000.0] * self.ranks
        for number in range(self.first_round, self.first_round + self.rounds):
            now = self._step(number, now, spans, rounds)
        module = self._module()
        records = []
        for rank in range(self.ranks):
            host = rank * self.hosts // self.ranks
            record = RankRecord(
                rank=rank,
                host=f"host{host}",
                clock=f"clock{host}",
                threads=self.threads,
                cpus=tuple(range(self.cpus)),
                modules=(module,),
                spans=tuple(spans[rank]),
                rounds=tuple(rounds[rank]),
            )
            records.append(shifted(record, host * self.skew))
        return Recording(self.ranks, tuple(records))

    def _module(self) -> ModuleRecord:
        contents = [BucketContents(n, 2, f"layer{i}.weight", f"layer{i}.bias") for i, n in enumerate(self.nbytes)]
        return ModuleRecord(0, "Net", self.transport, self.reason, "", tuple(contents), 0)

    def _step(
        self, number: int, now: list[float], spans: list[list[PhaseSpan]], rounds: list[list[RoundClosed]]
    ) -> list[float]:
        opened, ended = [], []
        for rank, began in enumerate(now):
            at = began + self._phase(rank, "data")
            for place in range(self.accumulated + 1):
                spans[rank].append(PhaseSpan(0, FORWARD, at, at + self._phase(rank, "forward")))
                at = spans[rank][-1].ended_at + self._phase(rank, "loss")
                if place < self.accumulated:
                    spans[rank].append(PhaseSpan(0, BACKWARD, at, at + self._phase(rank, "backward")))
                    at = spans[rank][-1].ended_at
            opened.append(at)
            ended.append(at + self._phase(rank, "backward"))
        stretched = [(end - begin) / (self.backward / 1000) for begin, end in zip(opened, ended, strict=True)]
        launched = [
            [begin + ready / 1000 * stretch for ready in self.ready]
            for begin, stretch in zip(opened, stretched, strict=True)
        ]
        reduced = [max(column) + self.transfer / 1000 for column in zip(*launched, strict=True)]
        return [
            self._close(number, rank, opened[rank], ended[rank], launched[rank], reduced, spans[rank], rounds[rank])
            for rank in range(self.ranks)
        ]

    def _close(
        self,
        number: int,
        rank: int,
        opened: float,
        ended: float,
        launched: Sequence[float],
        reduced: Sequence[float],
        spans: list[PhaseSpan],
        rounds: list[RoundClosed],
    ) -> float:
        at, awaited = ended, []
        for done in reduced:
            awaited.append(at if done > at else 0.0)
            at = max(at, done)
        each = self._phase(rank, "deliver") / len(reduced)
        closed = at + each * len(reduced)
        buckets = [
            BucketTimes(
                i, launched[i], launched[i], reduced[i], awaited[i], at + each * (i + 1), Traffic(self.nbytes[i])
            )
            for i in range(len(reduced))
        ]
        event = RoundClosed(
            round=number,
            opened_at=opened,
            first_launch_at=launched[0],
            reduced_at=reduced[-1],
            closed_at=closed,
            waited=sum(b.reduced_at - b.awaited_at for b in buckets if b.awaited_at),
            nbytes=sum(self.nbytes),
            buckets=tuple(buckets),
            overlapped_buckets=self.overlapped,
            order=(),
            corrected=self.corrected,
            repaired=False,
            forward_at=spans[-1].began_at,
            backward_ended_at=ended,
            module=0,
        )
        rounds.append(event)
        spans.append(PhaseSpan(0, OPTIMIZER, closed, closed + self._phase(rank, "optimizer")))
        return spans[-1].ended_at
