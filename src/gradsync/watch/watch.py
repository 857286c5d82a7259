"""What the training thread sees of the watch: raises when a rank is lost, and asks where the others are."""

from __future__ import annotations

import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gradsync import log
from gradsync.watch import last_words, wire
from gradsync.watch.node import Node
from gradsync.watch.notice import How, Notice
from gradsync.watch.position import here
from gradsync.watch.report import ANSWER_SECONDS, Row
from gradsync.watch.tree import Place, place_of
from gradsync.watch.waits import Block, Heard

CONNECT_SECONDS = 10.0
# An answer takes that of the slowest rank, and the way.
_REPORT_SECONDS = ANSWER_SECONDS + 1.0
# How long news may take to rank 0 and back.
_ORDER_SECONDS = 1.0
_log = log.logger()


class Board(Protocol):
    """Where ranks leave each other word: the group's store."""

    def publish(self, key: str, text: str) -> None: ...

    def read(self, key: str, seconds: float) -> str:
        """Raises `TimeoutError` if nobody has published it within so many seconds."""

    def check(self) -> None:
        """Raises if it has become pointless to wait for others."""


class Question(NamedTuple):
    """Where everybody is, asked for; see `Watch.ask_where`."""

    reports: int
    at: float


class Watch:
    """Held by the transports of a group, and ended with the last of them."""

    def __init__(self, node: Node) -> None:
        self.rank = node.rank
        self._node = node
        last_words.remember(node)
        self.end = weakref.finalize(self, _leave, node)
        """Gives up the replicas, and lives on."""
        self.end.atexit = False  # `last_words` does that, and says how it ended

    @property
    def lost(self) -> Notice | None:
        """The first rank that was lost."""
        return self._node.lost

    def check(self) -> None:
        """Raises if a rank is lost. One look at an attribute, for whoever calls it often."""
        if self._node.lost is not None:
            raise self._node.lost.error(self.rank)

    @property
    def notices(self) -> list[Notice]:
        """What has happened to other ranks, in the same order on all of them."""
        return [notice for notice in self._node.notices if notice.rank != self.rank]

    def ended(self) -> list[Notice]:
        """Ranks that have come to the end of their script, or have given up their replicas."""
        return [notice for notice in self._node.notices if not notice.how.is_loss]

    def ask_where(self) -> Question:
        """Asks rank 0 to collect where all ranks are; `answer_to` what this gives has the answer in a moment."""
        question = Question(self._node.reports, time.monotonic())
        self._node.ask({"is": "explain"})
        return question

    def answer_to(self, question: Question) -> tuple[Row, ...]:
        """Where the ranks are, those first that keep the others waiting; () as long as there is no answer.

        If none comes, it is known who does not answer: the rank above, or rank 0.
        """
        node = self._node
        with node.news:
            if node.reports > question.reports:
                return node.report
        above = node.above
        if above is None or time.monotonic() - question.at < _REPORT_SECONDS:
            return ()
        silent = above if node.above_heard < question.at else 0
        return Row(silent, None), Row(node.rank, here.described().aged())

    def where(self) -> tuple[Row, ...]:
        """Both, for those who have time to wait; () if rank 0 can't be asked."""
        question, node = self.ask_where(), self._node
        deadline = question.at + 1.1 * _REPORT_SECONDS
        while not (rows := self.answer_to(question)) and time.monotonic() < deadline:
            if node.above is None and not node.is_root:
                break
            with node.news:
                node.news.wait(0.05)
        return rows

    def give_up(self, why: str, blamed: Sequence[int]) -> Notice:
        """This rank has waited too long for those ranks, and raises; the others do so too.

        Several may give up at the same moment: gives the news that all ranks hear first, which may be another one's.
        """
        node, mine = self._node, Notice(self.rank, How.GAVE_UP, why, because=tuple(blamed), at=here.now.aged())
        node.announce(mine)
        with node.news:
            node.news.wait_for(lambda: node.first_loss is not None, _ORDER_SECONDS)
        if (first := node.first_loss) is not None:
            return first
        node.say(mine, last_words.SECONDS)  # who would have passed it on does not answer
        return mine

    def tell_waits(self, make_block: Callable[[], Block]) -> None:
        """Brings it to rank 0 within a second or so, unless there is no way up. Wakes nobody: training goes on."""
        if self._node.is_running:
            self._node.ask_later(lambda: make_block().pack())

    @property
    def heard(self) -> Heard:
        """What rank 0 tells all ranks of who was waited for. It does not keep the watch alive."""
        return self._node.heard

    def is_reusable_by(self, rank: int) -> bool:
        """For another replica over the same ranks: not if something has happened to one of them."""
        return self.rank == rank and not self._node.notices and self._node.is_running

    @property
    def is_complete(self) -> bool:
        return self._node.is_complete


def connect(
    board: Board, name: str, rank: int, hosts: Sequence[Sequence[int]], address: Callable[[], str]
) -> Watch | None:
    """All ranks together. `hosts`: who shares one; `address`: under which leaders of other hosts reach this one.

    What can't be connected is not watched, and said in the log: training goes on.
    """
    place = place_of(rank, hosts)
    if place.above is None:
        board.publish(f"{name}/token", secrets.token_hex(32))
    listeners = _listen(board, f"{name}/{rank}", place, address)
    node = None
    try:
        token = bytes.fromhex(board.read(f"{name}/token", CONNECT_SECONDS))
        everybody = [one for ranks in hosts for one in ranks]
        node = Node(rank, everybody, place, token, listeners, lambda other: place_of(other, hosts).above)
        if place.above is not None:
            kind = "there" if place.above_is_remote else "here"
            where = board.read(f"{name}/{place.above}/{kind}", CONNECT_SECONDS)
            node.join_above(reach(where, token, rank, CONNECT_SECONDS, board.check))
    except OSError as error:
        _log.warning(
            "rank %d: the watch could not be connected%s (%s): what happens to ranks there is told by the process "
            "group's own errors and time limits only",
            rank,
            "" if place.above is None else f" with rank {place.above}",
            error,
        )
    except BaseException:
        for listener in listeners:
            listener.close()
        if node is not None:
            _leave(node)  # not without a word: those below would take this process for lost
        raise
    if node is None:
        for listener in listeners:
            listener.close()
    return None if node is None else Watch(node)


def _listen(board: Board, key: str, place: Place, address: Callable[[], str]) -> list[socket.socket]:
    """For those below this rank, who learn from the board where, or that they can't be heard."""
    made: list[socket.socket] = []
    for kind, awaited in (("here", place.members), ("there", place.leaders)):
        if not awaited:
            continue
        try:
            listener, where = wire.listen_here() if kind == "here" else wire.listen_on(address())
            made.append(listener)
        except OSError as error:
            where = f"none:{error}"
        board.publish(f"{key}/{kind}", where)
    return made


def reach(
    address: str, token: bytes, rank: int, seconds: float, check: Callable[[], None] = lambda: None
) -> socket.socket:
    """Connects. Who is turned away comes again: in a crowd, a listener may take it for one that has nothing to say.

    So does who finds its queue full, which on a Unix socket is an error at once.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            return wire.connect_to(address, token, rank, left, check)
        except (wire.TurnedAwayError, ConnectionResetError, BrokenPipeError, BlockingIOError):
            if left <= 2 * pause:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _leave(node: Node) -> None:
    node.say(Notice(node.rank, How.LEFT, rounds=tuple(here.rounds.items())), seconds=0.2)
    node.end()
