"""Notices at once that a rank ends, or fails, while all of them make a replica.

Until the ranks have connections of our own, nothing would tell: a key that a dead rank does not write looks like one
that a slow rank has yet to write. But gloo has connections, and a receive from a rank that has ended fails at once. So
each rank has one pending from the next rank in the group, in a thread, under a tag that nobody else uses: no collective
is disturbed by it, whatever that rank does instead. Who sees its neighbor end says so in the store, where all look.

    rank 0 ── receives from ──> rank 1 ── receives from ──> rank 2 ── receives from ──> rank 0

When its replica is made a rank sends the byte that the one before it waits for. A host that vanishes ends nothing by
itself: there the kernel ends the connections, gloo's and that with the store (`keepalive.py`), within 8 s. On the side
without the store all requests to it fail, and what is named is rank 0, where it usually is.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradsync import _torch
from gradsync._torch import Store
from gradsync.errors import ReplicaLostError
from gradsync.transport import progress_engine
from gradsync.transport.early_words import EarlyWords
from gradsync.transport.keepalive import Keepalive
from gradsync.transport.link import Link
from gradsync.transport.store import NO_WORD
from gradsync.watch.node import UNREACHABLE
from gradsync.watch.notice import How, Notice
from gradsync.watch.watch import Watch

# What was sent before a rank ended may still be on its way, and is waited for so long.
GRACE = 0.3
EXPLAIN_SECONDS = 2.0
# How long a rank that raises because of another one keeps the store, which may live in its process, for the rest.
HEAR_SECONDS = 0.4
# How long the watch may need to notice what a request to the store has noticed.
NEWS_SECONDS = 1.5
# How often to look into the store.
_CHECK_SECONDS = 0.05
_TAG = 0x67720001
_SHOWN = 600  # characters of another rank's error
_GONE = "is gone: its process ended. Its own output says why"
_ENDED = "came to the end of its script, and did not make this one"
_VANISHED = "does not answer any more: its host is down, or the network is"


class StartWatch:
    """Of one rank: watches its neighbor, and passes on what any rank has reported."""

    def __init__(
        self, gloo: Any, store: Store, rank: int, size: int, number: int, keepalive: Keepalive, words: EarlyWords
    ) -> None:
        """All ranks at the same time; `number`: how often they have done so before. `gloo`: None if there is none.

        `keepalive`: on the connections of this process, released when nothing is expected from the neighbors any more;
        `words`: of ranks that raise.
        """
        self._rank, self._size = rank, size
        self._store, self._key = store, f"gradsync/start/{number}/failure"
        self._next_check = self._known_since = self._neighbor_lost_since = 0.0
        self._has_heard = False
        self._watches: list[Watch] = []
        self._words = words
        self._neighbor = _Neighbor(gloo, keepalive)
        self._awaited_by: list[int] = [(rank - 1) % size]  # a list, which the finalizer has too
        self._end = weakref.finalize(self, _end, gloo, keepalive, self._awaited_by)
        self._end.atexit = False

    def end(self) -> None:
        """This rank's replica is made, or was given up."""
        self._end()

    def give_up_on(self, ranks: Iterable[int]) -> None:
        """They never came. One of them may be who would wait for the byte: gloo would wait for it to do so."""
        for rank in ranks:
            if rank in self._awaited_by:
                self._awaited_by.remove(rank)

    def hear(self, watches: Iterable[Watch]) -> None:
        """From now on what these know is heard too."""
        self._watches = list(watches)

    def check(self) -> None:
        """Raises if a rank is known to have ended, or to have failed, and what it sent before must have come."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        try:
            self._look(now)
        except RuntimeError as error:
            raise error if isinstance(error, ReplicaLostError) else self.without_store(error) from None

    def _look(self, now: float) -> None:
        lost = self._lost_by_watch() or self._lost_neighbor(now) or _failure_in(self._words.first())
        if lost is not None:
            self._report(lost)
        if not self._store.check([self._key]):
            return
        self._known_since = self._known_since or now
        if now - self._known_since >= GRACE:
            failure = _Failure(**json.loads(self._store.get(self._key)))
            self._let_others_hear()
            self._words.heard()
            raise failure.error(self._rank)

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
            mine = self._failure_of(error)
            failure = None
            with contextlib.suppress(RuntimeError):
                failure = self._reported() if mine is None else self._report(mine)
            self._let_others_hear()
            if failure not in (None, mine):  # which says why, if that rank has said it
                raise failure.error(self._rank) from None
            raise
        except Exception as error:
            why = f"could not replicate its module: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):
                self._report(_Failure(self._rank, why[:_SHOWN]))
            raise

    def _failure_of(self, error: ReplicaLostError) -> _Failure | None:
        if not error.ranks:
            return None
        known = self._lost_by_watch()
        return known if known and known.rank in error.ranks else _Failure(error.ranks[0], _what_happened(error))

    def _lost_neighbor(self, now: float) -> _Failure | None:
        """Of a watch, news may be on their way, which say more."""
        if (lost := self._neighbor.lost) is None:
            return None
        if (told := _failure_in(self._words.of(lost.rank))) is not None:
            return told
        if not self._watches:
            return lost
        ended = {notice.rank for watch in self._watches for notice in watch.ended() if notice.how is How.ENDED}
        if lost.rank in ended:
            return _Failure(lost.rank, _ENDED)
        self._neighbor_lost_since = self._neighbor_lost_since or now
        return lost if now - self._neighbor_lost_since > GRACE else None

    def _lost_by_watch(self) -> _Failure | None:
        return _failure_known_to(self._watches)

    def without_store(self, error: RuntimeError) -> ReplicaLostError:
        """What to raise when a request to the store has failed."""
        return without_store(self._rank, self._watches, error)

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

    def _reported(self) -> _Failure | None:
        return _Failure(**json.loads(self._store.get(self._key))) if self._store.check([self._key]) else None

    def _report(self, failure: _Failure) -> _Failure:
        """What all ranks raise for: the first one that was reported."""
        return _Failure(**json.loads(self._store.compare_set(self._key, "", json.dumps(failure._asdict()))))


class _Failure(NamedTuple):
    """Why no replica can be made."""

    rank: int
    what: str
    """It did, or what happened to it."""

    def error(self, rank: int) -> ReplicaLostError:
        """What rank `rank` raises for it."""
        end = "\n" if "\n" in self.what else " " if self.what.endswith(".") else ". "
        return ReplicaLostError(
            f"rank {rank}: while the ranks were making a replica, rank {self.rank} {self.what}{end}Start the job again "
            "when that is cured.",
            [self.rank],
        )


def _failure_known_to(watches: Iterable[Watch]) -> _Failure | None:
    return _failure_in(next((watch.lost for watch in watches if watch.lost is not None), None))


def _failure_in(lost: Notice | None) -> _Failure | None:
    if lost is None:
        return None
    if lost.because:
        return _Failure(lost.because[0], f"is lost, as rank {lost.rank} has found: {lost.why}"[:_SHOWN])
    return _Failure(lost.rank, lost._replace(why=lost.why[:_SHOWN]).told().rstrip())


class _CheckWhileWaiting:
    """A step of the progress engine that is never done: those who wait run it."""

    def __init__(self, watch: StartWatch, link: Link) -> None:
        self._watch, self._link = watch, link

    def advance(self) -> bool:
        self._watch.check()
        return False

    def needs_polling(self, link: object) -> bool:
        return link is not self._link


def without_store(rank: int, watches: Sequence[Watch], error: Exception) -> ReplicaLostError:
    """What to raise when a request to the store has failed: if there is a watch, it knows why in a moment."""
    deadline = time.monotonic() + (NEWS_SECONDS if watches else 0.0)
    while (lost := _failure_known_to(watches)) is None and time.monotonic() < deadline:
        time.sleep(_CHECK_SECONDS)
    return store_lost(rank, error) if lost is None else lost.error(rank)


def store_lost(rank: int, error: Exception) -> ReplicaLostError:
    """A request to the store has failed."""
    what = _VANISHED if _is_silence(error) else "is gone: see the output of its process"
    return ReplicaLostError(
        f"rank {rank}: the store through which the ranks of the group meet {what} ({error}). It lives in the process "
        "of rank 0, unless torchrun keeps it, beside that.",
        [0],
    )


def _what_happened(error: ReplicaLostError) -> str:
    if NO_WORD in str(error):
        return "did not come within the time limit of the process group"
    return _VANISHED if _VANISHED in str(error) else _GONE


def _is_silence(error: Exception) -> bool:
    """Whether the kernel has given up a connection because the other host does not answer."""
    return any(os.strerror(number) in str(error) for number in UNREACHABLE)


class _Neighbor:
    """The next rank, as a receive from it shows it."""

    def __init__(self, gloo: Any, keepalive: Keepalive) -> None:
        self.lost: _Failure | None = None
        """Once it has ended, or its host has vanished."""
        if gloo is None:
            return
        self._rank = (gloo.rank() + 1) % gloo.size()
        try:
            pending = gloo.recv([torch.zeros(1, dtype=torch.uint8)], self._rank, _TAG)
        except RuntimeError as error:
            self._failed(error)  # before we came
        else:
            _in_thread(gloo, keepalive, pending.wait, self._failed)

    def _failed(self, error: RuntimeError) -> None:
        self.lost = _Failure(self._rank, _VANISHED if _is_silence(error) else _GONE)


def _end(gloo: Any, keepalive: Keepalive, awaited_by: list[int]) -> None:
    if gloo is not None and awaited_by and not sys.is_finalizing():  # when no thread may begin, and the end says it all
        _say_done(gloo, keepalive)
    keepalive.release()


def _say_done(gloo: Any, keepalive: Keepalive) -> None:
    with contextlib.suppress(RuntimeError):  # nobody is left there to be told
        sent = gloo.send([torch.zeros(1, dtype=torch.uint8)], (gloo.rank() - 1) % gloo.size(), _TAG)
        _in_thread(gloo, keepalive, sent.wait, lambda error: None)


# --- threads that gloo may keep for as long as the other rank likes ---------------------------------------------

_waiting: dict[threading.Thread, tuple[Any, int]] = {}  # the connections, and the process


def _in_thread(
    gloo: Any, keepalive: Keepalive, wait: Callable[[], object], failed: Callable[[RuntimeError], None]
) -> None:
    def run() -> None:
        try:
            wait()
        except RuntimeError as error:
            failed(error)
        finally:
            keepalive.release()
            _waiting.pop(thread, None)

    keepalive.hold()
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
