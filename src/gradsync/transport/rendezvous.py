"""How the ranks of a group find out who shares a host with whom, and connect.

All ranks of the group take part, whatever they ask for, and all come to the same end: what each has to say goes
through the group's store, and is read by all before anybody acts on it. Three steps, each of which names the rank
that does not take it:

1. every rank announces on which host it is, under which name it listens, and what it asks for;
2. ranks of the same host connect;
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from gradsync import _torch
from gradsync.errors import GradsyncError, InvalidOptionError, OptionsMismatchError, ReplicaLostError, SharedMemoryError
from gradsync.transport import dedicated_group, handshake, shared_watch
from gradsync.transport.early_words import EarlyWords
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.keepalive import Keepalive
from gradsync.transport.link import listed
from gradsync.transport.membership import Membership
from gradsync.transport.shared_watch import Offer
from gradsync.transport.start_patience import StartPatience
from gradsync.transport.start_watch import StartWatch, without_store
from gradsync.transport.store import SilentRanksError
from gradsync.watch import settings
from gradsync.watch.watch import Watch

# Once all ranks have announced where they are, connecting takes milliseconds.
HANDSHAKE_SECONDS = 10.0
# A rank that fails at once waits for the word of those that wait for it.
VERDICT_SECONDS = 2 * HANDSHAKE_SECONDS
LEAVE_SECONDS = 2.0
_COUNTER, _ANNOUNCEMENT, _VERDICT, _LEAVE = "rendezvous", "announcement", "verdict", "leave"
# Where a word written after the data is also seen after it by other cores.
_ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
# One for each set of ranks, for as long as a transport uses it.
_memories: weakref.WeakValueDictionary[str, HostMemory] = weakref.WeakValueDictionary()


class Announcement(NamedTuple):
    """What a rank says of itself in the first step."""

    host: str
    """The same on all ranks that can connect."""
    limit: float
    requested: str = ""
    """The transport."""
    init_sync: str = ""
    on_cpu: bool = True
    """Whether all tensors are."""
    obstacle: str = ""
    """Why this rank can't use shared memory."""
    is_surprising: bool = False
    """Whether somebody who reads the documentation would not expect that obstacle."""
    listener: str = ""
    token: str = ""
    place: str = ""
    """Where it runs, whether or not it can share memory there."""
    is_watched: bool = False
    """Whether it wants a watch between the ranks."""
    memories: tuple[str, ...] = ()
    """Names of what it shares with ranks of its host already."""
    watches: tuple[str, ...] = ()
    """Names of those that it has with the ranks of this group already."""
    spare_groups: tuple[str, ...] = ()
    """Names of dedicated groups that no replica uses any more."""
    devices: tuple[str, ...] = ()
    """Names of the accelerators with its parameters, see `devices.py`."""


class Connected(NamedTuple):
    """What all ranks know after the last step."""

    memory: HostMemory | None
    """Shared by the ranks of this host; None if something went wrong."""
    problem: str
    """Why ranks that share a host could not be connected; the same text on all ranks."""


class Skipped(NamedTuple):
    """A rendezvous to which this rank did not come."""

    number: int
    check: Callable[[], None]
    """Called before the first round, raises if the other ranks did come."""


def skip_rendezvous(member: Membership, init_sync: str) -> Skipped:
    """Announces that this rank does not come, and waits for nobody."""
    number, store = member.next_number(_COUNTER), member.store
    topic = _topic(number, _ANNOUNCEMENT)
    keys = [f"gradsync/{topic}/{rank}" for rank in range(member.size)]
    store.set(keys[member.rank], json.dumps({"init_sync": init_sync}))

    def check_nobody_came() -> None:
        found = [store.get(key) if store.check([key]) else b"" for key in keys]
        check_same_init_sync(member.rank, [json.loads(text)["init_sync"] if text else init_sync for text in found])

    return Skipped(number, check_nobody_came)


def check_same_init_sync(rank: int, values: Sequence[str]) -> None:
    """The option, by rank. With "none" a rank waits for nobody, and the others would for it."""
    by_value = ranks_by(values)
    if len(by_value) > 1:
        said = ", ".join(f"{value!r} on rank {listed(ranks)}" for value, ranks in by_value.items())
        raise OptionsMismatchError(
            f"rank {rank}: the ranks were given different options:\n  init_sync: {said}\nGive all ranks the same. "
            "(True is 'broadcast'; False is 'check' for replicate, and 'none' for DistributedDataParallel.)"
        )


