"""Connections between the ranks of a group that belong to one replica alone.

A group matches collectives by the order in which each rank starts them. Two replicated modules, or a model with
collectives in its own backward, may start theirs in different orders on different ranks. See decision 6.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from gradsync import _torch
from gradsync._torch import Store
from gradsync.errors import NoProcessGroupError, ReplicaLostError
from gradsync.transport.checked_store import CheckedStore
from gradsync.transport.waiting import finish
from gradsync.watch.watch import Watch

# By so many seconds gloo gives up after us: what we say is better.
LATER = 5.0
# Once all ranks have told where they are, connecting takes milliseconds: longer only if one was stopped just then, or
# its host has vanished, which the kernel takes so long to notice. Many ranks get more time, each for one connection.
_CONNECT_SECONDS, _CONNECT_SECONDS_A_RANK = 7.5, 0.02
# How long news of a loss may take.
_NEWS_SECONDS = 2.0
# As a rule it takes a millisecond.
_FREE_SECONDS = 0.25
# Unfinished work beyond this is looked through: some may belong to rounds that were given up.
_MANY = 256
# Groups of a kind that c10d can't make twice under the same name, once their replica is gone: for the next one.
_spare: dict[str, dist.ProcessGroup] = {}


class Connections:
    """What carries collectives, a process group or a gloo backend, and the work under way on it."""

    def __init__(self, carrier: Any, find_watch: Callable[[], Watch | None], limit: float) -> None:
        """`find_watch`: what knows who is lost, once there is one; `limit`: seconds that a collective may take."""
        self._held = [carrier]
        self._find_watch, self._limit = find_watch, limit
        self._unfinished: set[dist.Work] = set()

    @property
    def carrier(self) -> Any:
        """What has the collectives of a process group."""
        return self._held[0]

    def track(self, work: dist.Work) -> dist.Work:
        """It is under way now, until `finish`."""
        if len(self._unfinished) > _MANY:
            self._unfinished.difference_update([one for one in self._unfinished if one.is_completed()])
        self._unfinished.add(work)
        return work

    def finish(self, work: dist.Work, on_cpu: bool) -> None:
        """Waits for it."""
        finish(work, on_cpu, self._find_watch, self._limit)
        self._unfinished.discard(work)

    def end_with(self, owner: object) -> None:
        """Ends the connections, which are `owner`'s alone, when that is gone.

        Also if something is under way, for which gloo would wait; and before Python ends: threads of gloo's that are
        left by then abort the process now and then.
        """
        weakref.finalize(owner, self._end, os.getpid())

    def _end(self, process: int) -> None:
        if process != os.getpid():  # a forked child: the connections are its parent's
            return
        carrier = self._held.pop()  # gloo's threads end with the last reference
        if isinstance(carrier, dist.ProcessGroup):
            _spare[carrier.group_name] = carrier
        elif any(not work.is_completed() for work in self._unfinished):
            _torch.break_off(carrier)
            held = [carrier]
            del carrier
            _free_aside(held)


def _free_aside(held: list[Any]) -> None:
    """Drops the last reference to a gloo backend that was broken off, in a thread. (2.13: now and then, when a rank was
    killed, a send to another one stays under way all the same, and gloo waits for it.)"""
    thread = threading.Thread(target=held.clear, name="gradsync-free", daemon=True)
    thread.start()
    thread.join(_FREE_SECONDS)


def connect(
    group: dist.ProcessGroup,
    store: Store,
    name: str,
    limit: float,
    check: Callable[[], None],
    on_cpu: bool,
    spare: Collection[str],
) -> Any:
    """What has the collectives of `group`, and is nobody else's; None if that can't be had. All ranks together.

    `check`: called while ranks connect, raises if one is gone. `on_cpu`: only for tensors on the CPU, for which gloo
    is enough. `spare`: what `spare_groups` was on all ranks.
    """
    gloo = _torch.gloo_of(group)
    if on_cpu and gloo is not None:
        return connect_gloo(gloo, store, name, group.rank(), group.size(), limit, check)
    # Only for all ranks of the world: c10d names groups by counting, and other ranks would not count this one.
    if group.size() < dist.get_world_size():
        return None
    return _spare.pop(min(spare)) if spare else _torch.twin_of(group)


def connect_gloo(
    like: Any, store: Store, name: str, rank: int, size: int, limit: float, check: Callable[[], None]
) -> Any:
    """Some ranks of a gloo group connect, under a name of their own."""
    checked = CheckedStore(store, limit, check)
    try:
        to_connect = _CONNECT_SECONDS + size * _CONNECT_SECONDS_A_RANK
        made = _torch.connect_gloo(like, checked, name, rank, size, limit, to_connect)
    except RuntimeError as error:
        if isinstance(error, ReplicaLostError):
            raise
        _check_for_a_while(check)  # it may be that a rank is gone: who, is known in a moment
        raise NoProcessGroupError(
            f"rank {rank}: connections of a replica's own could not be made: {error}. If there are too many open "
            "files, raise the limit (ulimit -n)."
        ) from None
    checked.stop_checking()  # gloo keeps the store
    return made


def _check_for_a_while(check: Callable[[], None]) -> None:
    deadline = time.monotonic() + _NEWS_SECONDS
    while time.monotonic() < deadline:
        check()
        time.sleep(0.02)


def spare_groups(group: dist.ProcessGroup) -> list[str]:
    """Names of groups with the same ranks that no replica uses any more."""
    ranks = dist.get_process_group_ranks(group)
    return [
        name for name, spare in _spare.items() if _torch.knows(spare) and dist.get_process_group_ranks(spare) == ranks
    ]


def forget_destroyed_groups() -> None:
    """Those that a program has destroyed are not spare any more."""
    for name in [name for name, spare in _spare.items() if not _torch.knows(spare)]:
        del _spare[name]
