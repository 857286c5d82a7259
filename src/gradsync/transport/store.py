"""What the ranks of a group say to each other through its store, beside all collectives.

A collective with a rank that does something else gets entangled with it. A key that nobody writes is only not there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from gradsync import _torch
from gradsync._torch import Store

# How long to sleep between two looks, at first and at most: ranks in step need less than the first.
_NAP, _LONGEST_NAP = 0.5e-3, 20e-3
# For how long a rank that waited in vain waits for the one it waited for to say that it did so too.
PATIENCE = 1.0


def exchange(
    store: Store, topic: str, rank: int, size: int, text: str, limit: float, check: Callable[[], None] | None = None
) -> list[str]:
    """Every rank's text on a topic. Those that said nothing within `limit` seconds are named in a `TimeoutError`.

    `check` is called now and then; it raises if waiting has become pointless.
    """
    keys = [f"gradsync/{topic}/{r}" for r in range(size)]
    store.set(keys[rank], text)
    silent = await_keys(store, keys, limit, check)
    if silent:
        raise TimeoutError(f"no word from rank {', '.join(str(keys.index(key)) for key in silent)}")
    return [found.decode() for found in _torch.read_all(store, keys)]


def await_keys(store: Store, keys: Sequence[str], limit: float, check: Callable[[], None] | None = None) -> list[str]:
    """Returns when all keys are there, or after `limit` seconds; gives those that are not.

    By looking, not by the store's own wait: that can't be interrupted, and complains on the terminal when it ends.
    """
    deadline, nap, missing = time.monotonic() + limit, _NAP, list(keys)
    while not store.check(missing):
        while store.check(missing[:1]):
            missing.pop(0)
            if not missing:
                return []
        if check is not None:
            check()
        if time.monotonic() > deadline:
            return [key for key in missing if not store.check([key])]
        time.sleep(nap)
        nap = min(nap * 1.5, _LONGEST_NAP)
    return []


class Causes:
    """Who gave up because of whom.

    When a rank dies, those that wait for it give up, and to ranks that wait for these they look as dead as it does. A
    rank says whom it lost before it gives up, so that all of them can name the first one.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def forget(self) -> None:
        """This rank begins anew, whatever it gave up before."""
        with contextlib.suppress(RuntimeError):  # not every store can
            self._store.delete_key(self._key(self._rank))

    def first(self, blamed: Sequence[int], patience: float = 0.0) -> list[int]:
        """Of ranks that did not come, those that are the reason; said to the others before it is returned.

        `patience`: seconds for which to wait until one of them says that it waits for others, as it may be about to.
        """
        found: dict[int, None] = {}
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that is lost
            self._say(blamed)
            if patience:
                await_keys(self._store, [self._key(rank) for rank in blamed], patience)
            waiting, seen = list(blamed), {self._rank}
            while waiting:
                rank = waiting.pop(0)
                if rank in seen:
                    continue
                seen.add(rank)
                theirs = self._said_by(rank)
                waiting += theirs
                if not theirs:
                    found[rank] = None
            self._say(list(found) or blamed)
        return sorted(found) or list(blamed)

    def _say(self, lost: Sequence[int]) -> None:
        self._store.set(self._key(self._rank), " ".join(map(str, lost)))

    def _said_by(self, rank: int) -> list[int]:
        key = self._key(rank)
        return list(map(int, self._store.get(key).split())) if self._store.check([key]) else []

    @staticmethod
    def _key(rank: int) -> str:
        return f"gradsync/gave_up/{rank}"
