"""The loggers of gradsync. Each of their records has a `rank`, so that a user's format may say `%(rank)s`.

No handler is installed, not even one that does nothing: where a program has set up no logging, Python itself writes
warnings to standard error, and a rank that waits for a lost one must not be silent. No level is set either: the root
logger's counts, which is WARNING unless the program says otherwise.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from gradsync import launchers

NAME = "gradsync"
UNKNOWN = -1
_last = UNKNOWN


def logger(name: str = NAME) -> logging.Logger:
    """The only way to one: a filter of `gradsync` would not see the records of `gradsync.watch`."""
    assert name == NAME or name.startswith(f"{NAME}."), name
    found = logging.getLogger(name)
    found.addFilter(add_rank)  # twice the same is once
    return found


def add_rank(record: logging.LogRecord) -> bool:
    """As a filter that lets all pass. A rank that was given (`extra={"rank": 3}`) stays."""
    vars(record).setdefault("rank", rank())
    return True


def rank() -> int:
    """In the default group; before there is one, as the launcher says; after its end, as it was. Else -1."""
    global _last
    if dist.is_available() and dist.is_initialized():
        _last = dist.get_rank()
    return _last if _last != UNKNOWN else launchers.rank(os.environ, UNKNOWN)
