"""One rank's thread in the watch: it keeps the connections, passes news on, and answers for the training thread.

The thread sleeps until something comes, and once a second tells where this rank is. It never touches a tensor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from gradsync import log
from gradsync.watch import position, wire
from gradsync.watch.ledger import Ledger
from gradsync.watch.notice import How, Notice
from gradsync.watch.position import Position
from gradsync.watch.report import Row, Survey, rows_in
from gradsync.watch.tree import Place
from gradsync.watch.visitor import MOST_SILENT, Visitor
from gradsync.watch.waits import Heard
from gradsync.watch.wire import Channel, Message

PUSH_SECONDS = 1.0
_MOST_FAILURES = 10
# What the kernel says of a host that does not answer: it keeps to what it heard last, from its own routes too.
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
# And of a process or a system that has no descriptor for one more connection. Looked at again after so long.
_EXHAUSTED, _EXHAUSTED_SECONDS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM), 0.05
_log = log.logger()


class Node:
    """This rank's part of the tree."""

    def __init__(
        self,
        rank: int,
        ranks: Iterable[int],
        place: Place,
        token: bytes,
        listeners: Iterable[socket.socket],
        above_of: Callable[[int], int | None] = lambda rank: None,
    ) -> None:
        """`above_of`: over which rank another one is heard."""
        self.rank, self._above_of = rank, above_of
        self._ranks = frozenset(ranks)
        self._place, self._token = place, token
        self.notices: list[Notice] = []
        """What is known to have happened to other ranks, in the order in which rank 0 heard of it."""
        self.lost: Notice | None = None
        """The first loss."""
        self.reports = 0
        """How many there were; the latest is `report`."""
        self.report: tuple[Row, ...] = ()
        self.above_heard = 0.0
        """When the rank above last said that it has heard a question."""
        self.heard = Heard()
        """Who was waited for, and how long."""
        self.news = threading.Condition()
        self._channels: dict[int, Channel] = {}
        self._visitors: dict[socket.socket, Visitor] = {}
        self._expected = set(place.below)
        self._seen: dict[int, tuple[Position, float]] = {}  # where neighbors were, and when they said so
        self._words: dict[int, Notice] = {}  # what neighbors said before they went
        self._survey: Survey | None = None  # while rank 0 collects a report
        self._ledger = Ledger(len(self._ranks))  # of rank 0
        self._pushed, self._push_at = position.here.now, 0.0
        self._actions: deque[Callable[[], None]] = deque()  # of other threads, done by this one
        self._stop = False
        self._process = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._waker, waker = socket.socketpair()
        waker.setblocking(False)
        self._selector.register(waker, selectors.EVENT_READ, lambda: waker.recv(4096))
        self._wakened = waker
        self._listeners = list(listeners)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, lambda one=listener: self._accept(one))
        self._thread = threading.Thread(target=self._run, name="gradsync-watch", daemon=True)
        self._thread.start()
        _nodes.add(self)

    # --- for the training thread -----------------------------------------------------------------

    def join_above(self, connected: socket.socket) -> None:
        """The connection with the rank above is made."""
        assert self._place.above is not None
        channel = Channel(connected, self._place.above)
        self._do(lambda: self._add(channel))

    def ask(self, message: Message) -> None:
        """Sends it up, to rank 0."""
        self._do(lambda: self._up(message))

    def ask_later(self, make: Callable[[], Message]) -> None:
        """The same for what is not urgent: made and sent by the thread when it looks up next, within a second."""
        self._actions.append(lambda: self._up(make()))

    def say(self, words: Notice, seconds: float) -> None:
        """Last words, to all neighbors; returns when they have left, or after so many seconds.

        Not only upward: this process may end before they have come back, and those below would miss them.
        """
        if not self.is_running:
            return
        done = threading.Event()

        def tell() -> None:
            for channel in self._channels.values():
                channel.send({**words.pack(), "is": "words"})
            done.set()

        self._do(tell)
        deadline = time.monotonic() + seconds
        done.wait(seconds)
        while time.monotonic() < deadline and any(one.has_more_to_send for one in list(self._channels.values())):
            time.sleep(0.01)

    def announce(self, notice: Notice) -> None:
        """News of this rank, which lives on: it comes back to all, in the order that rank 0 gives to news."""
        self._do(lambda: self._tell(notice, from_above=False))

    @property
    def first_loss(self) -> Notice | None:
        """In the order in which all ranks hear of them; it may be that of this rank itself."""
        return next((notice for notice in self.notices if notice.how.is_loss), None)

    def end(self) -> None:
        """Closes all connections."""
        if self.is_running:
            self._stop = True
            self._wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)

    @property
    def above(self) -> int | None:
        """The rank over which this one hears from the others, if that is there."""
        return self._place.above if self._place.above in self._channels else None

    @property
    def is_root(self) -> bool:
        return self._place.above is None

    @property
    def is_running(self) -> bool:
        """Not in a forked child."""
        return self._process == os.getpid() and self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """Whether all neighbors are connected."""
        above = self._place.above
        return not self._expected and (above is None or above in self._channels or bool(self.notices))

    def close_in_child(self) -> None:
        """A forked child keeps nothing open: else nobody would learn of the death of the rank itself."""
        for channel in self._channels.values():
            channel.close()
        for one in (*self._listeners, *self._visitors, self._waker, self._wakened):
            one.close()
        self._selector.close()

    def _do(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            failures = 0
            while not self._stop and failures < _MOST_FAILURES:
                try:
                    self._run_once()
                except Exception:  # a mistake of ours must not look like the loss of this rank
                    failures += 1
                    _log.exception("rank %d: the watch failed", self.rank)
            if not self._stop:
                for channel in self._channels.values():
                    channel.send({**Notice(self.rank, How.LEFT, at=None).pack(), "is": "words"})
        finally:
            for one in (*self._listeners, *self._visitors):
                one.close()
            for channel in self._channels.values():
                channel.flush()
                channel.close()
            self._selector.close()
            self._waker.close()
            self._wakened.close()

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            key.data()
        while self._actions:
            self._actions.popleft()()
        self._watch_times()

    def _patience(self) -> float:
        return 0.1 if self._visitors or self._survey is not None or self._sending() else PUSH_SECONDS

    def _sending(self) -> bool:
        return any(channel.has_more_to_send for channel in self._channels.values())

    def _watch_times(self) -> None:
        now = time.monotonic()
        for channel in self._channels.values():
            if channel.has_more_to_send:
                channel.flush()
        for visitor in [one for one in self._visitors.values() if one.until < now]:
            self._turn_away(visitor)
        if self._survey is not None and self._survey.is_over(now):
            survey, self._survey = self._survey, None
            self._take_report(survey.report(notice.rank for notice in self.notices))
        for message in self._ledger.news(now):
            self._take_totals(message)
        at = position.here.now
        if at is not self._pushed and now >= self._push_at:
            self._pushed, self._push_at = at, now + PUSH_SECONDS
            for channel in self._channels.values():
                channel.send({"is": "position", "at": at.aged().pack()})

    # --- connections -----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._make_room()
            return
        if len(self._visitors) >= MOST_SILENT:
            self._make_room()
        visitor = Visitor(connected)
        self._visitors[connected] = visitor
        self._selector.register(connected, selectors.EVENT_READ, lambda: self._hear(visitor))

    def _hear(self, visitor: Visitor) -> None:
        """Part of the answer to the challenge, perhaps the last one."""
        if visitor.socket not in self._visitors:  # it had to make room for another one at the same moment
            return
        try:
            if not visitor.has_answered():
                return
            rank, proof = wire.check_answer(visitor.said, visitor.answered, self._token)
            if rank not in self._expected:
                raise wire.WireError
            visitor.socket.send(proof, socket.MSG_NOSIGNAL)
            wire.keep_alive(visitor.socket)
        except BlockingIOError:
            return
        except OSError:
            self._turn_away(visitor)
            return
        self._selector.unregister(visitor.socket)
        del self._visitors[visitor.socket]
        self._expected.discard(rank)
        self._add(Channel(visitor.socket, rank))
        if not self._expected:
            self._close_listeners()

    def _make_room(self) -> None:
        """The visitor that has said nothing for longest goes; if there is none, somebody else has to free a descriptor.

        Until then whoever waits at a listener would wake this thread again at once: it sleeps for a moment.
        """
        if self._visitors:
            self._turn_away(next(iter(self._visitors.values())))
        else:
            time.sleep(_EXHAUSTED_SECONDS)

    def _turn_away(self, visitor: Visitor) -> None:
        self._selector.unregister(visitor.socket)
        del self._visitors[visitor.socket]
        visitor.socket.close()

    def _close_listeners(self) -> None:
        """Everybody is here: whoever else comes finds nothing to talk to."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        for visitor in list(self._visitors.values()):
            self._turn_away(visitor)

    def _add(self, channel: Channel) -> None:
        self._channels[channel.rank] = channel
        self._selector.register(channel.socket, selectors.EVENT_READ, lambda: self._read(channel))
        for notice in self.notices:  # of before they were connected
            channel.send(notice.pack())
        with self.news:
            self.news.notify_all()

    def _read(self, channel: Channel) -> None:
        try:
            for message in channel.receive():
                self._take(channel, message)
        except (OSError, LookupError, TypeError, ValueError, OverflowError) as error:  # or what it says makes no sense
            self._selector.unregister(channel.socket)
            channel.close()
            del self._channels[channel.rank]
            self._ended(channel.rank, vanished=isinstance(error, OSError) and error.errno in UNREACHABLE)

    def _ended(self, rank: int, vanished: bool) -> None:
        """The connection with a neighbor is over."""
        words = self._words.get(rank)
        how = How.UNREACHABLE if vanished else How.GONE
        notice = Notice(rank, how, at=self._last_seen(rank)) if words is None else words
        self._tell(notice, from_above=rank == self._place.above)

    def _last_seen(self, rank: int) -> Position | None:
        """With how long ago it was there; where ranks are is told once a second."""
        if rank not in self._seen:
            return None
        at, when = self._seen[rank]
        return at._replace(since=time.monotonic() - when)

    # --- news ------------------------------------------------------------------------------------

    def _take(self, channel: Channel, message: Message) -> None:
        kind, from_above = message["is"], channel.rank == self._place.above
        if kind == "position":
            self._seen[channel.rank] = Position.unpack(message["at"]), time.monotonic()
        elif kind == "words":
            words = Notice.unpack(message)._replace(rank=channel.rank)
            self._words[channel.rank] = words
            if words.how.is_loss:
                self._tell(words, from_above)
        elif kind == "lost":
            self._tell(Notice.unpack(message), from_above)
        elif kind == "explain":
            channel.send({"is": "heard"})
            self._up(message)
        elif kind == "heard" and from_above:
            self.above_heard = time.monotonic()
        elif kind == "where" and from_above:
            self._answer(message)
        elif kind in ("here", "waits"):
            self._up(message)
        elif kind == "report" and from_above:
            self._take_report(message)
        elif kind == "totals" and from_above:
            self._take_totals(message)

    def _tell(self, notice: Notice, from_above: bool) -> None:
        """Up to rank 0, which puts news in order, and from there down; if there is no way up any more, only down."""
        if not from_above and self._place.above in self._channels:
            self._channels[self._place.above].send(notice.pack())
        else:
            self._accept_notice(notice)

    def _accept_notice(self, notice: Notice) -> None:
        if any(one.rank == notice.rank for one in self.notices):
            return
        self._down(notice.pack())
        with self.news:
            self.notices.append(notice)
            if self.lost is None and notice.how.is_loss and notice.rank != self.rank:
                self.lost = notice
            self.news.notify_all()

    def _down(self, message: Message) -> None:
        for rank, channel in list(self._channels.items()):
            if rank != self._place.above:
                channel.send(message)

    def _up(self, message: Message) -> None:
        if self._place.above is None:
            self._at_root(message)
        elif (above := self._channels.get(self._place.above)) is not None and (
            message["is"] != "waits" or not above.is_backed_up  # these are many, and must not crowd out a loss
        ):
            above.send(message)

    # --- where everybody is ----------------------------------------------------------------------

    def _at_root(self, message: Message) -> None:
        if message["is"] == "explain" and self._survey is None:
            self._survey = Survey(self._ranks, self._above_of)
            self._answer({"is": "where"})
        elif message["is"] == "here" and self._survey is not None:
            self._survey.take(message)
        elif message["is"] == "waits":
            self._ledger.take(message)

    def _answer(self, question: Message) -> None:
        self._down(question)
        at = position.here.described().aged()
        stack = [] if at.awaits else position.stack()
        self._up({"is": "here", "rank": self.rank, "at": at.pack(), "line": position.user_line(), "stack": stack})

    def _take_report(self, message: Message) -> None:
        self._down(message)
        with self.news:
            self.report = rows_in(message)
            self.reports += 1
            self.news.notify_all()

    def _take_totals(self, message: Message) -> None:
        self._down(message)
        self.heard.take(message)


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _in_child() -> None:
    for node in _nodes:
        node.close_in_child()


os.register_at_fork(after_in_child=_in_child)
