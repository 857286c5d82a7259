"""What a rank says when its process ends: how, and with which exception.

Python keeps the exception that nobody caught, and runs what is registered for the end of a process; so nothing of the
user's is replaced. Children of `multiprocessing` (`mp.spawn`) leave without that, but have an end of their own.

Of `sys.exit` it keeps nothing, neither the exception nor the code. But the outermost frame of a script, if somebody
holds it, shows whether it came to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
import weakref
from opcode import opname
from types import FrameType

from gradsync.errors import ReplicaLostError, RoundTimeoutError, UnfinishedRoundError
from gradsync.watch import error_file, position
from gradsync.watch.node import Node
from gradsync.watch.notice import BY_EXIT, MOST_TEXT, How, Notice

SECONDS = 0.5  # for them to leave
_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
_registered_in = 0  # the process
_outermost: FrameType | None = None  # of the main thread


def remember(node: Node) -> None:
    """From now on its neighbors hear how this process ends."""
    global _registered_in, _outermost
    _nodes.add(node)
    if _registered_in != os.getpid():
        _outermost = _bottom(sys._current_frames().get(threading.main_thread().ident or 0))
        _registered_in = os.getpid()
        atexit.register(_say, os.getpid())
        if (register := getattr(threading, "_register_atexit", None)) is not None:  # of Python 3.9 and later
            with contextlib.suppress(RuntimeError):  # it ends already
                register(_say_before_threads, os.getpid())
        if multiprocessing.process.parent_process() is not None:
            multiprocessing.util.Finalize(None, _say, args=(os.getpid(),), exitpriority=1000)


def _say(process: int) -> None:
    if process != os.getpid():
        return
    error = uncaught()
    if error is not None:
        with contextlib.suppress(Exception):  # before the others can raise for it
            error_file.write(error, fell_with_others=bool(ranks_blamed(error)))
    for node in list(_nodes):
        node.say(words_for(error, node.rank), SECONDS)
        node.end()
    _nodes.clear()


def _say_before_threads(process: int) -> None:
    """Python is about to wait for the user's threads, perhaps for ever, and only then comes to `_say`.

    One of them may go on with the training: so nothing is said if another thread than the main one has trained.
    """
    error = uncaught()
    if process == os.getpid() and error is not None and not position.here.trains_elsewhere:
        for node in list(_nodes):
            node.say(words_for(error, node.rank), SECONDS)


def tells_others() -> bool:
    """Whether this process has, or has had, a watch over which its end is told."""
    return _registered_in == os.getpid()


def uncaught() -> BaseException | None:
    """What ends this process, if it is an exception."""
    error: BaseException | None = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # a notebook's latest one did not end it
        error = getattr(sys, "last_value", None)
    while isinstance(error, SystemExit) and error.__context__ is not None:  # as `mp.spawn` ends after an exception
        error = error.__context__
    return None if isinstance(error, SystemExit) and not error.code else error


def _was_left() -> bool:
    """Whether the script was left from inside, by `sys.exit`, before it came to its end."""
    frame = _outermost
    if frame is None or frame.f_lasti < 0 or _bottom(sys._getframe()) is frame:  # it still runs
        return False
    return not opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _bottom(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def words_for(error: BaseException | None, rank: int) -> Notice:
    at = position.here.now.aged()
    if error is None:
        why = BY_EXIT if _was_left() else ""
        return Notice(rank, How.ENDED, why, at=at, rounds=tuple(position.here.rounds.items()))
    because = ranks_blamed(error)
    try:
        why = f"{type(error).__name__}: {error}"[:MOST_TEXT].removesuffix(": ")
    except Exception:  # in its `__str__`
        why = type(error).__name__
    return Notice(rank, How.RAISED, why, tuple(position.lines_of(error)), because, at)


def ranks_blamed(error: BaseException) -> tuple[int, ...]:
    """Others, if it is one that a rank raises because of them."""
    return tuple(error.ranks) if isinstance(error, (ReplicaLostError, RoundTimeoutError, UnfinishedRoundError)) else ()