@contextlib.contextmanager
def rendezvous(
    member: Membership,
    *,
    requested: str = "",
    obstacle: str = "",
    init_sync: str = "",
    on_cpu: bool = True,
    devices: tuple[str, ...] = (),
) -> Iterator[Rendezvous]:
    """Inside, all ranks of the group have come, and know what each of them announced (see `Announcement`).

    What fails inside is told to the other ranks. The watch for lost ranks goes on behind it, unless it was ended.
    """
    come = Rendezvous(member, requested, obstacle, init_sync, on_cpu, devices)
    try:
        with come.start_watch.reporting_failure():
            yield come
    except BaseException as error:
        if isinstance(error, (InvalidOptionError, OptionsMismatchError, SharedMemoryError)):  # which all ranks raise
            come.leave_together()
        come.end_start_watch()
        raise
    finally:
        come.close()


class Rendezvous:
    """The ranks of one group, who have come to find out who shares a host; see `rendezvous`."""

    def __init__(
        self,
        member: Membership,
        requested: str,
        obstacle: str,
        init_sync: str,
        on_cpu: bool,
        devices: tuple[str, ...] = (),
    ) -> None:
        self._member = member
        self._listener: handshake.Listener | None = None
        self.watch: Watch | None = None
        """Does so from when it is connected until the last replica over these ranks is gone."""
        keepalive = Keepalive()
        try:
            self.number = member.next_number(_COUNTER)
        except RuntimeError as error:
            keepalive.release()
            raise without_store(member.rank, shared_watch.over_same_ranks(member), error) from None
        gloo = _torch.gloo_of(member.group) if member.size > 1 else None
        words = EarlyWords(dist.get_process_group_ranks(member.group))
        self.start_watch = StartWatch(gloo, member.store, member.rank, member.size, self.number, keepalive, words)
        """Notices when one of them is lost, until it is ended."""
        host, obstacle, is_surprising = f"rank {member.rank}", _machine_obstacle() or obstacle, False
        if not obstacle:
            try:
                host, self._listener = handshake.location(), handshake.Listener()
            except OSError as error:  # the other ranks are waiting: no time to raise
                obstacle, is_surprising = f"could not open a socket: {error.strerror or error}", True
        # Held until the end: what this rank says it has, it must still have when all go by it.
        self._memories = {name: one for name, one in _memories.items() if _is_reusable(one, member.rank)}
        self._watches = shared_watch.reusable(member)
        self.start_watch.hear(shared_watch.over_same_ranks(member))
        dedicated_group.forget_destroyed_groups()
        mine = Announcement(
            host=host,
            limit=member.limit,
            requested=requested,
            init_sync=init_sync,
            on_cpu=on_cpu,
            obstacle=obstacle,
            is_surprising=is_surprising,
            listener=self._listener.name if self._listener else "",
            token=secrets.token_hex(16),
            place=handshake.location_or(f"rank {member.rank}"),
            is_watched=settings.is_wanted(),
            memories=tuple(sorted(self._memories)),
            watches=tuple(sorted(self._watches)),
            spare_groups=tuple(dedicated_group.spare_groups(member.group)),
            devices=devices,
        )
        found = self._exchange(_ANNOUNCEMENT, json.dumps(mine._asdict()))
        # A rank that skips the rendezvous announces no more than `init_sync`, which then is not the same on all.
        dicts: list[dict[str, Any]] = [{"host": "", "limit": 0.0, **json.loads(text)} for text in found]
        self.announcements = tuple(Announcement(**one) for one in dicts)
        """By rank."""

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks of the group by the host they are on, in the order of their lowest rank."""
        return list(ranks_by([one.host for one in self.announcements]).values())

    def check(self) -> None:
        """Raises if a rank is known to be lost."""
        self.start_watch.check()

    def connect_watch(self) -> None:
        """The ranks take the watch that they have in common already, or make one."""
        if self.watch is not None:
            return
        offers = [Offer(one.place, one.is_watched, one.watches, one.token) for one in self.announcements]
        member = self._member
        with self._store_may_be_lost():
            self.watch = shared_watch.join(member, member.store, self.number, offers, self._watches, self.check)
        if self.watch is not None:
            self.start_watch.hear([self.watch])

    def connect(self) -> Connected:
        """Ranks that share a host get memory in common."""
        self.connect_watch()
        host = next(ranks for ranks in self.hosts if self._member.rank in ranks)
        memory, problem = None, ""
        try:
            memory = self._memory_of(host)
        except Exception as error:
            is_clear = isinstance(error, handshake.HandshakeError)
            problem = str(error) if is_clear else f"rank {self._member.rank}: {error}"
        finally:
            self.close()
        problems = self._exchange(_VERDICT, problem, VERDICT_SECONDS)
        problem = "; ".join(dict.fromkeys(text for text in problems if text))
        return Connected(None if problem else memory, problem)

    def connect_dedicated_group(self) -> Any:
        """Connections that belong to one replica; None if they can't be had. See `dedicated_group.connect`."""
        member = self._member
        spare = set.intersection(*(set(one.spare_groups) for one in self.announcements))
        on_cpu = all(one.on_cpu for one in self.announcements)
        name = f"gradsync/dedicated/{self.number}"
        limit = member.limit if self.watch is None else member.limit + dedicated_group.LATER
        return dedicated_group.connect(member.group, member.store, name, limit, self.check, on_cpu, spare)

    def leave_together(self) -> None:
        """Before an error that all ranks raise: waits until all of them know of it.

        The store may end with this process, and they learn it from there.
        """
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._exchange(_LEAVE, "", LEAVE_SECONDS)

    def end_start_watch(self) -> None:
        """No replica is made here, or none any more."""
        self.start_watch.end()

    def close(self) -> None:
        """Nobody can connect to this rank any more."""
        if self._listener is not None:
            self._listener.close()

    def _memory_of(self, host: Sequence[int]) -> HostMemory:
        """The memory that these ranks have in common already, or a new one."""
        rank, first = self._member.rank, self.announcements[host[0]]
        key = f"{dist.get_process_group_ranks(self._member.group)}/{list(host)}/{first.limit}/"
        for name in sorted(set.intersection(*(set(self.announcements[one].memories) for one in host))):
            if name.startswith(key):
                return self._memories[name]
        assert self._listener is not None
        listeners = {one: self.announcements[one].listener for one in host if one != rank}
        token = bytes.fromhex(first.token)
        connected = handshake.connect(
            self._listener, rank, listeners, token, HANDSHAKE_SECONDS, self._has_failed, self.watch
        )
        made = _memories[key + first.listener] = HostMemory(connected, first.limit)
        return made

    def _has_failed(self, rank: int) -> bool:
        """Asked of a rank of this host before all of them are connected: only failure makes it speak so early."""
        self.check()
        return self._member.store.check([f"gradsync/{_topic(self.number, _VERDICT)}/{rank}"])

    def _exchange(self, step: str, text: str, limit: float | None = None) -> list[str]:
        waited = StartPatience(self._member.rank, limit or self._member.limit, self._watch_so_far)
        with waited:  # also while it is said that this took too long: others ask at the same moment what this rank does
            try:
                with self._store_may_be_lost():
                    topic = _topic(self.number, step)
                    return self._member.exchange(topic, text, limit, self.check, waited.explain)
            except SilentRanksError as silent:
                self.close()
                self.start_watch.give_up_on(silent.ranks)
                if limit is None and (told := waited.too_long(silent.ranks)) is not None:
                    raise told from None
                raise ReplicaLostError(
                    f"rank {self._member.rank}: the ranks of the group meet to find out who shares a host with whom, "
                    f"and there is {silent}. Either it died, see its own output, or it does not replicate its module.",
                    silent.ranks,
                ) from None

    @property
    def _watch_so_far(self) -> Watch | None:
        return self.watch or next(iter(self._watches.values()), None)

    @contextlib.contextmanager
    def _store_may_be_lost(self) -> Iterator[None]:
        try:
            yield
        except GradsyncError:
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise self.start_watch.without_store(error) from None


def _topic(number: int, step: str) -> str:
    return f"rendezvous/{number}/{step}"


def ranks_by(values: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that have each value, in the order of their lowest rank."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _machine_obstacle() -> str:
    """Why this machine can't share memory between processes, if it can't."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "it needs Linux with memfd_create"
    if platform.machine() not in _ORDERED_MACHINES:
        return f"it relies on the memory order of x86, and this is {platform.machine()}"
    return ""


def _is_reusable(memory: HostMemory, rank: int) -> bool:
    """Not if ranks have lost each other, or have been numbered anew."""
    return memory.link.is_reusable and memory.link.rank == rank
