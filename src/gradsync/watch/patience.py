"""One wait for other ranks that takes long: it ends when a rank is lost, explains itself, and has a limit."""

from __future__ import annotations

import time
from collections.abc import Collection

from gradsync import log
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.watch import settings
from gradsync.watch.explanation import culprits, explain
from gradsync.watch.notice import BY_EXIT, How, Notice
from gradsync.watch.position import here
from gradsync.watch.report import Row
from gradsync.watch.watch import Question, Watch

# What a rank sent before it ended may still be on its way.
_GRACE = 1.0
# How long news of a loss may take, after a connection broke.
_NEWS_SECONDS = 2.0
_log = log.logger()


class Patience:
    """Made when a wait begins to take long, asked every quarter of a second or so, and told when it is over."""

    def __init__(self, watch: Watch, limit: float, what: str = "the other ranks", waited: float = 0.0) -> None:
        """`what`: is waited for; `waited`: for so many seconds already."""
        self._watch, self._limit, self._what = watch, limit, what
        self._began = time.monotonic() - waited
        self._explain_after = min(settings.explain_after(), limit)
        self._question: Question | None = None
        self._rows: tuple[Row, ...] = ()
        self._known_since = 0.0
        here.begin_wait(what)

    def over(self) -> None:
        here.end_wait()

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> None:
        """Raises if waiting has become pointless; asks what others do when it has taken long."""
        self.raise_if_in_vain()
        self.explain_in_time()

    def raise_if_in_vain(self) -> None:
        waited = self.waited
        if cause := _cause(self._watch):
            self._known_since = self._known_since or waited
            if self._watch.lost is not None or waited - self._known_since > _GRACE:
                raise _error(self._watch, cause)

    def explain_in_time(self) -> None:
        if self.waited > self._explain_after and not self._rows:
            self._explain()

    def _explain(self) -> None:
        """Asks, and as soon as there is an answer says in the log what it is; once."""
        if self._question is None:
            self._question = self._watch.ask_where()
        self._rows = self._watch.answer_to(self._question)
        if self._rows:
            _log.warning("%s", self._text())

    def too_long(self, awaited: Collection[int] = ()) -> Exception:
        """The limit has been reached: says so to all ranks, so that all of them raise the same."""
        self._rows = self._watch.where() or self._rows
        if self._watch.lost is not None:  # meanwhile; another rank that waited may have been quicker
            return self._watch.lost.error(self._watch.rank)
        text = (
            f"{self._text()}\nThe time limit of the process group is {self._limit:g} s: if that is too short, give "
            "init_process_group a longer timeout."
        )
        blamed = culprits(self._rows) or sorted(awaited)
        first = self._watch.give_up(text, blamed)
        return RoundTimeoutError(text, blamed) if first.rank == self._watch.rank else first.error(self._watch.rank)

    def _text(self) -> str:
        why = explain(self._rows, self._watch.ended()) or "Nobody says where the other ranks are."
        return f"rank {self._watch.rank} has waited {self.waited:.0f} s, {here.described()}:\n{why}"


def lost_meanwhile(watch: Watch, seconds: float = _NEWS_SECONDS) -> Exception | None:
    """A connection broke, or a collective failed: what to raise for it, if a rank is lost; news may take so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if cause := _cause(watch):
            return _error(watch, cause)
        time.sleep(0.01)
    return None


def after_break(watch: Watch, error: Exception) -> Exception:
    """What to raise for it in any case."""
    if (lost := lost_meanwhile(watch)) is not None:
        return lost
    if ended := watch.ended():
        return _error(watch, ended[0])
    if isinstance(error, ReplicaLostError):
        return error
    here.begin_wait("the other ranks")
    rows = watch.where()
    here.end_wait()
    if not (blamed := culprits(rows)):
        return error
    return ReplicaLostError(
        f"rank {watch.rank}: a connection broke, though no process has ended: a rank has given up its replica, or the "
        f"network is at fault ({error}).\n{explain(rows, watch.ended())}",
        blamed,
    )


def _cause(watch: Watch) -> Notice | None:
    """The first thing that has happened for which a wait is in vain: a loss, or the end of a rank before this round."""
    at = here.now
    for notice in watch.notices:
        if notice.how.is_loss or dict(notice.rounds).get(at.serial, 0) <= at.round:
            return notice
    return None


def _error(watch: Watch, notice: Notice) -> Exception:
    if notice.how.is_loss:
        return notice.error(watch.rank)
    at, rank, rounds = here.now, watch.rank, dict(notice.rounds).get(here.now.serial, 0)
    if notice.how is How.LEFT:
        what, cure = "gave up its replica", "Keep it, on all ranks, as long as any of them trains."
    else:
        what = "ended its training"
        cure = "Give all ranks equally many batches, or use gradsync.uneven(loader, model)."
    after = f"after round {rounds - 1}" if rounds else "before its first round"
    if notice.why == BY_EXIT:
        after += ", by sys.exit"
        cure = (
            f"If that was because of an error, rank {notice.rank}'s own output says so: Python does not tell with "
            f"which code. If not, {cure[0].lower()}{cure[1:]}"
        )
    if not at.module:
        here_is = "waits for it"
    elif rounds > at.round:
        here_is = f"is {at}, and waits for it"
    else:
        here_is = f"is in round {at.round} of {at.module}"
    return ReplicaLostError(
        f"rank {rank}: rank {notice.rank} {what} {after}; rank {rank} {here_is}. {cure}", [notice.rank]
    )
