"""How the ranks of a group find out who shares a host with whom, and connect.

All ranks of the group take part, whatever they wish for, and all come to the same end: what each has to say goes
through the group's store, and is read by all before anybody acts on it. Three steps, each of which names the rank
that does not take it:

1. every rank tells where it is, under which name its door is, and what it wishes;
2. ranks at the same place connect;
3. every rank tells whether that went well.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch.distributed as dist

from gradsync import _torch
from gradsync.errors import OptionsMismatchError, ReplicaLostError
from gradsync.transport import link, own_group
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.start_watch import StartWatch
from gradsync.transport.store import Causes, exchange
from gradsync.transport.symmetric import HostMemory

# Once all ranks have said where they are, connecting takes milliseconds.
HANDSHAKE_SECONDS = 10.0
# A rank that fails at once waits for the word of those that wait for it.
VERDICT_SECONDS = 2 * HANDSHAKE_SECONDS
PARTING_SECONDS = 2.0
_MEETINGS, _HELLO, _VERDICT = "meetings", "hello", "verdict"
# Where a word written after the data is also seen after it by other cores.
_ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
# One for each set of ranks, for as long as a transport uses it.
_memories: weakref.WeakValueDictionary[str, HostMemory] = weakref.WeakValueDictionary()


class Meeting(NamedTuple):
    """What all ranks know after it."""

    hosts: list[list[int]]
    """Ranks of the group by the place they are at, in the order of their lowest rank."""
    memory: HostMemory | None
    """Shared by the ranks of this host; None if something went wrong."""
    reason: str
    """Why ranks that share a host could not be connected; the same text on all ranks."""


def excuse(group: ProcessGroupTransport, start: str) -> Callable[[], None]:
    """Instead of a meeting: says that this rank does not come, and waits for nobody.

    What it returns is called before the first round, and raises if the other ranks did come.
    """
    number = group.count(_MEETINGS)
    store = group.store
    keys = [f"gradsync/{_topic(number, _HELLO)}/{rank}" for rank in range(group.size)]
    store.set(keys[group.rank], json.dumps({"start": start}))

    def nobody_came() -> None:
        said = [store.get(key) if store.check([key]) else b"" for key in keys]
        check_same_start(group.rank, [json.loads(text)["start"] if text else start for text in said])

    return nobody_came


def check_same_start(rank: int, starts: Sequence[str]) -> None:
    """`starts`: the option `init_sync`, by rank. With "none" a rank waits for nobody, and the others would for it."""
    by_value: dict[str, list[int]] = {}
    for r, start in enumerate(starts):
        by_value.setdefault(start, []).append(r)
    if len(by_value) > 1:
        said = ", ".join(f"{start!r} on rank {', '.join(map(str, ranks))}" for start, ranks in by_value.items())
        raise OptionsMismatchError(
            f"rank {rank}: the ranks were given different options:\n  init_sync: {said}\nGive all ranks the same. "
            "(True is 'broadcast'; False is 'check' for replicate, and 'none' for DistributedDataParallel.)"
        )


def obstacle() -> str:
    """Why this machine can't share memory between processes, if it can't."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "it needs Linux with memfd_create"
    if platform.machine() not in _ORDERED_MACHINES:
        return f"it relies on the memory order of x86, and this is {platform.machine()}"
    return ""


