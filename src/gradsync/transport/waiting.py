"""Waits for c10d's work, and hears Ctrl-C meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from gradsync.errors import GradsyncError
from gradsync.transport import progress_engine
from gradsync.watch.patience import Patience, after_break
from gradsync.watch.watch import Watch

PAUSE = 200e-6
# c10d waits without coming back to Python, where signals are handled; so it is asked to come back so often.
_SLICE = timedelta(seconds=0.25)


def finish(work: dist.Work, on_cpu: bool, find_watch: Callable[[], Watch | None], limit: float) -> None:
    """Waits, and meanwhile advances what the other ranks of this host may wait for: they could be one step behind.

    `on_cpu`: for tensors on the CPU. Elsewhere only streams are ordered, and this process does not wait at all. With a
    watch, a wait in vain says why: who is lost, or where the others are when it has taken `limit` seconds.
    """
    if not on_cpu or type(work) is not dist.Work:  # one written in Python may take no time, or mean to give up
        while not progress_engine.is_idle() and not work.is_completed():
            _advance_slice(work)
        work.wait()
        return
    try:
        if not _finished_in_slice(work):
            _finish_slowly(work, find_watch, limit)
    except GradsyncError:
        raise
    except RuntimeError as error:
        raise (error if (watch := find_watch()) is None else after_break(watch, error)) from None
    except BaseException as error:
        raise error from None  # not about the last slice of time


def _finish_slowly(work: dist.Work, find_watch: Callable[[], Watch | None], limit: float) -> None:
    began = time.monotonic() - _SLICE.total_seconds()
    while (watch := find_watch()) is None:  # none at all, or not yet
        if _finished_in_slice(work):
            return
    patience = Patience(watch, limit, waited=time.monotonic() - began)
    try:
        while not _finished_in_slice(work):
            patience.look()
            if patience.waited > limit:
                raise patience.too_long()
    except GradsyncError:
        raise
    except RuntimeError:
        if watch.lost is None and patience.waited > limit - _SLICE.total_seconds():  # c10d's own limit is the same
            raise patience.too_long() from None
        raise
    finally:
        patience.over()


def _finished_in_slice(work: dist.Work) -> bool:
    """Waits for one slice of time. Raises what went wrong with the work."""
    if not progress_engine.is_idle() and not _advance_slice(work):
        return False
    try:
        return work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()  # again: it may have finished at the last moment


def _advance_slice(work: dist.Work) -> bool:
    """Advances what is under way, for a slice of time at most; whether there is nothing left to advance or to await."""
    until = time.monotonic() + _SLICE.total_seconds()
    while not progress_engine.is_idle() and not work.is_completed():
        progress_engine.progress()
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
    return True
