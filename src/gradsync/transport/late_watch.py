"""A watch for ranks that may not communicate while the replica is made: it begins in the first round.

That is where all ranks are expected; but whether they come, and whether they could while one of them waits here, nobody
knows. So it is a thread that waits for them, and the round goes on beside it: it has a watch as soon as all have come.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import threading
import time
import weakref

from gradsync._torch import Store
from gradsync.transport import handshake, shared_watch
from gradsync.transport.membership import Membership
from gradsync.transport.shared_watch import Offer
from gradsync.watch import settings
from gradsync.watch.watch import Watch

# How long to sleep between two looks whether all have come.
_NAP, _LONGEST_NAP = 1e-3, 0.25


class LateWatch:
    """Of one replica."""

    def __init__(self, member: Membership, number: int) -> None:
        """`number`: tells it from others over the same group."""
        self._member, self._number = member, number
        self._joining: _Joining | None = None

    def begin(self) -> None:
        """This rank has come to a round; more than once changes nothing."""
        if self._joining is None:
            self._joining = _Joining(self._member, self._number)
            weakref.finalize(self, self._joining.stop.set).atexit = False  # `_end_threads` does that

    def find(self) -> Watch | None:
        """As soon as all ranks have come."""
        return None if self._joining is None else self._joining.watch


class _Joining:
    """What the thread has: not the replica, whose end is its end."""

    def __init__(self, member: Membership, number: int) -> None:
        self.watch: Watch | None = None
        self.stop = threading.Event()
        self._member, self._number = member, number
        self._store: Store = member.store
        settings.explain_after()  # raises here if it makes no sense
        self._reusable = shared_watch.reusable(member)
        mine = Offer(
            handshake.location_or(f"rank {member.rank}"),
            settings.is_wanted(),
            tuple(sorted(self._reusable)),
            secrets.token_hex(16),
        )
        self._keys = [f"gradsync/late_watch/{number}/{rank}" for rank in range(member.size)]
        self._store.set(self._keys[member.rank], json.dumps(mine._asdict()))
        if not mine.is_wanted:
            return
        thread = threading.Thread(target=self._run, name="gradsync-late-watch", daemon=True)
        _running[thread] = self.stop, os.getpid()
        thread.start()

    def _run(self) -> None:
        # The store may be gone, or the replica: then there is nobody to be watched.
        with contextlib.suppress(RuntimeError, OSError, _Stopped):
            self._join()
        self._reusable = {}
        _running.pop(threading.current_thread(), None)

    def _join(self) -> None:
        nap, deadline = _NAP, time.monotonic() + self._member.limit
        while not self._store.check(self._keys):
            if time.monotonic() > deadline:  # and with it the round is over
                return
            self._sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP)
        offers = [Offer(**json.loads(self._store.get(key))) for key in self._keys]
        watch = shared_watch.join(
            self._member, self._store, self._number, offers, self._reusable, lambda: self._sleep(0)
        )
        if not self.stop.is_set():
            self.watch = watch

    def _sleep(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise _Stopped


class _Stopped(Exception):
    """The replica is gone, or the process ends."""


_running: dict[threading.Thread, tuple[threading.Event, int]] = {}  # and the process


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from the store while Python ends would abort the process (up to Python 3.12)."""
    for thread, (stop, process) in list(_running.items()):
        if process == os.getpid():
            stop.set()
            thread.join(1.0)
