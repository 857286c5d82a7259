"""Notices at once that a rank ends, or fails, while all of them make a replica.

Until the ranks have connections of our own, nothing would tell: a key that a dead rank does not write looks like one
that a slow rank has yet to write. But gloo has connections, and a receive from a rank that has ended fails at once. So
each rank has one pending from the next rank in the group, in a thread, under a tag that nobody else uses: no collective
is disturbed by it, whatever that rank does instead. Who sees its neighbor end says so in the store, where all look.

    rank 0 ── receives from ──> rank 1 ── receives from ──> rank 2 ── receives from ──> rank 0

When its replica is made a rank sends the byte that the one before it waits for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradsync import _torch
from gradsync._torch import Store
from gradsync.errors import ReplicaLostError
from gradsync.transport import progress_engine
from gradsync.transport.link import Link

# What was sent before a rank ended may still be on its way, and is waited for so long.
GRACE = 0.3
EXPLAIN_SECONDS = 2.0
# How long a rank that raises because of another one keeps the store, which may live in its process, for the rest.
HEAR_SECONDS = 0.4
# How often to look into the store.
_CHECK_SECONDS = 0.05
_TAG = 0x67720001
_SHOWN = 600  # characters of another rank's error


class StartWatch:
    """Of one rank: watches its neighbor, and passes on what any rank has reported."""

    def __init__(self, gloo: Any, store: Store, number: int) -> None:
        """All ranks at the same time; `number`: how often they have done so before."""
        self._rank, self._size = gloo.rank(), gloo.size()
        self._store, self._key = store, f"gradsync/start/{number}/failure"
        self._next_check = self._known_since = 0.0
        self._has_heard = False
        self._neighbor_ended = _watch_neighbor(gloo)
        self._end = weakref.finalize(self, _say_done, gloo)
        self._end.atexit = False

    def end(self) -> None:
        """This rank's replica is made, or was given up."""
        self._end()

    def check(self) -> None:
        """Raises if a rank is known to have ended, or to have failed, and what it sent before must have come."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        if self._neighbor_ended.is_set():
            self._report({"rank": (self._rank + 1) % self._size})
        if not self._store.check([self._key]):
            return
        self._known_since = self._known_since or now
        if now - self._known_since >= GRACE:
            failure = json.loads(self._store.get(self._key))
            self._let_others_hear()
            raise self._error(failure)

    def explain(self) -> None:
        """After a connection broke: raises with the rank that was lost, as soon as that is known."""
        deadline = time.monotonic() + EXPLAIN_SECONDS
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_CHECK_SECONDS)

    @contextlib.contextmanager
    def starting(self, link: Link | None = None) -> Iterator[None]:
        """Inside, a replica is made. With a link, whoever waits on it meanwhile checks for lost ranks too."""
        check = None if link is None else _CheckWhileWaiting(self, link)
        try:
            with self.reporting_failure():
                if check is not None:
                    progress_engine.begin(check)
                yield
        finally:
            if check is not None:
                progress_engine.abandon(check)
            self.end()

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """What fails inside, here alone, is told to the other ranks: they don't wait."""
        try:
            yield
        except ReplicaLostError as error:
            with contextlib.suppress(RuntimeError):
                if error.ranks:
                    self._report({"rank": error.ranks[0]})
            failure = self._reported()
            self._let_others_hear()
            if failure is not None:  # which says why, if that rank has said it
                raise self._error(failure) from None
            raise
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                self._report({"rank": self._rank, "why": f"{type(error).__name__}: {error}"[:_SHOWN]})
            raise

    def _let_others_hear(self) -> None:
        """Else they would find the store gone, if it is in this process, and name this rank, not the first cause."""
        if self._has_heard:
            return
        self._has_heard = True
        key, deadline = f"{self._key}/heard", time.monotonic() + HEAR_SECONDS
        with contextlib.suppress(RuntimeError):
            heard = self._store.add(key, 1)
            while heard < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.01)
                heard = self._store.add(key, 0)

    def _reported(self) -> dict[str, Any] | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._key]):
                found: dict[str, Any] = json.loads(self._store.get(self._key))
                return found
        return None

    def _report(self, failure: dict[str, object]) -> None:
        self._store.compare_set(self._key, "", json.dumps(failure))  # the first one counts

    def _error(self, failure: dict[str, Any]) -> ReplicaLostError:
        lost, why = failure["rank"], failure.get("why")
        what = (
            f"could not replicate its module: {why}" if why else "is gone: its process ended. Its own output says why"
        )
        return ReplicaLostError(
            f"rank {self._rank}: while the ranks were making a replica, rank {lost} {what}. Start the job again when "
            "that is cured.",
            [lost],
        )


class _CheckWhileWaiting:
    """A step of the progress engine that is never done: those who wait run it."""

    def __init__(self, watch: StartWatch, link: Link) -> None:
        self._watch, self._link = watch, link

    def advance(self) -> bool:
        self._watch.check()
        return False

    def needs_polling(self, link: object) -> bool:
        return link is not self._link


def _watch_neighbor(gloo: Any) -> threading.Event:
    """Set when the next rank has ended, as a receive from it shows it."""
    ended = threading.Event()
    try:
        pending = gloo.recv([torch.zeros(1, dtype=torch.uint8)], (gloo.rank() + 1) % gloo.size(), _TAG)
    except RuntimeError:
        ended.set()  # before we came
    else:
        _in_thread(gloo, pending.wait, ended.set)
    return ended


def _say_done(gloo: Any) -> None:
    if sys.is_finalizing():
        return  # no thread may begin now, and the end of this process says it all
    with contextlib.suppress(RuntimeError):  # nobody is left there to be told
        sent = gloo.send([torch.zeros(1, dtype=torch.uint8)], (gloo.rank() - 1) % gloo.size(), _TAG)
        _in_thread(gloo, sent.wait, lambda: None)


# --- threads that gloo may keep for as long as the other rank likes ---------------------------------------------

_waiting: dict[threading.Thread, tuple[Any, int]] = {}  # the connections, and the process


def _in_thread(gloo: Any, wait: Callable[[], object], failed: Callable[[], None]) -> None:
    def run() -> None:
        try:
            wait()
        except RuntimeError:
            failed()
        finally:
            _waiting.pop(thread, None)

    thread = threading.Thread(target=run, name="gradsync-start", daemon=True)
    _waiting[thread] = gloo, os.getpid()
    thread.start()


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from gloo while Python ends would abort the process (up to Python 3.12)."""
    for thread, (gloo, process) in list(_waiting.items()):
        if process == os.getpid():  # a forked child has the connections, but not the thread
            _torch.break_off(gloo)
            thread.join(1.0)
