"""A replica's own connections between the ranks of a group.

A group matches collectives by the order in which each rank starts them. Two replicated modules, or a model with
collectives in its own backward, may start theirs in different orders on different ranks. See decision 6.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync import _torch
from gradsync._torch import Store
from gradsync.errors import NoProcessGroupError, ReplicaLostError
from gradsync.transport.store import await_keys

# Groups of a kind that c10d can't make twice under the same name, once their replica is gone: for the next one.
_spare: dict[str, dist.ProcessGroup] = {}


def connect(
    group: dist.ProcessGroup,
    store: Store,
    name: str,
    limit: float,
    check: Callable[[], None],
    on_host: bool,
    spare: Collection[str],
) -> Any:
    """What has the collectives of `group`, and is nobody else's; None if that can't be had. All ranks together.

    `check`: called while ranks connect, raises if one is gone. `on_host`: only for tensors on the CPU, for which gloo
    is enough. `spare`: what `spares` was on all ranks.
    """
    gloo = _torch.gloo_of(group)
    if on_host and gloo is not None:
        return connect_gloo(gloo, store, name, group.rank(), group.size(), limit, check)
    # Only for all ranks of the world: c10d names groups by counting, and other ranks would not count this one.
    if group.size() < dist.get_world_size():
        return None
    return _spare.pop(min(spare)) if spare else _torch.twin_of(group)


def connect_gloo(
    like: Any, store: Store, name: str, rank: int, size: int, limit: float, check: Callable[[], None]
) -> Any:
    """Some ranks of a gloo group connect, under a name of their own."""
    meeting_point = _Watched(store, limit, check)
    try:
        made = _torch.connect_gloo(like, meeting_point, name, rank, size, limit)
    except RuntimeError as error:
        if isinstance(error, ReplicaLostError):
            raise
        raise NoProcessGroupError(
            f"rank {rank}: connections of a replica's own could not be made: {error}. If there are too many open "
            "files, raise the limit (ulimit -n)."
        ) from None
    meeting_point.check_while_waiting = None  # gloo keeps the store
    return made


class _Watched(Store):
    """The store with a wait that can be ended: by a rank that is lost, or by the keyboard."""

    def __init__(self, store: Store, limit: float, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._limit = store, limit
        self.check_while_waiting: Callable[[], None] | None = check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, bytes(value))  # type: ignore[arg-type]  # it takes bytes too

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._limit if timeout is None else timeout.total_seconds()
        if missing := await_keys(self._store, keys, limit, self.check_while_waiting):
            raise TimeoutError(f"no word under {', '.join(missing)}")

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def has_extended_api(self) -> bool:
        return False


def spares(group: dist.ProcessGroup) -> list[str]:
    """Names of groups with the same ranks that no replica uses any more."""
    for name in [name for name, spare in _spare.items() if not _torch.knows(spare)]:
        del _spare[name]
    ranks = dist.get_process_group_ranks(group)
    return [name for name, spare in _spare.items() if dist.get_process_group_ranks(spare) == ranks]


def release_with(owner: object, held: list[Any], pending: Collection[dist.Work]) -> None:
    """Ends the connections in `held` when `owner` is gone, also if something of it is under way: gloo waits for that.

    And before Python ends: threads of gloo's that are left by then abort the process now and then.
    """
    weakref.finalize(owner, _release, held, pending, os.getpid())


def _release(held: list[Any], pending: Collection[dist.Work], process: int) -> None:
    if process != os.getpid():  # a forked child: the connections are its parent's
        return
    group = held.pop()
    if isinstance(group, dist.ProcessGroup):
        _spare[group.group_name] = group
    elif any(not work.is_completed() for work in pending):
        _torch.break_off(group)