class Assembly:
    """The ranks of one group, who have come to agree on something."""

    def __init__(self, group: ProcessGroupTransport, said: Mapping[str, Any]) -> None:
        """All ranks at the same time; `said` is what this rank tells the others."""
        self._group = group
        self.watch: StartWatch | None = None
        """Notices when one of them is lost, until it is ended."""
        try:
            self.number = group.count(_MEETINGS)
            self.causes = Causes(group.store, group.rank)
            self.causes.forget()
            if group.size > 1 and (gloo := _torch.gloo_of(group.group)) is not None:
                self.watch = StartWatch(gloo, group.store, self.number)
        except RuntimeError as error:
            raise self._store_lost(error) from None
        problem, fault = obstacle() or said["obstacle"], ""
        self._door, place = None, f"rank {group.rank}"
        if not problem:
            try:
                place, self._door = link.location(), link.Door()
            except OSError as error:  # the other ranks are waiting: no time to raise
                fault = f"could not open a socket: {error.strerror or error}"
        # Held until the end: what this rank says it has, it must still have when all go by it.
        self._known = {name: memory for name, memory in _memories.items() if _is_for(group.rank, memory)}
        mine = {
            "start": "",
            "on_host": True,
            **said,
            "obstacle": problem or fault,
            "expected": not fault,
            "place": place,
            "door": self._door.name if self._door else "",
            "token": secrets.token_hex(16),
            "limit": group.limit,
            "known": sorted(self._known),
            "spare": own_group.spares(group.group),
        }
        self.said: list[dict[str, Any]] = [json.loads(text) for text in self._exchange(_HELLO, json.dumps(mine))]

    def check(self) -> None:
        """Raises if a rank is known to be lost."""
        if self.watch is not None:
            self.watch.check()

    def telling(self) -> AbstractContextManager[None]:
        """Inside, the other ranks are told if something fails."""
        return contextlib.nullcontext() if self.watch is None else self.watch.telling()

    def part(self) -> None:
        """Before an error: the store may end with this process, and the others should learn the same from it first."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._exchange("read", "", PARTING_SECONDS)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()

    def give_up(self) -> None:
        """Nothing comes of it."""
        self.close()
        if self.watch is not None:
            self.watch.end()

    @property
    def hosts(self) -> list[list[int]]:
        places: dict[str, list[int]] = {}
        for rank, one in enumerate(self.said):
            places.setdefault(one["place"], []).append(rank)
        return list(places.values())

    def connect(self) -> Meeting:
        """Ranks that share a host get memory in common."""
        host = next(ranks for ranks in self.hosts if self._group.rank in ranks)
        memory, problem = None, ""
        try:
            memory = self._memory_of(host)
        except Exception as error:
            problem = str(error) if isinstance(error, link.HandshakeError) else f"rank {self._group.rank}: {error}"
        finally:
            self.close()
        problems = self._exchange(_VERDICT, problem, VERDICT_SECONDS)
        reason = "; ".join(dict.fromkeys(text for text in problems if text))
        return Meeting(self.hosts, None if reason else memory, reason)

    def own_group(self) -> Any:
        """Connections that belong to one replica; None if they can't be had."""
        spare = set.intersection(*(set(one["spare"]) for one in self.said))
        name = f"gradsync/own/{self.number}"
        on_host = all(one["on_host"] for one in self.said)
        group = self._group
        return own_group.connect(group.group, group.store, name, group.limit, self.check, on_host, spare)

    def _memory_of(self, host: Sequence[int]) -> HostMemory:
        """The memory that these ranks have in common already, or a new one."""
        limit = self.said[host[0]]["limit"]
        key = f"{dist.get_process_group_ranks(self._group.group)}/{list(host)}/{limit}/"
        for name in sorted(set.intersection(*(set(self.said[rank]["known"]) for rank in host))):
            if name.startswith(key):
                return self._known[name]
        assert self._door is not None
        token = self.said[host[0]]["token"]
        names = {rank: self.said[rank]["door"] for rank in host if rank != self._group.rank}
        connected = link.connect(
            self._door, self._group.rank, names, bytes.fromhex(token), HANDSHAKE_SECONDS, self._won_t_come, self.causes
        )
        made = _memories[key + self.said[host[0]]["door"]] = HostMemory(connected, limit)
        return made

    def _won_t_come(self, rank: int) -> bool:
        """Asked of a rank of this host before all of them are connected: only failure makes it speak so early."""
        self.check()
        return self._group.store.check([f"gradsync/{_topic(self.number, _VERDICT)}/{rank}"])

    def _exchange(self, step: str, text: str, limit: float | None = None) -> list[str]:
        group = self._group
        try:
            limit = group.limit if limit is None else limit
            return exchange(group.store, _topic(self.number, step), group.rank, group.size, text, limit, self.check)
        except TimeoutError as silent:
            self.close()
            raise ReplicaLostError(
                f"rank {group.rank}: the ranks of the group meet to find out who shares a host with whom, and "
                f"there is {silent}. Either it died, see its own output, or it does not replicate its module."
            ) from None
        except ReplicaLostError:
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise self._store_lost(error) from None

    def _store_lost(self, error: Exception) -> ReplicaLostError:
        return ReplicaLostError(
            f"rank {self._group.rank}: the store through which the ranks of the group meet is gone: {error}. It lives "
            "in the process of rank 0, unless torchrun keeps it: see that one's output.",
            [0],
        )


def _topic(number: int, step: str) -> str:
    return f"meeting/{number}/{step}"


def _is_for(rank: int, memory: HostMemory) -> bool:
    """Whether it can be used again: not if ranks have lost each other, or have been numbered anew."""
    return not memory.link.troubled and not memory.link.forked and memory.link.rank == rank
