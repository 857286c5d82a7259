"""The last words of a rank that raises before a watch connects it with the others: left in the store.

The others may be waiting for it, to make a replica. That it is gone gloo's connections tell (`start_watch.py`); why,
only the rank itself can, at its end. Nothing of the user's is replaced for that, see `last_words.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import time
from collections.abc import Sequence

import torch.distributed as dist

from gradsync import _torch, restarts
from gradsync._torch import Store
from gradsync.watch import error_file, last_words
from gradsync.watch.notice import Notice

_KEY, _HEARD = "gradsync/words", "gradsync/words/heard"
# How long a rank that keeps the store stays for the others to hear it.
_LINGER_SECONDS = 1.0
_process: int | None = None  # that is a rank, or may become one


class EarlyWords:
    """What the ranks of a group have left."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks`: of the group, in the world."""
        self._ranks, self._store = list(ranks), _store()

    def first(self) -> Notice | None:
        """Of the rank that spoke first, if it is one of the group."""
        if not self._store.check([_KEY]):
            return None
        rank = int(self._store.get(_KEY))
        return self.of(self._ranks.index(rank)) if rank in self._ranks else None

    def of(self, rank: int) -> Notice | None:
        key = f"{_KEY}/{self._ranks[rank]}"
        if not self._store.check([key]):
            return None
        return Notice.unpack(json.loads(self._store.get(key)))._replace(rank=rank)

    def heard(self) -> None:
        """This rank raises, and needs the store no more."""
        with contextlib.suppress(RuntimeError):
            self._store.add(_HEARD, 1)


def _store() -> Store:
    world = dist.group.WORLD
    assert world is not None
    return restarts.apart(_torch.store_of(world))


def _say() -> None:
    """This process ends."""
    global _process
    if _process != os.getpid() or not dist.is_initialized():
        return
    error = last_words.uncaught()
    if error is None:
        return
    _process = None  # it is called more than once
    blames_others = bool(last_words.ranks_blamed(error))
    if last_words.tells_others():
        _leave_words(error, blames_others)
        return
    with contextlib.suppress(Exception):
        error_file.write(error, fell_with_others=blames_others)
    _leave_words(error, blames_others)
    with contextlib.suppress(RuntimeError):
        _linger()


def _leave_words(error: BaseException, blames_others: bool) -> None:
    if not blames_others:
        with contextlib.suppress(RuntimeError):  # the store is gone
            rank, store = dist.get_rank(), _store()
            store.set(f"{_KEY}/{rank}", json.dumps(last_words.words_for(error, rank).pack()))
            store.compare_set(_KEY, "", str(rank))


def _linger() -> None:
    store, deadline = _store(), time.monotonic() + _LINGER_SECONDS
    heard = store.add(_HEARD, 1)
    if not restarts.has_agents_store() and dist.get_rank() == 0:
        while heard < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.01)
            heard = store.add(_HEARD, 0)


def _begin() -> None:
    """In each process that may become a rank: not in children of one, such as a loader's workers."""
    global _process
    _process = None if dist.is_available() and dist.is_initialized() else os.getpid()


def _register(_: object = None) -> None:
    """For the end of a child of `multiprocessing`, while its exception is there. Those that are forked forget it."""
    multiprocessing.util.Finalize(None, _say, exitpriority=900)


_begin()
_register()
atexit.register(_say)
os.register_at_fork(after_in_child=_begin)
multiprocessing.util.register_after_fork(_register, _register)
