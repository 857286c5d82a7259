"""What ranks have recorded: one frozen value, plain data that travels as text. Everything that shows it is a pure
function of it.

Times are `time.perf_counter` seconds: of the rank's own host at first, of rank 0's after `clocks.align`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradsync.events import BucketTimes, PhaseSeconds, RoundClosed, Traffic


class BucketContents(NamedTuple):
    """What lies in one bucket of the plan."""

    nbytes: int
    parameters: int
    first: str
    """Name of the first parameter, as gradients arrive; and of the last one."""
    last: str


class ModuleRecord(NamedTuple):
    """One replicated module, as it was when the recording ended."""

    serial: int
    """The same on all ranks."""
    name: str
    transport: str
    reason: str
    """Why it is this transport, if there is more to say than that it is the best."""
    hook: str
    """The communication hook, if one is registered."""
    buckets: tuple[BucketContents, ...]
    left_out: int
    """Rounds that were recorded and are no longer kept."""


class PhaseSpan(NamedTuple):
    """A forward, a backward that is no round, or a step of an optimizer."""

    module: int
    phase: str
    began_at: float
    ended_at: float


class RankRecord(NamedTuple):
    """All that one rank has to tell."""

    rank: int
    host: str
    clock: str
    """The same on all ranks that read the same clock."""
    threads: int
    """Of torch, for one operation."""
    cpus: tuple[int, ...]
    """Numbers of the processors that this process may use."""
    modules: tuple[ModuleRecord, ...]
    spans: tuple[PhaseSpan, ...]
    rounds: tuple[RoundClosed, ...]
    """Of all modules, in the order in which they closed. Without the order of arrival."""
    fault: str = ""
    """What has ended it before its time, if anything has."""

    @property
    def machine(self) -> str:
        """The same on all ranks of one kernel: containers on it may have clocks, and names, of their own."""
        return self.clock.partition("/")[0]


class Clock(NamedTuple):
    """How the clock of some ranks compares with rank 0's."""

    ranks: tuple[int, ...]
    offset: float
    """Seconds by which it is ahead."""
    error: float
    """By which that may be wrong."""


class Recording(NamedTuple):
    """Of all ranks that have told."""

    size: int
    """How many ranks there are."""
    ranks: tuple[RankRecord, ...]
    clocks: tuple[Clock, ...] = ()
    """Of the hosts but rank 0's."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have told nothing."""
        return tuple(sorted(set(range(self.size)) - {one.rank for one in self.ranks}))

    @property
    def modules(self) -> dict[int, ModuleRecord]:
        """By serial number."""
        return {module.serial: module for one in reversed(self.ranks) for module in one.modules}

    @property
    def main_module(self) -> int | None:
        """The module whose rounds count as steps: the one with the most bytes reduced."""
        nbytes: dict[int, int] = {}
        for event in (event for one in self.ranks for event in one.rounds):
            nbytes[event.module] = nbytes.get(event.module, 0) + event.nbytes
        return max(nbytes, key=lambda serial: (nbytes[serial], -serial)) if nbytes else None

    def common_rounds(self, module: int) -> list[int]:
        """The rounds of a module that all ranks here have, in order."""
        each = [{event.round for event in one.rounds if event.module == module} for one in self.ranks]
        return sorted(set.intersection(*each)) if each else []


# --- as text ----------------------------------------------------------------------------------------------


def pack(record: RankRecord) -> str:
    """As text of letters and digits, a tenth as long as its JSON."""
    text = json.dumps(_rounded(record), separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> RankRecord:
    record = RankRecord(*json.loads(zlib.decompress(base64.b85decode(text))))
    return record._replace(
        cpus=tuple(record.cpus),
        modules=tuple(_module(*row) for row in record.modules),
        spans=tuple(PhaseSpan(*row) for row in record.spans),
        rounds=tuple(_round(row) for row in record.rounds),
    )


def _rounded(value: Any) -> Any:
    """Times to a tenth of a microsecond: clocks are not better, and digits of noise can't be compressed."""
    if isinstance(value, float):
        return round(value, 7)
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _module(*row: Any) -> ModuleRecord:
    made = ModuleRecord(*row)
    return made._replace(buckets=tuple(BucketContents(*one) for one in made.buckets))


def _round(row: Any) -> RoundClosed:
    made = RoundClosed(*row)
    return made._replace(
        buckets=tuple(BucketTimes(*one)._replace(traffic=Traffic(*one[-1])) for one in made.buckets),
        order=tuple(made.order),
        before=PhaseSeconds(*made.before),
    )


# --- another clock ----------------------------------------------------------------------------------------


def shifted(record: RankRecord, seconds: float) -> RankRecord:
    """The same by a clock that is so much ahead. A time of 0.0 stands for none, and stays."""

    def moved(values: Any) -> Iterator[Any]:
        for name, value in zip(values._fields, values, strict=True):
            yield value + seconds if name.endswith("_at") and value else value

    def moved_round(event: RoundClosed) -> RoundClosed:
        buckets = tuple(BucketTimes(*moved(bucket)) for bucket in event.buckets)
        return RoundClosed(*moved(event))._replace(buckets=buckets)

    return record._replace(
        spans=tuple(PhaseSpan(*moved(span)) for span in record.spans),
        rounds=tuple(moved_round(event) for event in record.rounds),
    )
