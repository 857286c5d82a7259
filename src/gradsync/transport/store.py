"""What the ranks of a group say to each other through its store, beside all collectives.

A collective that not all ranks call is matched with whatever the others call instead. A key that nobody writes is only
not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gradsync import _torch
from gradsync._torch import Store

# How long to sleep between two looks, at first and at most: ranks in step need less than the first.
_NAP, _LONGEST_NAP = 0.5e-3, 20e-3
NO_WORD = "no word from rank"
_SHOWN = 6  # ranks


class SilentRanksError(TimeoutError):
    """Some ranks have said nothing in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"{NO_WORD} {', '.join(map(str, ranks))}")
        self.ranks = tuple(ranks)


def exchange(
    store: Store,
    topic: str,
    rank: int,
    size: int,
    text: str,
    limit: float,
    check: Callable[[], None] | None = None,
    explain: Callable[[Callable[[], Sequence[int]]], None] | None = None,
) -> list[str]:
    """Every rank's text on a topic. Those that said nothing within `limit` seconds are in a `SilentRanksError`.

    `check` is called now and then; it raises if waiting has become pointless. So is `explain`, with something that
    gives a few of those that have said nothing yet.
    """
    keys = [f"gradsync/{topic}/{r}" for r in range(size)]

    def look() -> None:
        if check is not None:
            check()
        if explain is not None:
            explain(lambda: [r for r in range(size) if not store.check([keys[r]])][:_SHOWN])

    store.set(keys[rank], text)
    silent = await_keys(store, keys, limit, look)
    if silent:
        raise SilentRanksError([keys.index(key) for key in silent])
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


class Board:
    """Where ranks leave word for each other: keys in the store, under a prefix of their own."""

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        """`check`: called while waiting, raises if that has become pointless."""
        self._store, self.check = store, check

    def publish(self, key: str, text: str) -> None:
        self._store.set(f"gradsync/{key}", text)

    def read(self, key: str, seconds: float) -> str:
        """Raises `TimeoutError` if nobody has published it within so many seconds."""
        key = f"gradsync/{key}"
        if await_keys(self._store, [key], seconds, self.check):
            raise TimeoutError(f"no word under {key}")
        return self._store.get(key).decode()
