"""Rank 0's accounts of who was waited for, of all modules; it names a rank that is slow in the log, once."""

from __future__ import annotations

from gradsync import log
from gradsync.watch.lost_time import LostTime
from gradsync.watch.waits import Block
from gradsync.watch.wire import Message

_MODULES = 64  # replicas come and go
_TELL_SECONDS = 1.0
_log = log.logger()


class Ledger:
    """Belongs to the watch's thread of rank 0."""

    def __init__(self, size: int) -> None:
        """`size`: how many ranks there are."""
        self._size = size
        self._accounts: dict[int, LostTime] = {}  # by the modules' serial numbers, the latest last
        self._told: dict[int, int] = {}  # of how many rounds of each everybody knows
        self._tell_at = 0.0
        self._named: set[int] = set()

    def take(self, message: Message) -> None:
        """What a rank tells of its waits."""
        block = Block.unpack(message)
        account = self._accounts.pop(block.module, None) or LostTime(self._size)
        while len(self._accounts) >= _MODULES:
            oldest = next(iter(self._accounts))
            del self._accounts[oldest]
            self._told.pop(oldest, None)
        self._accounts[block.module] = account
        account.add(block)
        straggler = account.judge()
        if straggler is not None and straggler.rank not in self._named:
            self._named.add(straggler.rank)
            _log.warning("%s", straggler)

    def news(self, now: float) -> list[Message]:
        """What everybody should hear, at most once a second."""
        if now < self._tell_at:
            return []
        changed = {module: one for module, one in self._accounts.items() if one.rounds > self._told.get(module, 0)}
        if changed:
            self._tell_at = now + _TELL_SECONDS
        self._told |= {module: one.rounds for module, one in changed.items()}
        return [one.totals().pack(module) for module, one in changed.items()]
