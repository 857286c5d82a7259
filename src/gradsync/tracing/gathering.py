"""Brings what all ranks have recorded to rank 0, through the store of their group, and no collective.

A rank that traces while others do not, or that has left the block by an exception, would meet the others' next
collective with one of ours. A key in the store that nobody writes is only not there: after a while rank 0 goes on
without it, and says whose it is.

1. Every rank tells its record, and where something was raised, goes on at once.
2. Rank 0 hears them, and decides which ranks compare clocks: one of each host, if there are several.
3. Those meet some times, and tell when, by their clocks.
4. Rank 0 writes the files, and says that it is done.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from gradsync._torch import Store
from gradsync.observe.timeline.clocks import Meeting
from gradsync.observe.timeline.recording import RankRecord, pack, unpack
from gradsync.transport.membership import Membership
from gradsync.transport.store import await_keys

_MEETINGS, _MEETING_SECONDS = 16, 10.0


class Gathering:
    """The ranks of one group, for one trace."""

    def __init__(self, group: dist.ProcessGroup, topic: str, check: Callable[[], None]) -> None:
        """`topic`: the same on all ranks, and new. `check`: raises if a rank is known to be lost."""
        member = Membership(group)
        self.rank, self.size = member.rank, member.size
        self._store: Store | None = member.store if member.size > 1 else None  # kept: the group may end before us
        self._topic, self._check = topic, check
        self._limit = member.limit / 2  # others may be waiting for this rank in a collective

    def _key(self, what: str, rank: int = 0) -> str:
        return f"gradsync/trace/{self._topic}/{what}/{rank}"

    def _publish(self, what: str, text: str, rank: int | None = None) -> None:
        assert self._store is not None
        self._store.set(self._key(what, self.rank if rank is None else rank), text)

    def _read(
        self, what: str, ranks: Sequence[int], seconds: float, check: Callable[[], None] | None
    ) -> dict[int, str]:
        """Of those that have published it by then, or when `check` has raised."""
        assert self._store is not None
        keys = {self._key(what, rank): rank for rank in ranks}
        with contextlib.suppress(Exception):  # a rank is lost: there is no more to come
            await_keys(self._store, list(keys), min(seconds, self._limit), check)
        there = [key for key in keys if self._store.check([key])]
        return {keys[key]: self._store.get(key).decode() for key in there}

    # --- each rank --------------------------------------------------------------------------------------

    def tell(self, record: RankRecord) -> None:
        self._publish("record", pack(record))

    def compare_clocks(self, seconds: float) -> bool:
        """On ranks but 0: meets rank 0 if it wants that. Whether there was word from it within that time."""
        found = self._read("leaders", [0], seconds, self._check)
        leaders = json.loads(found.get(0, "[]"))
        if self.rank in leaders:
            self._publish("meetings", json.dumps(self._meet(leaders)))
        return bool(found)

    def await_done(self, seconds: float) -> None:
        self._read("done", [0], seconds, self._check)

    def _meet(self, leaders: Sequence[int]) -> list[Meeting]:
        """When this rank came and left, each time that all of these were there."""
        assert self._store is not None
        found: list[Meeting] = []
        deadline = time.monotonic() + _MEETING_SECONDS
        for number in range(_MEETINGS):
            keys = [self._key(f"meeting {number}", rank) for rank in leaders]
            came_at = time.perf_counter()
            self._publish(f"meeting {number}", "")
            while not self._store.check(keys):  # without a nap, which would be part of the result
                if time.monotonic() > deadline:
                    return found
            found.append(Meeting(came_at, time.perf_counter()))
        return found

    # --- rank 0 -----------------------------------------------------------------------------------------

    def hear(self, own: RankRecord, seconds: float) -> list[RankRecord]:
        """Of all ranks that have told within that time, in their order."""
        if self._store is None:
            return [own]
        told = self._read("record", range(1, self.size), seconds, self._check)
        for rank in told:  # they are large, and the store lives as long as the job
            with contextlib.suppress(Exception):
                self._store.delete_key(self._key("record", rank))
        return [own, *(unpack(text) for text in told.values())]

    def meetings(self, records: Sequence[RankRecord]) -> list[list[Meeting]]:
        """For each of the records: when its rank met the others to compare clocks, if it did."""
        if self._store is None:
            return [[] for _ in records]
        first = {record.clock: record.rank for record in reversed(records)}
        leaders = sorted(first.values()) if len(first) > 1 and not any(record.fault for record in records) else []
        self._publish("leaders", json.dumps(leaders))
        if not leaders:
            return [[] for _ in records]
        own = self._meet(leaders)
        told = self._read("meetings", leaders[1:], _MEETING_SECONDS, self._check)
        found = {rank: [Meeting(*one) for one in json.loads(text)] for rank, text in told.items()}
        return [own if record.rank == 0 else found.get(record.rank, []) for record in records]

    def done(self) -> None:
        if self._store is not None:
            self._publish("done", "")
