"""Waits for what c10d has under way, and hears Ctrl-C meanwhile."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from gradsync.transport import under_way

PAUSE = 200e-6
# c10d waits without coming back to Python, where signals are handled; so it is asked to come back so often.
_SLICE = timedelta(seconds=0.5)


def finish(work: dist.Work, on_host: bool) -> None:
    """Waits, and meanwhile does for the ranks of this host what they may wait for: they could be one step behind.

    `on_host`: for tensors on the CPU. Elsewhere only streams are ordered, and the host does not wait at all.
    """
    while under_way.anything() and not work.is_completed():
        under_way.progress()
        time.sleep(PAUSE)
    if not on_host or type(work) is not dist.Work:  # one written in Python may take no time, or mean to give up
        work.wait()
        return
    try:
        while not _came(work):
            pass
    except BaseException as error:
        raise error from None  # not about the last slice of time


def _came(work: dist.Work) -> bool:
    """Within a slice of time. Raises what went wrong with it."""
    try:
        return work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()  # again: it may have come at the last moment
